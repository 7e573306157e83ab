"""Which samples make which batch: pure functions from (seed, epoch, batch size, rank) to sample numbers.

Update k consumes the k-th slice of one global order, cut into micro-batches, of which each rank computes a range.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.randomness import permutation


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """The shuffle order of n samples in an epoch, int64 of shape (n,)."""
    return permutation(n, seed, "order", epoch)


def split_indices(n: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two disjoint, sorted sets of sample numbers: what to train on, and `held_out` samples to validate on.

    Raises:
        UserError: nothing would be left to train on.
    """
    if not 0 <= held_out < n:
        raise UserError(
            f"cannot hold {held_out:,} of {n:,} samples out for validation: expected 0 to {n - 1:,}; "
            f"pass a smaller `val_fraction`"
        )
    order = permutation(n, seed, "split")
    return order[held_out:].sort().values, order[:held_out].sort().values


def range_of_rank(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The micro-batches ``[first, stop)`` of an update that a rank computes; the first ranks have one more.

    Example:
        >>> [range_of_rank(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    size, larger = divmod(count, world_size)
    first = rank * size + min(rank, larger)
    return first, first + size + (rank < larger)


class Share(NamedTuple):
    """What one rank computes of an update."""

    spans: list[tuple[int, int]]
    """The positions ``[start, stop)`` of its micro-batches in the order of the epoch."""
    first: int
    """The number of its first micro-batch in the epoch, the same on any number of ranks."""
    total: int
    """How many micro-batches the update has on all ranks."""
    is_stand_in: bool
    """Whether the update has fewer micro-batches than ranks and none for this rank, which repeats the first one."""


@dataclass(frozen=True)
class Division:
    """An epoch cut into updates, and updates into micro-batches, of which each rank computes a range.

    Each update has `update_size` items and the last one what is left; an update is cut into micro-batches of
    `batch_size` items, of which the last may be short. The number of updates does not depend on the number of ranks.

    Args:
        items: of an epoch: samples, or batches that were cut before.
        batch_size: items of a micro-batch.
        update_size: items of an update, on all ranks.
        world_size: number of ranks.
    """

    items: int
    batch_size: int
    update_size: int
    world_size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a whole update, on all ranks."""
        return -(-self.update_size // self.batch_size)

    @property
    def updates(self) -> int:
        """Updates of an epoch; the last may have fewer items."""
        return -(-self.items // self.update_size)

    def micro_batches_of(self, update: int) -> int:
        """Micro-batches of the update of that number, on all ranks."""
        start = update * self.update_size
        items = min(self.update_size, self.items - start)
        return -(-items // self.batch_size)

    def share(self, update: int, rank: int) -> Share:
        """A rank's share of the update of that number, counted from 0.

        Example:
            >>> Division(items=10, batch_size=2, update_size=6, world_size=2).share(0, rank=1)
            Share(spans=[(4, 6)], first=2, total=3, is_stand_in=False)
        """
        start = update * self.update_size
        stop = min(start + self.update_size, self.items)
        count = self.micro_batches_of(update)
        first, end = range_of_rank(count, rank, self.world_size)
        is_stand_in = first == end
        if is_stand_in:
            # DDP needs a backward pass on each rank, and a real micro-batch is one that every network accepts.
            first, end = 0, 1
        starts = [start + number * self.batch_size for number in range(first, end)]
        spans = [(begin, min(begin + self.batch_size, stop)) for begin in starts]
        return Share(spans, update * self.micro_batches + first, count, is_stand_in)


def evaluation_spans(n: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """This rank's batches of an evaluation, as positions ``[start, stop)``; together the ranks visit each once.

    Whole batches go to the ranks in turn, so a batch holds the same samples on any number of ranks and its
    result is the same to the bit. A rank without a batch gets an empty span: each takes part in the reductions.
    """
    starts = range(rank * batch_size, n, batch_size * world_size)
    if not starts:
        yield n, n
    for start in starts:
        yield start, min(start + batch_size, n)
