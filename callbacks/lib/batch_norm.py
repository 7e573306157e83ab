"""Running statistics of batch normalization: moments, buffers under DDP, and a fixed order of the moving average.

The running mean and variance are a moving average over micro-batches, so their bits depend on the order, and a rank of
DDP sees only its own micro-batches. `OrderedStatistics` keeps the statistics of each micro-batch. At the update's end
the ranks exchange them, and each rank computes the moving average over all of them in order.
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

from datamodules.loading.randomness import widest_float


def combine_moments(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the moments of parts into mean, biased variance and count of the whole (Chan et al., 1979).

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
    """Return the moments of one process for `combine_moments`, in `widest_float` so that combining adds no rounding."""
    channels = x.shape[1]
    wide = widest_float(x.device)
    if x.numel() == 0:
        return torch.zeros(2 * channels + 1, dtype=wide, device=x.device)
    # The kernel behind nn.BatchNorm, 4 to 25 times faster than torch.var_mean; the discarded buffers set its precision.
    buffers = torch.zeros(2, channels, dtype=dtype, device=x.device)
    mean, variance = torch.batch_norm_update_stats(x, buffers[0], buffers[1], 0.0)
    return torch.cat([mean.to(wide), variance.to(wide), mean.new_full((1,), x.numel() // channels, dtype=wide)])


def running_statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running mean, the running variance and the number of batches of a layer that tracks them."""
    mean = layer.running_mean
    variance = layer.running_var
    batches = layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert batches is not None
    return mean, variance, batches


def is_synchronized(layer: nn.Module) -> bool:
    """Whether a layer is BatchNorm over all processes."""
    # torch's SyncBatchNorm and the layers of `sync_batchnorm` have a `process_group`.
    return isinstance(layer, _BatchNorm) and hasattr(layer, "process_group")


