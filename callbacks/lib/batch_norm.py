"""Running statistics of batch normalisation: their moments, their buffers under DDP, and their order.

The running mean and variance of a layer are a moving average over micro-batches, so their bits depend on the order, and
each rank of DDP sees only its own micro-batches. Here each micro-batch's statistics are kept; at the update's end the
ranks exchange them, and each rank computes the moving average over all, in order.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


def combine_moments(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count of a whole from those of its parts (Chan, Golub and LeVeque, 1979).

    Args:
        parts: (part, 2 * channels + 1): means, biased variances and the number of values. Parts may be empty.

    Example:
        >>> combine_moments(torch.tensor([[1.0, 0.0, 1.0], [4.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
        (tensor([3.]), tensor([2.6667]), tensor(3.))
    """
    means, variances, counts = parts.split([(parts.shape[1] - 1) // 2] * 2 + [1], dim=1)
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean) ** 2)).sum(0), total


def local_moments(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What one process adds to `combine_moments`, in float64 so that combining adds no rounding."""
    channels = x.shape[1]
    if x.numel() == 0:
        return torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    # The kernel behind nn.BatchNorm, 4 to 25 times faster than torch.var_mean; the discarded buffers set its precision.
    buffers = torch.zeros(2, channels, dtype=dtype, device=x.device)
    mean, variance = torch.batch_norm_update_stats(x, buffers[0], buffers[1], 0.0)
    return torch.cat(
        [mean.double(), variance.double(), mean.new_full((1,), x.numel() // channels, dtype=torch.float64)]
    )


def running_statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The running mean, the running variance and the number of batches of a layer that tracks them."""
    mean, variance, batches = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert batches is not None
    return mean, variance, batches


def is_synchronised(layer: nn.Module) -> bool:
    """Whether a layer is BatchNorm over all processes: torch's and those of `sync_batchnorm` have a `process_group`."""
    return isinstance(layer, _BatchNorm) and hasattr(layer, "process_group")


@contextlib.contextmanager
def stand_in(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Has synchronised layers normalise without the samples of this process, which only keeps up with the others.

    An update's micro-batches may be one fewer here than on another process, and its layers wait in each of them.

    Args:
        layers: those that `callbacks.sync_batchnorm` has made; torch's have no such state.
    """
    for layer in layers:
        vars(layer)["is_stand_in"] = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["is_stand_in"] = False


def own_batch_layers(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a module that normalise over one process's batch."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and not is_synchronised(layer)]


def running_buffers(module: nn.Module) -> list[Tensor]:
    """Running statistics and counters of batch normalisation."""
    layers = (layer for layer in module.modules() if isinstance(layer, _BatchNorm))
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def other_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are none of `running_buffers`, by name."""
    running = {id(buffer) for buffer in running_buffers(module)}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in running}


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors by those of rank 0, with one broadcast for each data type."""
    for dtype in {tensor.dtype: None for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, 0)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))


def exempt_from_broadcast(ddp: DistributedDataParallel) -> None:
    """Keeps DDP from replacing running statistics with those of rank 0 before each forward pass."""
    others = other_buffers(ddp.module).keys()
    if others <= ddp.parameters_to_ignore:
        # One broadcast less at every step, and torch fails on an empty list of buffers.
        ddp.broadcast_buffers = False
    else:
        ddp.parameters_to_ignore |= {name for name, _ in ddp.module.named_buffers()} - others


class OrderedStatistics:
    """The running statistics of BatchNorm layers over an update.

    `GradientSum.micro_batch` calls these methods: `begin` before a micro-batch's forward pass, `collect` after it,
    `restore` after its backward pass, and `finish` after the update's last micro-batch. If a layer is called several
    times within a micro-batch, its last call counts. Synchronised and frozen layers stay as they are.

    Args:
        module: the module with the layers.
        world_size: the number of processes that share an update.

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

    def __init__(self, module: nn.Module, world_size: int = 1) -> None:
        self.world_size = world_size
        self._candidates = [layer for layer in own_batch_layers(module) if layer.running_mean is not None]
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
        """Take the statistics of a micro-batch, after its forward pass; not to be called for a stand-in."""
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
            steps: the most micro-batches of a rank in the update.
        """
        if not self._buffers:
            return
        surplus = steps - len(self._collected)
        mine = torch.stack(self._collected + [self._running] * surplus)
        # Beside them 1, or 0 where this rank has a micro-batch less.
        is_real = (torch.arange(steps, device=mine.device) < steps - surplus).to(mine.dtype)
        mine = torch.cat((mine, is_real.unsqueeze(1)), 1)
        self._by_rank, self._work = [mine], None
        if self.world_size > 1:
            self._by_rank = [torch.empty_like(mine) for _ in range(self.world_size)]
            self._work = dist.all_gather(self._by_rank, mine, async_op=True)

    def finish(self, steps: int) -> None:
        """Make the moving average over the micro-batches of an update, in the order of ranks and of each one's steps.

        Args:
            steps: the most micro-batches of a rank in the update.
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
