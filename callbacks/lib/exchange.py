"""Values and flags between the ranks.

A rank that acts on a flag of its own leaves the others waiting: all take part in an all-reduce of it, and act alike.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """The values of all ranks, by rank; to be called on all of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
