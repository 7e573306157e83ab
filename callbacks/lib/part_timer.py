"""Seconds of a run by what it does in them: at any moment one part is timed, so that the parts add up to the whole."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning.pytorch as pl

from callbacks.lib.trainer_attributes import callbacks_of

__all__ = ["PartTimer", "timed", "training_seconds"]


class PartTimer:
    """Divides the time since the start of a program among named parts, of which the innermost is timed.

    A callback of a Trainer that is one, too, is found by `timed` and `training_seconds`.

    Args:
        first: the part that runs now, and whenever no other does.
        started_at: `time.monotonic` when it began; now by default.

    Example:
        >>> timer = PartTimer("start_up")
        >>> with timer.timed("train"), timer.timed("save"):
        ...     pass
        >>> sorted(timer.seconds())
        ['save', 'start_up', 'train']
    """

    def __init__(self, first: str, started_at: float | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._parts = [first]
        self._since = time.monotonic() if started_at is None else started_at

    def _charge(self) -> None:
        now, part = time.monotonic(), self._parts[-1]
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def seconds(self) -> dict[str, float]:
        """The seconds of each part so far."""
        self._charge()
        return dict(self._seconds)

    def begin(self, part: str) -> None:
        """Time this part until `end`, in place of the present one."""
        self._charge()
        self._parts.append(part)

    def end(self) -> None:
        """Go back to the part before."""
        self._charge()
        self._parts.pop()

    def replace_first(self, part: str) -> None:
        """Time this part whenever no other is timed, from now on."""
        self._charge()
        self._parts[0] = part

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a block as a part."""
        self.begin(part)
        try:
            yield
        finally:
            self.end()


def _timer(trainer: pl.Trainer) -> PartTimer | None:
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, PartTimer)), None)


def timed(trainer: pl.Trainer, part: str) -> AbstractContextManager[None]:
    """Time a block as a part of the run, where the Trainer has a `PartTimer`."""
    timer = _timer(trainer)
    return nullcontext() if timer is None else timer.timed(part)


def training_seconds(trainer: pl.Trainer) -> float:
    """Seconds of training and of validation in it so far, without saving and drawing; else those of the clock."""
    timer = _timer(trainer)
    if timer is None:
        return time.monotonic()
    seconds = timer.seconds()
    return seconds.get("train", 0.0) + seconds.get("validate", 0.0)
