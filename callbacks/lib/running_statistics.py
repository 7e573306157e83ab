"""Running statistics of batch normalisation that follow an update's micro-batches in the order of their numbers.

A layer normalises over its micro-batch, wherever that is computed. Its running mean and variance, though, are a moving
average over micro-batches, so their bits depend on the order, and each rank of DDP sees its own only. Here each
micro-batch leaves its statistics as they are; at the update's end the ranks hand them round, and each rank makes the
moving average of all, in order.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from callbacks.lib.batch_norm import plain_layers, running_statistics

__all__ = ["OrderedStatistics"]


class OrderedStatistics:
    """The running statistics of BatchNorm layers over an update.

    `GradientSum.micro_batch` calls what follows: `begin` before each forward pass of a micro-batch, `collect` after it,
    `restore` after its backward pass, and `finish` after the last one of the update. In between the layers have the
    running statistics of the update before, and within a micro-batch its own. A layer that is called several times
    within a micro-batch counts its last call.
    Synchronised layers and those that do not train are left alone.

    Args:
        module: layers are looked for in it.
        world_size: the number of processes that share an update.
        group: these processes; by default all.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> statistics = OrderedStatistics(layer)
        >>> for values in ([[1.0], [3.0]], [[5.0], [7.0]]):
        ...     statistics.begin()
        ...     outputs = layer(torch.tensor(values))
        ...     statistics.collect()
        ...     statistics.restore()
        >>> statistics.finish(steps=2)
        >>> layer.running_mean
        tensor([0.7800])
    """

    def __init__(self, module: nn.Module, world_size: int = 1, group: Any = None) -> None:
        self.world_size, self.group = world_size, group
        self._candidates = plain_layers(module)
        self._layers: list[_BatchNorm] = []
        self._collected: list[Tensor] = []
        self._by_rank: list[Tensor] = []
        self._work: Any = None
        self._is_open = self._is_within = False

    def begin(self) -> None:
        """Before the forward pass of a micro-batch; the layers that train in the first of an update count in all."""
        if not self._is_open:
            self._layers = [layer for layer in self._candidates if layer.training and layer.track_running_stats]
            statistics = [running_statistics(layer) for layer in self._layers]
            self._buffers = [buffer for mean, variance, _ in statistics for buffer in (mean, variance)]
            self._counters = [counter for _, _, counter in statistics]
            self._counts = [counter.clone() for counter in self._counters]
            self._sizes = [buffer.numel() for buffer in self._buffers]
            wide = any(buffer.dtype == torch.float64 for buffer in self._buffers)
            self._dtype = torch.float64 if wide else torch.float32
            self._running, self._collected, self._is_open = self._flat(), [], True
        self._momenta, self._is_within = [layer.momentum for layer in self._layers], True
        for layer in self._layers:
            vars(layer)["momentum"] = 1.0  # After a forward pass the buffers hold the statistics of its micro-batch.

    def _flat(self) -> Tensor:
        # In float32 at least, where layers are in half precision.
        return torch.cat([buffer.to(self._dtype) for buffer in self._buffers]) if self._buffers else torch.zeros(0)

    def collect(self) -> None:
        """Take the statistics of a micro-batch, after its forward pass; not to be called for one without samples."""
        self._collected.append(self._flat())

    def repeated(self) -> list[_BatchNorm]:
        """The layers that were called more than once since the update began; for its first micro-batch."""
        calls = zip(self._layers, self._counters, self._counts, strict=True)
        return [layer for layer, now, before in calls if int(now) > int(before) + 1]

    def restore(self) -> None:
        """Give the layers back what they had before the micro-batch; outside of one, do nothing."""
        if not self._is_within:
            return
        self._is_within = False
        for layer, momentum in zip(self._layers, self._momenta, strict=True):
            vars(layer)["momentum"] = momentum
        self._write()

    def _write(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, list(self._running.split(self._sizes)))
            torch._foreach_copy_(self._counters, self._counts)

    def send(self, steps: int) -> None:
        """Begin to hand an update's statistics round, after its last forward pass; `finish` does so otherwise.

        Args:
            steps: of each rank in the update.
        """
        if not self._buffers:
            return
        surplus = steps - len(self._collected)
        mine = torch.stack(self._collected + [self._running] * surplus)
        # Beside them 1, or 0 for a step without samples.
        is_real = (torch.arange(steps, device=mine.device) < steps - surplus).to(mine.dtype)
        mine = torch.cat((mine, is_real.unsqueeze(1)), 1)
        self._by_rank, self._work = [mine], None
        if self.world_size > 1:
            self._by_rank = [torch.empty_like(mine) for _ in range(self.world_size)]
            self._work = dist.all_gather(self._by_rank, mine, group=self.group, async_op=True)

    def finish(self, steps: int) -> None:
        """Make the moving average over the micro-batches of an update, in the order of ranks and of each one's steps.

        Args:
            steps: of each rank in the update.
        """
        self._is_open = False
        if not self._buffers:
            return
        if not self._by_rank:
            self.send(steps)
        if self._work is not None:
            self._work.wait()
        weights = None if None in self._momenta else self._weights()
        for row in itertools.chain(*self._by_rank):
            statistics, is_real = row[:-1], row[-1]
            torch._foreach_add_(self._counts, [is_real.long()] * len(self._counts))
            self._running.lerp_(statistics, (self._weights() if weights is None else weights) * is_real)
        self._collected, self._by_rank = [], []
        self._write()

    def _weights(self) -> Tensor:
        """How much of the newest statistics each value takes: the momentum of its layer, or the mean of all so far."""
        shares = []
        for layer, momentum, count in zip(self._layers, self._momenta, self._counts, strict=True):
            share = 1 / count.to(self._dtype) if momentum is None else self._running.new_full((), momentum)
            shares.append(share.expand(2 * layer.num_features))
        return torch.cat(shares)
