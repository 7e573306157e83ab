"""How long a ring all-reduce takes: a latency and a bandwidth fitted to measurements, and what follows for any world.

A ring of N sends 2 (N - 1) messages one after the other, each of 1/N of the bytes (Patarasuk and Yuan, 2009). So a
reduction of b bytes takes 2 (N - 1) latency + 2 (N - 1) / N b / bandwidth, and no algorithm beats the second term.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Link", "Reduction", "fit_link", "relative_errors", "steps_of_ring"]


class Reduction(NamedTuple):
    """A measured all-reduce.

    Args:
        world_size: processes that took part.
        size: bytes reduced.
        seconds: until the slowest had the result.
    """

    world_size: int
    size: int
    seconds: float


def steps_of_ring(world_size: int) -> int:
    """Messages that follow each other.

    Example:
        >>> steps_of_ring(1), steps_of_ring(2), steps_of_ring(8)
        (0, 2, 14)
    """
    return 2 * (world_size - 1)


@dataclass(frozen=True)
class Link:
    """What connects the processes.

    Args:
        latency: seconds of a message without content.
        bandwidth: bytes a second, infinite where no measurement was large enough to show it.

    Example:
        >>> Link(latency=1e-3, bandwidth=1e9).all_reduce_seconds(world_size=2, size=10**9)
        1.002
    """

    latency: float
    bandwidth: float

    def all_reduce_seconds(self, world_size: int, size: float) -> float:
        """Seconds to sum `size` bytes over `world_size` processes."""
        return steps_of_ring(world_size) * self.latency + self.bound_seconds(world_size, size)

    def bound_seconds(self, world_size: int, size: float) -> float:
        """The part of it that no algorithm can save: 2 (N - 1) / N of the bytes pass each process."""
        return steps_of_ring(world_size) / world_size * size / self.bandwidth


def fit_link(reductions: Sequence[Reduction]) -> Link:
    """The link that explains measurements best, by least squares of relative errors, neither term below zero.

    Raises:
        ValueError: fewer than two measurements, or none of two processes or more.

    Example:
        >>> true = Link(latency=2e-5, bandwidth=5e8)
        >>> points = [Reduction(n, b, true.all_reduce_seconds(n, b)) for n in (2, 4) for b in (10**3, 10**6)]
        >>> found = fit_link(points)
        >>> f"{found.latency:.1e} {found.bandwidth:.1e}"
        '2.0e-05 5.0e+08'
    """
    used = [point for point in reductions if point.world_size > 1]
    if len(used) < 2:
        raise ValueError(f"found {len(used)} all-reduces of two processes or more, expected 2 at least")
    seconds = np.array([point.seconds for point in used])
    terms = np.array([[steps_of_ring(n), steps_of_ring(n) / n * size] for n, size, _ in used]) / seconds[:, None]
    target = np.ones(len(used))
    both = np.linalg.lstsq(terms, target, rcond=None)[0]
    if (both < 0).any():
        # At the edge one of them alone explains more.
        singles = terms.sum(0) / (terms**2).sum(0)
        errors = [((terms[:, i] * singles[i] - target) ** 2).sum() for i in range(2)]
        keep = int(np.argmin(errors))
        both = np.where(np.arange(2) == keep, singles, 0.0)
    latency, per_byte = both.tolist()
    return Link(latency, 1 / per_byte if per_byte > 0 else float("inf"))


def relative_errors(link: Link, reductions: Sequence[Reduction]) -> list[float]:
    """How far the link's prediction is from each measurement, as a share of it, never negative."""
    return [
        abs(link.all_reduce_seconds(point.world_size, point.size) / point.seconds - 1)
        for point in reductions
        if point.world_size > 1
    ]
