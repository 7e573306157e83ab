"""What ranks tell one another: values, flags, the metrics by which a run decides, and checksums of tensors.

A rank that acts on a flag alone leaves the others waiting, so all ranks all-reduce the flag and act alike. Ranks that
decide by values of their own, as of the best checkpoint, an early stop or a plateau, train or save different models.
"""

from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from callbacks.lib.lightning_internals import callbacks_of
from datamodules.errors import RunFailedError
from datamodules.lightning import pl


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank; a collective call."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class FlagAllReduce:
    """All-reduce of flags over gloo, which does not wait for the device.

    All ranks must call the same methods in the same order. A single process returns its own flags.

    Args:
        world_size: the number of ranks.
        timeout: how long to wait for the other ranks; by default half an hour.
    """

    def __init__(self, world_size: int, timeout: timedelta | None = None) -> None:
        self._single = world_size == 1
        # In a separate group this call does not interfere with other collective calls and their order.
        self._group: Any = None if self._single else dist.new_group(backend="gloo", timeout=timeout)
        self._flags = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def start(self, flag: bool) -> bool:
        """Start the all-reduce of a flag, and return the result of the previous one, which needs no waiting."""
        if self._single:
            return flag
        result = self.wait()
        self._flags.fill_(flag)
        self._pending = dist.all_reduce(self._flags, group=self._group, async_op=True)
        return result

    def wait(self) -> bool:
        """Return whether any rank set the flag in the last all-reduce; False when called again."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._flags.item())

    def maximum(self, *values: float) -> list[float]:
        """Return the largest of each value over the ranks."""
        maxima = torch.tensor(values, dtype=torch.float64)
        if not self._single:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._group)
        return list(maxima.tolist())


def deciders(trainer: pl.Trainer) -> dict[str, str]:
    """Return the names of the monitored metrics, each with the class that decides by it."""
    names: dict[str, str] = {}
    for callback in callbacks_of(trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            names[monitor] = type(callback).__name__
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            names[config.monitor] = type(config.scheduler).__name__
    return names


def check_decision(name: str, value: Any, decider: str) -> None:
    """Check that a metric has one value on all ranks before something decides by it; a collective call.

    Args:
        value: a number or a tensor of one element; None if this rank has no such metric.
        decider: name of what decides.

    Raises:
        RunFailedError: on all ranks, if one of them has another value.
    """
    by_rank = gather(None if value is None else float(value))
    texts = ["none" if number is None else f"{number:.9g}" for number in by_rank]
    for rank, number in enumerate(by_rank):
        # Compared as texts of all digits, by which NaN equals itself.
        if repr(number) != repr(by_rank[0]):
            raise RunFailedError(
                f"{name} is {texts[0]} on rank 0 and {texts[rank]} on rank {rank}, and {decider} decides by it, so that"
                " the ranks would train or save different models: pass sync_dist=True to self.log, or set one value"
                " on all ranks"
            )


# Elements of 8 bytes are read as halves. As one int64, the bits of 2.0 and 4.0 differ by 2**52, so that exchanging them
# could leave the weighted sum modulo 2**64 unchanged.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK = 1 << 20


@lru_cache(maxsize=2)
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _BLOCK, 2, device=device)


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, read as integers, times 1, 3, 5, ... modulo 2**64.

    It changes with any single bit, if two elements of up to 4 bytes change places, and between 0.0 and -0.0. Two NaN
    with the same bits are equal.

    Example:
        >>> a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
        >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(b))
        (True, False)
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    # As integers shorter than int64, and in blocks: the products then need 16 MiB, not four times the largest tensor.
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, block in enumerate(bits.split(_BLOCK)):
        weighted = (block * _odd_numbers(tensor.device)[: len(block)]).sum()
        total += weighted + 2 * _BLOCK * number * block.sum(dtype=torch.int64)
    return total


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the checksum of each tensor, int64 of shape (tensors,), on one device."""
    return torch.stack([checksum(tensor).to(device) for tensor in tensors])
