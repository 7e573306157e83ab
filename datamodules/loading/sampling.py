"""Which samples make which batch: pure functions from (seed, epoch, batch size, rank) to sample numbers.

Update k consumes the k-th slice of one global order, cut into micro-batches, of which each rank computes a range.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
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


class Step(NamedTuple):
    """What one rank does in a step of an epoch."""

    start: int
    stop: int
    """The positions ``[start, stop)`` of its micro-batch in the order of the epoch; equal in a surplus step."""
    number: int
    """Of the micro-batch in the epoch, the same on any number of ranks; a surplus step has one behind those."""
    in_update: int
    """How many micro-batches the update has on all ranks."""


@dataclass(frozen=True)
class Division:
    """An epoch cut into updates, micro-batches and the steps of each rank.

    Each update has `update_size` items and the last one what is left; an update is cut into micro-batches of
    `batch_size` items, of which the last may be short. Each rank computes a range of them, one in each step. All ranks
    make the same number of steps: those with a micro-batch less end the update with a surplus step without items.

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

    def _cut(self, items: int) -> int:
        """The micro-batches of so many items of one update."""
        return -(-items // self.batch_size)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a whole update, on all ranks."""
        return self._cut(self.update_size)

    @property
    def updates(self) -> int:
        """Updates of an epoch; the last may have fewer items."""
        return -(-self.items // self.update_size)

    @property
    def steps_per_update(self) -> int:
        """Steps of each rank in a whole update."""
        return -(-self.micro_batches // self.world_size)

    def __len__(self) -> int:
        """The steps of an epoch, the same on every rank."""
        before = self.updates - 1
        last = self._cut(self.items - before * self.update_size)
        return before * self.steps_per_update - (-last // self.world_size)

    def steps_before(self, position: int) -> int:
        """The steps of each rank in the updates before a position, at which an update begins or the epoch ends."""
        return len(self) if position >= self.items else position // self.update_size * self.steps_per_update

    @lru_cache(maxsize=4)  # noqa: B019  One is asked for several times, one after the other.
    def step(self, number: int, rank: int) -> Step:
        """A rank's step of that number in an epoch, counted from 0."""
        update, place = divmod(number, self.steps_per_update)
        start = update * self.update_size
        stop = min(start + self.update_size, self.items)
        count = self._cut(stop - start)
        first, end = range_of_rank(count, rank, self.world_size)
        own = first + place
        if own >= end:
            behind = self.updates * self.micro_batches
            return Step(stop, stop, behind + number * self.world_size + rank, count)
        begin = start + own * self.batch_size
        return Step(begin, min(begin + self.batch_size, stop), update * self.micro_batches + own, count)

    def steps(self, rank: int, position: int = 0) -> Iterator[Step]:
        """A rank's steps of an epoch, from the update on that begins at a position."""
        for number in range(self.steps_before(position), len(self)):
            yield self.step(number, rank)


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
