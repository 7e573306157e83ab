"""Pure functions from (seed, epoch, batch size, rank) to the sample numbers of a batch.

Every epoch has one global order. Update k consumes the k-th slice of this order. The slice is cut into micro-batches,
and each rank computes a range of them. The number of ranks changes neither the updates nor the micro-batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.errors import UserError, spelled
from datamodules.loading.randomness import permutation, random_bits


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the shuffle order of n samples in an epoch, int64 of shape (n,)."""
    return permutation(n, seed, "order", epoch)


def weighted_order(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """Return n draws with replacement from n samples in an epoch, int64 of shape (n,).

    The distribution is the same as in `torch.utils.data.WeightedRandomSampler`. Draw k is a function of (seed, epoch,
    k): a uniform number is looked up in the cumulative weights (inverse transform sampling).

    Args:
        weights: relative probability of each sample, of shape (n,), on the CPU. A sample of weight 0 is never drawn.

    Example:
        >>> weighted_order(torch.tensor([0.0, 1.0, 0.0]), seed=1, epoch=0)
        tensor([1, 1, 1])
    """
    cumulative = weights.double().cumsum(0)
    bits = random_bits(seed, "weighted order", epoch, torch.arange(len(weights))).squeeze(1)
    # 52 bits: with 53, the precision of float64, a product could be rounded up to the sum of all weights.
    levels = ((bits >> 12) & ((1 << 52) - 1)).double() / (1 << 52)
    return torch.searchsorted(cumulative, levels * cumulative[-1], right=True)


def number_draws(rows: Tensor, count: int) -> Tensor:
    """Return a number for each draw of an epoch, so that repeated draws of a sample have different random numbers.

    Draw k of a sample, counted from 0, has the number ``sample + k * count``. The number modulo `count` is therefore
    the sample's number.

    Args:
        rows: sample numbers in the order of the epoch, int64 of shape (n,).
        count: number of samples of the data set; all numbers in `rows` are below it.

    Example:
        >>> number_draws(torch.tensor([3, 0, 3, 3]), count=10)
        tensor([ 3,  0, 13, 23])
    """
    by_sample = rows.argsort(stable=True)
    samples = rows[by_sample]
    earlier_draws = torch.arange(len(rows)) - torch.searchsorted(samples, samples)
    numbers = torch.empty_like(rows)
    numbers[by_sample] = samples + count * earlier_draws
    return numbers


def split_indices(n: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split n samples at random, and return the sorted numbers of the training and of the `held_out` samples.

    Raises:
        UserError: no sample would be left to train on.
    """
    if not 0 <= held_out < n:
        raise UserError(
            f"cannot hold {held_out:,} of {n:,} samples out for validation: expected 0 to {n - 1:,};"
            f" pass a smaller {spelled('val_fraction')}"
        )
    order = permutation(n, seed, "split")
    return order[held_out:].sort().values, order[:held_out].sort().values


def range_of_rank(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range ``[first, stop)`` of an update's micro-batches that a rank computes.

    If `count` is not divisible by the number of ranks, the first ranks compute one micro-batch more.

    Example:
        >>> [range_of_rank(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    size, larger = divmod(count, world_size)
    first = rank * size + min(rank, larger)
    return first, first + size + (rank < larger)


class RankSlice(NamedTuple):
    """Micro-batches of an update that one rank computes."""

    spans: list[tuple[int, int]]
    """Positions ``[start, stop)`` of the micro-batches in the order of the epoch."""
    first: int
    """Epoch-wide number of the rank's first micro-batch. The numbers do not depend on the number of ranks."""
    total: int
    """Number of micro-batches of the update over all ranks."""
    is_dummy: bool
    """Whether the update has no micro-batch for this rank, which then repeats the first one of the update."""


@dataclass(frozen=True)
class UpdateDivision:
    """Division of an epoch into updates, and of updates into micro-batches, of which each rank computes a range.

    Each update has `update_size` items; the last one has the remaining items. An update is cut into micro-batches of
    `batch_size` items; the last one may be short. The number of updates does not depend on the number of ranks.

    Args:
        items: items of an epoch: samples, or batches with a fixed content.
        batch_size: items of a micro-batch.
        update_size: items of an update over all ranks.
        world_size: number of ranks.
    """

    items: int
    batch_size: int
    update_size: int
    world_size: int

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a full update over all ranks."""
        return -(-self.update_size // self.batch_size)

    @property
    def updates(self) -> int:
        """Number of updates of an epoch. The last update may have fewer items."""
        return -(-self.items // self.update_size)

    def micro_batches_of(self, update: int) -> int:
        """Return the number of micro-batches of an update, counted from 0, over all ranks."""
        start = update * self.update_size
        items = min(self.update_size, self.items - start)
        return -(-items // self.batch_size)

    def rank_slice(self, update: int, rank: int) -> RankSlice:
        """Return the micro-batches that a rank computes in an update, counted from 0.

        Example:
            >>> UpdateDivision(items=10, batch_size=2, update_size=6, world_size=2).rank_slice(0, rank=1)
            RankSlice(spans=[(4, 6)], first=2, total=3, is_dummy=False)
        """
        start = update * self.update_size
        stop = min(start + self.update_size, self.items)
        count = self.micro_batches_of(update)
        first, end = range_of_rank(count, rank, self.world_size)
        is_dummy = first == end
        if is_dummy:
            # DDP needs a backward pass on each rank. A real batch, because a network may fail on an empty one.
            first = 0
            end = 1
        starts = [start + number * self.batch_size for number in range(first, end)]
        spans = [(begin, min(begin + self.batch_size, stop)) for begin in starts]
        return RankSlice(spans, update * self.micro_batches + first, count, is_dummy)


def evaluation_spans(n: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """Yield this rank's batches of an evaluation as positions ``[start, stop)``. All ranks together visit each once.

    Whole batches are assigned to the ranks in turn. A batch therefore has the same samples on any number of ranks, and
    its result is bit-identical.
    """
    starts = range(rank * batch_size, n, batch_size * world_size)
    # A rank without a batch yields an empty one: every rank has to take part in the collective reductions.
    if not starts:
        yield n, n
    for start in starts:
        yield start, min(start + batch_size, n)
