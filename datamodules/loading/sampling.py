"""Which samples make which batch: pure functions from (seed, epoch, batch size, rank) to sample numbers.

One global order serves any number of ranks and micro-batches: step j of the epoch consumes the j-th slice of
``batch_size * world_size`` samples and every rank takes its part of that slice. So an update over k micro-batches
consumes the k slices that follow each other, which is the slice that one large batch would have taken.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.randomness import derive_seed, permutation

__all__ = [
    "epoch_order",
    "evaluation_spans",
    "num_training_steps",
    "split_indices",
    "systematic_draws",
    "training_span",
    "training_spans",
    "weighted_order",
]

_GOLDEN_RATIO = (5**0.5 - 1) / 2


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """The shuffle order of n samples in an epoch, int64 of shape (n,).

    Example:
        >>> epoch_order(5, seed=1, epoch=0).tolist() == epoch_order(5, seed=1, epoch=1).tolist()
        False
        >>> sorted(epoch_order(5, seed=1, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """
    return permutation(n, seed, "order", epoch)


def systematic_draws(weights: Tensor, seed: int, epoch: int, groups: Tensor | None = None) -> Tensor:
    """How often each of n samples is drawn in an epoch of n draws: the expected number, rounded down or up.

    Systematic sampling with unequal probabilities (Madow, 1949): the samples lie on a line in random order, each as
    long as its expected number of draws, and n points at distance 1 draw what they fall on. So repeats and omissions
    are as few as they can be; independent draws vary more. From epoch to epoch the points move on by the golden ratio:
    a sample that is expected once in 10 epochs is drawn about every tenth.

    Args:
        weights: relative, of shape (n,); 0 is never drawn.
        groups: int64 of shape (n,), such as classes: each is drawn its expected number of times, rounded down or up.

    Returns:
        int64 of shape (n,), whose sum is n.

    Example:
        >>> systematic_draws(torch.tensor([1.0, 1.0, 1.0, 3.0]), seed=1, epoch=0)[3].item()
        2
    """
    n, line = len(weights), permutation(len(weights), seed, "draws")
    if groups is not None:
        line = line[groups[line].argsort(stable=True)]
    ends = weights[line].double().cumsum(0)
    # Samples of weight 0 at the end of the line may not get the last point by rounding.
    ends = torch.where(ends == ends[-1], n, (ends * (n / ends[-1])).clamp(max=n))
    first = (derive_seed(seed, "first point") / 2**63 + epoch * _GOLDEN_RATIO) % 1
    points_before = (ends - first).ceil().clamp(min=0).long()
    return torch.zeros_like(line).scatter_(0, line, points_before.diff(prepend=points_before.new_zeros(1)))


def weighted_order(weights: Tensor, seed: int, epoch: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The shuffled samples of an epoch of `systematic_draws`, and how many draws of the same sample came before each.

    Returns:
        Twice int64 of shape (n,): positions in `weights`, and numbers from 0, in any order.

    Example:
        >>> samples, repeats = weighted_order(torch.tensor([0.0, 1.0, 1.0, 0.0]), seed=1, epoch=0)
        >>> sorted(zip(samples.tolist(), repeats.tolist()))
        [(1, 0), (1, 1), (2, 0), (2, 1)]
    """
    draws = systematic_draws(weights, seed, epoch, groups)
    samples = torch.arange(len(draws)).repeat_interleave(draws)
    repeats = torch.arange(len(draws)) - (draws.cumsum(0) - draws).repeat_interleave(draws)
    order = epoch_order(len(draws), seed, epoch)
    return samples[order], repeats[order]


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


def num_training_steps(n: int, batch_size: int, world_size: int) -> int:
    """Micro-batches in an epoch, the same on every rank."""
    return -(-n // (batch_size * world_size))


def training_span(n: int, batch_size: int, rank: int, world_size: int, start: int) -> tuple[int, int]:
    """This rank's part of the step that begins at a position of the epoch's order, as positions ``[start, stop)``.

    A full step gives every rank `batch_size` samples. The last step shares what is left; the parts differ by one
    sample at most, and are empty on some ranks when fewer samples than ranks are left.
    """
    size, larger = divmod(max(0, min(batch_size * world_size, n - start)), world_size)
    first = start + rank * size + min(rank, larger)
    return first, first + size + (rank < larger)


def training_spans(n: int, batch_size: int, rank: int, world_size: int, consumed: int = 0) -> Iterator[tuple[int, int]]:
    """This rank's part of each step of an epoch, as `training_span` says.

    Args:
        consumed: samples that all ranks together have used in this epoch already.

    Example:
        >>> list(training_spans(7, batch_size=2, rank=0, world_size=2))
        [(0, 2), (4, 6)]
        >>> list(training_spans(7, batch_size=2, rank=1, world_size=2))
        [(2, 4), (6, 7)]
    """
    for start in range(consumed, n, batch_size * world_size):
        yield training_span(n, batch_size, rank, world_size, start)


def evaluation_spans(n: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """This rank's batches of an evaluation, as positions ``[start, stop)``; together the ranks visit each once.

    Whole batches go to the ranks in turn, so a batch holds the same samples on any number of ranks and its
    result is the same to the bit. A rank without a batch gets an empty span: each takes part in the reductions.

    Example:
        >>> [list(evaluation_spans(5, 2, rank, 2)) for rank in (0, 1)]
        [[(0, 2), (4, 5)], [(2, 4)]]
    """
    starts = range(rank * batch_size, n, batch_size * world_size)
    if not starts:
        yield n, n
    for start in starts:
        yield start, min(start + batch_size, n)
