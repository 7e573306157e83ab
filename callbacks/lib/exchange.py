"""Collective calls for values and flags of the ranks.

A rank that acts on a flag alone leaves the others waiting, so all ranks all-reduce the flag and act alike.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


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
        # In a group of its own, this call does not interfere with other collective calls and their order.
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
