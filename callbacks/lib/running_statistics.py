"""Running statistics of batch normalisation that follow an update's micro-batches in the order of their numbers.

A layer normalises over its micro-batch, wherever that is computed. Its running mean and variance, though, are a moving
average over micro-batches, so their bits depend on the order, and each rank of DDP sees its own only. Here each
micro-batch leaves its statistics as they are; at the update's end the ranks hand them round, and each rank makes the
moving average of all, in order.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from callbacks.lib.batch_norm import running_statistics
from callbacks.lib.tree_sum import range_of_rank

__all__ = ["OrderedStatistics"]


class OrderedStatistics:
    """The running statistics of layers over the updates of a run.

    Call `collect` after each forward pass of a micro-batch and `finish` after the update's last one. In between the
    layers have the running statistics of the update before. A layer that is called several times within a micro-batch
    counts its last call. `release` ends it.

    Args:
        layers: of these, the ones that train and track statistics.
        world_size: the number of processes that share an update.
        group: these processes; by default all.
    """

    def __init__(self, layers: Iterable[_BatchNorm], world_size: int = 1, group: Any = None) -> None:
        self.layers = [layer for layer in layers if layer.training and layer.track_running_stats]
        self.world_size, self.group = world_size, group
        self._buffers = [buffer for layer in self.layers for buffer in running_statistics(layer)[:2]]
        self._counters = [running_statistics(layer)[2] for layer in self.layers]
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self._running = self._flat()
        self._counts = [counter.clone() for counter in self._counters]
        self._collected: list[Tensor] = []
        self._momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            layer.momentum = 1.0  # After a forward pass the buffers hold the statistics of its micro-batch.

    def _flat(self) -> Tensor:
        return torch.cat([buffer.float() for buffer in self._buffers]) if self._buffers else torch.zeros(0)

    def collect(self, counts: bool = True) -> None:
        """Take a micro-batch's statistics; `counts` is False for one without samples."""
        if counts:
            self._collected.append(self._flat())
        self._write()

    def _write(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, list(self._running.split(self._sizes)))
            torch._foreach_copy_(self._counters, self._counts)

    def finish(self, count: int) -> None:
        """Make the moving average over an update's `count` micro-batches, in the order of their numbers."""
        for statistics in self._collected if self.world_size == 1 else self._of_all_ranks(count):
            torch._foreach_add_(self._counts, 1)
            self._running.lerp_(statistics, self._weights())
        self._collected = []
        self._write()

    def _of_all_ranks(self, count: int) -> list[Tensor]:
        steps = -(-count // self.world_size)
        mine = torch.stack(self._collected + [self._running] * (steps - len(self._collected))).flatten()
        every = mine.new_empty(self.world_size * len(mine))
        dist.all_gather_into_tensor(every, mine, group=self.group)
        by_rank = every.view(self.world_size, steps, -1)
        ranges = [range_of_rank(count, rank, self.world_size) for rank in range(self.world_size)]
        return [by_rank[rank, step] for rank, (first, stop) in enumerate(ranges) for step in range(stop - first)]

    def _weights(self) -> Tensor:
        """How much of the newest statistics each value takes: the momentum of its layer, or the mean of all so far."""
        weights = [
            torch.full((), momentum) if momentum is not None else 1 / count.float().cpu()
            for momentum, count in zip(self._momenta, self._counts, strict=True)
        ]
        each = torch.stack(weights).repeat_interleave(2)
        return each.repeat_interleave(torch.tensor(self._sizes)).to(self._running.device)

    def release(self) -> None:
        """Give the layers their momenta back."""
        for layer, momentum in zip(self.layers, self._momenta, strict=True):
            layer.momentum = momentum