@contextlib.contextmanager
def stand_in(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let synchronized layers normalize without the samples of this process, and take part in the collective calls.

    This process may have one micro-batch fewer than another, whose layers wait for all processes in each micro-batch.

    Args:
        layers: layers of `callbacks.sync_batchnorm`; torch's SyncBatchNorm has no such state.
    """
    for layer in layers:
        vars(layer)["is_dummy"] = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["is_dummy"] = False


def own_batch_layers(module: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers of a module that normalize over one process's batch."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and not is_synchronized(layer)]


def running_buffers(module: nn.Module) -> list[Tensor]:
    """Return the running statistics and counters of batch normalization."""
    layers = (layer for layer in module.modules() if isinstance(layer, _BatchNorm))
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def other_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by name, without `running_buffers`."""
    running_ids = {id(buffer) for buffer in running_buffers(module)}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in running_ids}


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Replace tensors with the values of rank 0, by one broadcast per data type."""
    # A dict keeps the order of the types, which must be the same on all ranks.
    for dtype in {tensor.dtype: None for tensor in tensors}:
        same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
        dist.broadcast(flat, 0)
        sizes = [tensor.numel() for tensor in same_dtype]
        for tensor, values in zip(same_dtype, flat.split(sizes), strict=True):
            tensor.copy_(values.view_as(tensor))


def exempt_from_broadcast(ddp: DistributedDataParallel) -> None:
    """Keep DDP from replacing running statistics with the values of rank 0 before each forward pass."""
    broadcast_names = other_buffers(ddp.module).keys()
    if broadcast_names <= ddp.parameters_to_ignore:
        # One broadcast less per step, and torch fails on an empty list of buffers.
        ddp.broadcast_buffers = False
    else:
        ddp.parameters_to_ignore |= {name for name, _ in ddp.module.named_buffers()} - broadcast_names


class OrderedStatistics:
    """Running statistics of BatchNorm layers over an update, averaged in the order of the micro-batches.

    `GradientSum.micro_batch` calls these methods: `begin` before a micro-batch's forward pass, `collect` after it,
    `restore` after its backward pass, and `finish` after the update's last micro-batch. If a layer is called several
    times within a micro-batch, its last call counts. Synchronized and frozen layers stay as they are.

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
        """Prepare the layers for the forward pass of a micro-batch.

        The layers in training mode at an update's first micro-batch are averaged in the whole update.
        """
        if not self._is_open:
            self._layers = [layer for layer in self._candidates if layer.training and layer.track_running_stats]
            statistics = [running_statistics(layer) for layer in self._layers]
            self._buffers = [buffer for mean, variance, _ in statistics for buffer in (mean, variance)]
            self._counters = [counter for _, _, counter in statistics]
            self._counts = [counter.clone() for counter in self._counters]
            self._sizes = [buffer.numel() for buffer in self._buffers]
            has_float64 = any(buffer.dtype == torch.float64 for buffer in self._buffers)
            self._dtype = torch.float64 if has_float64 else torch.float32
            self._running = self._flat_buffers()
            self._collected = []
            self._is_open = True
        self._momenta = [layer.momentum for layer in self._layers]
        self._is_within = True
        for layer in self._layers:
            # With a momentum of 1 the buffers hold the statistics of this micro-batch alone after the forward pass.
            # Written past torch's `__setattr__`, which searches parameters and buffers.
            vars(layer)["momentum"] = 1.0

    def _flat_buffers(self) -> Tensor:
        # At least float32: a moving average in half precision loses small changes.
        return torch.cat([buffer.to(self._dtype) for buffer in self._buffers]) if self._buffers else torch.zeros(0)

    def leave_out_frozen(self) -> None:
        """Leave out the layers that an update's first forward pass has itself put into evaluation mode.

        All ranks have to call it after that pass, or `collect`, which does.
        """
        is_kept = [layer.training for layer in self._layers]
        if self._collected or all(is_kept):
            return
        for layer, momentum in zip(self._layers, self._momenta, strict=True):
            if not layer.training:
                vars(layer)["momentum"] = momentum
        of_buffers = [kept for kept in is_kept for _ in range(2)]  # Each layer has a mean and a variance.
        before = list(itertools.compress(self._running.split(self._sizes), of_buffers))
        self._running = torch.cat(before) if before else torch.zeros(0)
        self._buffers = list(itertools.compress(self._buffers, of_buffers))
        self._sizes = list(itertools.compress(self._sizes, of_buffers))
        self._counters = list(itertools.compress(self._counters, is_kept))
        self._counts = list(itertools.compress(self._counts, is_kept))
        self._momenta = list(itertools.compress(self._momenta, is_kept))
        self._layers = list(itertools.compress(self._layers, is_kept))

    def collect(self) -> None:
        """Keep the statistics of a micro-batch after its forward pass; not to be called for a stand-in."""
        self.leave_out_frozen()
        self._collected.append(self._flat_buffers())

    def repeated(self) -> list[_BatchNorm]:
        """Return the layers called more than once since the update began; for its first micro-batch."""
        calls = zip(self._layers, self._counters, self._counts, strict=True)
        return [layer for layer, counter, count in calls if int(counter) > int(count) + 1]

    def restore(self) -> None:
        """Restore the momenta and buffers from before the micro-batch; do nothing outside of one."""
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
        """Start to gather an update's statistics after its last forward pass; `finish` does so otherwise.

        Args:
            steps: the largest number of micro-batches of a rank in the update.
        """
        if not self._buffers:
            return
        # An all-gather needs equal sizes: a rank with one micro-batch fewer adds a row, marked by 0 in the last column.
        padding = steps - len(self._collected)
        rows = torch.stack(self._collected + [self._running] * padding)
        is_real = (torch.arange(steps, device=rows.device) < steps - padding).to(rows.dtype)
        rows = torch.cat((rows, is_real.unsqueeze(1)), 1)
        self._by_rank = [rows]
        self._work = None
        if self.world_size > 1:
            self._by_rank = [torch.empty_like(rows) for _ in range(self.world_size)]
            self._work = dist.all_gather(self._by_rank, rows, async_op=True)

    def finish(self, steps: int) -> None:
        """Compute the moving average over an update's micro-batches, in the order of ranks and of their micro-batches.

        Args:
            steps: the largest number of micro-batches of a rank in the update.
        """
        self._is_open = False
        if not self._buffers:
            return
        if not self._by_rank:
            self.send(steps)
        if self._work is not None:
            self._work.wait()
        # A momentum of None means the mean over all batches, whose weights change with each row.
        constant_weights = None if None in self._momenta else self._weights()
        for row in itertools.chain(*self._by_rank):
            statistics = row[:-1]
            is_real = row[-1]
            torch._foreach_add_(self._counts, [is_real.long()] * len(self._counts))
            weights = self._weights() if constant_weights is None else constant_weights
            # A weight of 0 leaves out the rows of padding without a wait for the device.
            self._running.lerp_(statistics, weights * is_real)
        self._collected = []
        self._by_rank = []
        self._write()

    def _weights(self) -> Tensor:
        """Return the weight of the newest statistics in each moving average, by momentum or by number of batches."""
        shares = []
        for layer, momentum, count in zip(self._layers, self._momenta, self._counts, strict=True):
            share = 1 / count.to(self._dtype) if momentum is None else self._running.new_full((), momentum)
            shares.append(share.expand(2 * layer.num_features))
        return torch.cat(shares)
