"""Whether any rank says yes, known to all ranks at the same moment of the run.

A rank that acts on what it alone has seen leaves the others waiting in the next collective. So every rank votes at the
same moments, whatever it has seen, and all act on the sum.
"""

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Answers", "Votes"]


class Votes:
    """Sums over the ranks, over gloo, so that no device is waited for.

    The ranks have to call the same methods in the same order. On one process each answers by itself.

    Args:
        world_size: the number of ranks.
        timeout: how long to wait for the others; by default half an hour.
    """

    def __init__(self, world_size: int, timeout: timedelta | None = None) -> None:
        self._alone = world_size == 1
        # A group of its own: what others reduce, on devices or in another order, does not meet it.
        self._group: Any = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)
        self._votes = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def post(self, yes: bool) -> bool:
        """Vote, and hear whether any rank said yes in the vote before, which costs no waiting."""
        if self._alone:
            return yes
        decided = self.settle()
        self._votes.fill_(yes)
        self._pending = dist.all_reduce(self._votes, group=self._group, async_op=True)
        return decided

    def settle(self) -> bool:
        """Hear whether any rank said yes in the last vote, once."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._votes.item())

    def largest(self, *values: float) -> list[float]:
        """The largest value over the ranks, of each."""
        found: Tensor = torch.tensor(values, dtype=torch.float64)
        if not self._alone:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()


class Answers:
    """Sums of votes on their way from the device that made them, read without waiting for that device.

    On a CPU an answer is there at once. Elsewhere it is copied behind the work queued so far, and taken one call later,
    when the device has the next update to work on.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[Tensor, torch.Event | None]] = deque(maxlen=2)

    def put(self, answer: Tensor) -> None:
        """Send a sum of votes, once an update."""
        event = None
        if answer.device.type != "cpu":
            event = torch.Event(answer.device)
            answer = answer.to("cpu", non_blocking=True)  # Into pinned memory.
            event.record()
        self._sent.append((answer, event))

    def take(self) -> bool:
        """Whether any rank said yes in the last sum, or where it is on a device in the one before, once."""
        if not self._sent or (len(self._sent) == 1 and self._sent[0][1] is not None):
            return False
        answer, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        return bool(answer)
