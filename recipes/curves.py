"""The curves of learning rates, as pure functions of how far a run is: factors from 0 to 1 on the peak."""

import math
from bisect import bisect_right
from collections.abc import Sequence

__all__ = [
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "linear",
    "multistep",
    "one_cycle",
    "polynomial",
    "wsd",
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


def polynomial(progress: float, power: float = 0.9) -> float:
    """A power of the share of the run that is left; 0.9 is that of DeepLab (Chen et al., 2018).

    Example:
        >>> [polynomial(progress, power=2) for progress in (0, 0.5, 1)]
        [1.0, 0.25, 0.0]
    """
    return float((1 - progress) ** power)


def exponential(time: float, gamma: float = 0.01) -> float:
    """`gamma` to the power of the time, in epochs or in shares of the run.

    Example:
        >>> [round(exponential(epochs, gamma=0.9), 3) for epochs in (0, 0.5, 1, 2)]
        [1.0, 0.949, 0.9, 0.81]
    """
    return float(gamma**time)


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


def wsd(progress: float, start: float = 0.8) -> float:
    """1 up to the share `start` of the run, then down to 0: "warm-up, stable, decay" (Hu et al., 2024).

    The decay is 1 less the square root of its progress, over the last fifth (Hägele et al., 2024).

    Example:
        >>> [round(wsd(progress), 3) for progress in (0, 0.8, 0.85, 0.95, 1)]
        [1.0, 1.0, 0.5, 0.134, 0.0]
    """
    return 1.0 if progress <= start else 1 - math.sqrt((progress - start) / (1 - start))
