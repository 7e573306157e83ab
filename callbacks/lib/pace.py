"""How fast a run goes, and when it will end."""

import math
import time

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from callbacks.lib.hooks import callbacks_of
from callbacks.lib.updates import total_updates, updates_made
from datamodules.errors import UserError


def format_seconds(seconds: float) -> str:
    """A time that is left.

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
    """The pace of a run since it was started or resumed: seconds of a batch, and of the evaluations between them.

    The first batch is not measured: it loads, compiles and tunes.
    """

    def __init__(self) -> None:
        self.batches = -1
        """Batches that were measured."""
        self._seconds = 0.0
        self._evaluating = 0.0
        self._batches_evaluated = 0
        self._since: float | None = None

    def end_batch(self, batches: int) -> None:
        """Count batches up to now, as a line is drawn or an evaluation begins.

        Args:
            batches: made since the run was started or resumed.
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
        """Seconds of a batch of training; NaN before the second one."""
        return self._seconds / self.batches if self.batches > 0 else math.nan

    def left(self, batches: float, with_evaluations: bool) -> float:
        """Seconds for further batches; NaN or infinite where that is not known.

        Args:
            batches: to come.
            with_evaluations: count those that there were since the start for each batch.
        """
        evaluating = self._evaluating / self._batches_evaluated if self._batches_evaluated and with_evaluations else 0.0
        return batches * (self.per_batch() + evaluating)


def batches_left(trainer: pl.Trainer) -> float:
    """Batches until the end of the run; infinite where nothing ends it, or it is not known."""
    try:
        updates = total_updates(trainer) - updates_made(trainer)
    except UserError:  # Lightning's schedule of accumulation changes their number.
        return math.inf
    return max(0.0, updates) * trainer.accumulate_grad_batches


def unit_of_batches(trainer: pl.Trainer) -> str:
    """What `batches_left` counts: updates, but where a Trainer accumulates in its own way."""
    return "update" if trainer.accumulate_grad_batches == 1 else "batch"


def limited_by_time(trainer: pl.Trainer, seconds: float) -> float:
    """Seconds that are left, at most those that ``max_time`` allows."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None:
            seconds = left if math.isnan(seconds) else min(seconds, left)
    return seconds
