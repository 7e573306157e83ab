"""Pace of a run: seconds per batch and the estimated time left."""

import math
import time

from callbacks.lib.lightning_internals import callbacks_of
from callbacks.lib.updates import total_updates, updates_made
from datamodules.errors import UserError
from datamodules.lightning import Timer, pl


def format_seconds(seconds: float) -> str:
    """Format a remaining time.

    Example:
        >>> [format_seconds(seconds) for seconds in (4.6, 75, 3_700, 200_000)]
        ['0:05', '1:15', '1:01:40', '2 days 7:33:20']
    """
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, rest = divmod(rest, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} day{'s' if days > 1 else ''} {clock}" if days else clock


class Pace:
    """Pace of a run since it was started or resumed: seconds per training batch, and of evaluations between batches.

    The first batch is not measured, since it loads, compiles and tunes.
    """

    def __init__(self) -> None:
        self.batches = -1
        """Measured batches; -1 before the first, unmeasured one."""
        self._seconds = 0.0
        self._evaluating = 0.0
        self._batches_evaluated = 0
        self._since: float | None = None

    def end_batch(self, batches: int) -> None:
        """Measure the batches up to now; called as a line is drawn or an evaluation begins.

        Args:
            batches: number of batches since the run was started or resumed.
        """
        now = time.monotonic()
        if self._since is not None and self.batches >= 0:
            self._seconds += now - self._since
        self._since = now
        self.batches = batches - 1

    def end_evaluation(self, batches: int) -> None:
        """Count the time since `end_batch` as that of an evaluation.

        Args:
            batches: as in `end_batch`.
        """
        now = time.monotonic()
        if self._since is not None:
            self._evaluating += now - self._since
        self._since = now
        self._batches_evaluated = batches

    def per_batch(self) -> float:
        """Return the seconds per training batch; NaN before the second one."""
        return self._seconds / self.batches if self.batches > 0 else math.nan

    def left(self, batches: float, with_evaluations: bool) -> float:
        """Return the seconds for further batches; NaN or infinite if unknown.

        Args:
            batches: number of further batches.
            with_evaluations: whether to add the time of evaluations, at the rate per batch so far.
        """
        evaluation_per_batch = 0.0
        if with_evaluations and self._batches_evaluated:
            evaluation_per_batch = self._evaluating / self._batches_evaluated
        return batches * (self.per_batch() + evaluation_per_batch)


def batches_left(trainer: pl.Trainer) -> float:
    """Return the number of batches until the end of the run; infinite if it is unknown or nothing ends the run."""
    try:
        updates = total_updates(trainer) - updates_made(trainer)
    except UserError:  # Under `GradientAccumulationScheduler` the number is unknown.
        return math.inf
    return max(0.0, updates) * trainer.accumulate_grad_batches


def unit_of_batches(trainer: pl.Trainer) -> str:
    """Return the unit of `batches_left`: "update", or "batch" if the Trainer accumulates gradients itself."""
    return "update" if trainer.accumulate_grad_batches == 1 else "batch"


def limited_by_time(trainer: pl.Trainer, seconds: float) -> float:
    """Return the seconds left, at most those that ``max_time`` allows."""
    for callback in callbacks_of(trainer):
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None:
            seconds = remaining if math.isnan(seconds) else min(seconds, remaining)
    return seconds
