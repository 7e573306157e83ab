"""Attributes of a Trainer that Lightning sets from outside its class, where type checkers do not find them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

__all__ = ["callbacks_of", "datamodule_of", "is_fast_dev_run", "log_interval", "surround_callbacks"]


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks in the order of their calls."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def surround_callbacks(trainer: pl.Trainer, first: pl.Callback, last: pl.Callback) -> Callable[[], None]:
    """Calls one callback before all others and one after them; returns how to undo it."""
    before = callbacks_of(trainer)
    others = [callback for callback in before if callback is not last]
    trainer.callbacks = [first, *others, last]  # type: ignore[attr-defined]

    def undo() -> None:
        trainer.callbacks = before  # type: ignore[attr-defined]

    return undo


def datamodule_of(trainer: pl.Trainer) -> Any:
    """The data module of the run; None where loaders were passed."""
    return getattr(trainer, "datamodule", None)


def log_interval(trainer: pl.Trainer) -> int:
    """``log_every_n_steps``; 0 where nothing is logged."""
    every: Any = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return int(every)


def is_fast_dev_run(trainer: pl.Trainer) -> bool:
    """Whether the run is a trial of a few batches, which saves and logs nothing."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
