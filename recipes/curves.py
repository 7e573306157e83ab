"""The curves of learning rates, as pure functions of how far a run is: factors from 0 to 1 on the peak."""

import math
from bisect import bisect_right
from collections.abc import Sequence

__all__ = [
    "constant",
    "cosine",
    "inverse_sqrt",
    "linear",
    "multistep",
    "one_cycle",
]


def one_cycle(progress: float, rise: float = 0.25, start: float = 0.04) -> float:
    """Linear rise from `start` to 1 over the share `rise` of the run, then linear to 0 (Smith and Topin, 2018).

    Example:
        >>> [one_cycle(progress) for progress in (0, 0.25, 1)]
        [0.04, 1.0, 0.0]
    """
    if progress < rise:
        return start + (1 - start) * progress / rise
    return (1 - progress) / (1 - rise)


def constant(progress: float) -> float:
    """Always 1.

    Example:
        >>> [constant(progress) for progress in (0, 0.5, 1)]
        [1.0, 1.0, 1.0]
    """
    return 1.0


def linear(progress: float) -> float:
    """A straight line from 1 to 0.

    Example:
        >>> [linear(progress) for progress in (0, 0.25, 1)]
        [1, 0.75, 0]
    """
    return 1 - progress


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017).

    Example:
        >>> [round(cosine(progress), 3) for progress in (0, 0.25, 0.5, 1)]
        [1.0, 0.854, 0.5, 0.0]
    """
    return (1 + math.cos(math.pi * progress)) / 2


def multistep(update: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """A factor of `gamma` from each milestone on.

    Example:
        >>> [multistep(update, [100, 200], gamma=0.5) for update in (99, 100, 199, 200)]
        [1.0, 0.5, 0.5, 0.25]
    """
    return float(gamma ** bisect_right(sorted(milestones), update))


def inverse_sqrt(update: float, start: float) -> float:
    """1 up to the update `start`, then falling with the square root of the updates made (Raffel et al., 2020).

    With a linear warm-up to `start` it is the schedule of the Transformer (Vaswani et al., 2017).

    Example:
        >>> [inverse_sqrt(update, start=100) for update in (0, 100, 400, 10_000)]
        [1.0, 1.0, 0.5, 0.1]
    """
    return 1.0 if update <= start else math.sqrt(start / update)
