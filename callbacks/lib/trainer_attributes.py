"""Attributes of a Trainer that Lightning sets from outside its class, where type checkers do not find them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

__all__ = [
    "callbacks_of",
    "datamodule_of",
    "is_fast_dev_run",
    "log_interval",
    "set_callbacks",
    "surround_callbacks",
]


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks in the order of their calls."""
    untyped: Any = trainer
    callbacks: list[pl.Callback] = untyped.callbacks
    return callbacks


def set_callbacks(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Replaces all callbacks; not while the Trainer runs."""
    untyped: Any = trainer
    untyped.callbacks = callbacks


def surround_callbacks(trainer: pl.Trainer, first: pl.Callback, last: pl.Callback) -> Callable[[], None]:
    """Calls one callback before all others and one after them; returns how to undo it."""
    untyped: Any = trainer
    before = callbacks_of(trainer)
    others = [callback for callback in before if callback is not last]
    untyped.callbacks = [first, *others, last]

    def undo() -> None:
        untyped.callbacks = before

    return undo


def datamodule_of(trainer: pl.Trainer) -> Any:
    """The data module of the run; None where loaders were passed."""
    return getattr(trainer, "datamodule", None)


def log_interval(trainer: pl.Trainer) -> int:
    """``log_every_n_steps``; 0 where nothing is logged."""
    untyped: Any = trainer
    return int(untyped.log_every_n_steps)


def is_fast_dev_run(trainer: pl.Trainer) -> bool:
    """Whether the run is a trial of a few batches, which saves and logs nothing."""
    untyped: Any = trainer
    return bool(untyped.fast_dev_run)
