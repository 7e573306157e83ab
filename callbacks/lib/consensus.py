"""Flags that all ranks agree on at the same moment of the run.

A rank that acts on a flag of its own leaves the others waiting in the next collective. So every rank takes part in an
all-reduce of the flag at the same moments, and all act on the result.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from callbacks.lib.targets import sum_over_ranks

__all__ = ["DeferredFlags", "FlagAllReduce", "SumWithFlag"]


class FlagAllReduce:
    """Whether a flag is set on any rank, over gloo, so that no device is waited for.

    The ranks have to call the same methods in the same order. On one process the flag is its own.

    Args:
        world_size: the number of ranks.
        timeout: how long to wait for the others; by default half an hour.
    """

    def __init__(self, world_size: int, timeout: timedelta | None = None) -> None:
        self._single = world_size == 1
        # A group of its own: what others reduce, on devices or in another order, does not interfere.
        self._group: Any = None if self._single else dist.new_group(backend="gloo", timeout=timeout)
        self._flags = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def start(self, flag: bool) -> bool:
        """Starts the all-reduce of a flag, and returns the result of the one before, which costs no waiting."""
        if self._single:
            return flag
        result = self.wait()
        self._flags.fill_(flag)
        self._pending = dist.all_reduce(self._flags, group=self._group, async_op=True)
        return result

    def wait(self) -> bool:
        """Whether any rank set the flag in the last all-reduce; False when called again."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._flags.item())

    def maximum(self, *values: float) -> list[float]:
        """The largest of each value over the ranks."""
        found = torch.tensor(values, dtype=torch.float64)
        if not self._single:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return list(found.tolist())


class DeferredFlags:
    """Reads sums of flags without waiting for the device that computes them.

    On a CPU the last sum is read at once. Elsewhere it is copied behind the work queued so far, and read one update
    later, when the device has the next one to work on.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, torch.Event | None] | None = None
        self._of_update_before: tuple[Tensor, torch.Event | None] | None = None

    def push(self, flags: Tensor) -> None:
        """Send a sum of flags."""
        event = None
        if flags.device.type != "cpu":
            event = torch.Event(flags.device)
            flags = flags.to("cpu", non_blocking=True)  # Into pinned memory.
            event.record()
        self._last = flags, event

    def pop(self) -> bool:
        """Whether the last sum is above 0, or on a device that of the update before; to be called once an update."""
        sent, self._last = self._last, None
        if sent is not None and sent[1] is not None:
            sent, self._of_update_before = self._of_update_before, sent
        if sent is None:
            return False
        flags, event = sent
        if event is not None:
            event.synchronize()
        return bool(flags)


class SumWithFlag:
    """Sums a number over the ranks once per update, and a flag in the same all-reduce.

    Attributes:
        flag: asked on each rank for its flag; without it only the number is summed.
    """

    def __init__(self) -> None:
        self.flag: Callable[[], bool] | None = None
        self._flags = DeferredFlags()

    def reset(self) -> None:
        """Forget the flags of an earlier run."""
        self._flags = DeferredFlags()

    def __call__(self, value: float | Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The sum over the ranks, without waiting for the device."""
        if self.flag is None:
            return sum_over_ranks(value, device, dtype)
        # Not `as_tensor` of a number, which is a copy that waits for the device.
        numbers = [
            part.to(device, dtype, non_blocking=True)
            if isinstance(part, Tensor)
            else torch.full((), part, device=device, dtype=dtype)
            for part in (value, float(self.flag()))
        ]
        total, flags = sum_over_ranks(torch.stack(numbers), device, dtype).unbind()
        self._flags.push(flags)
        return total

    def any_flag(self) -> bool:
        """Whether the flag was set on any rank, to be called once per update.

        On a CPU in the last sum, on a GPU in that of the update before: to read the last would be to wait for it.
        """
        return self._flags.pop()
