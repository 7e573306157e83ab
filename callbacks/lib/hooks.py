"""Typed access to a Trainer's callbacks, log interval and loggers, some of which type checkers do not find."""

from collections.abc import Callable, Mapping
from typing import Any

from datamodules.lightning import RunningStage, pl


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks in the order of their calls."""
    untyped: Any = trainer
    callbacks: list[pl.Callback] = untyped.callbacks
    return callbacks


def set_callbacks(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Replace all callbacks; not while the Trainer runs."""
    untyped: Any = trainer
    untyped.callbacks = callbacks


def surround_callbacks(trainer: pl.Trainer, first: pl.Callback, last: pl.Callback) -> Callable[[], None]:
    """Put one callback before all others and one after them; return a function to undo it."""
    original = callbacks_of(trainer)
    set_callbacks(trainer, [first, *(callback for callback in original if callback is not last), last])
    return lambda: set_callbacks(trainer, original)


def is_idle(owner: Any, name: str, stock: type) -> bool:
    """Whether a hook is that of Lightning's base class, which does nothing."""
    # Not Lightning's `is_overridden`: it takes a hook wrapped on the instance by `functools.wraps` for not overridden.
    cls: Any = type(owner)
    is_plain = isinstance(owner, stock) and cls.__getattribute__ is object.__getattribute__
    return is_plain and getattr(cls, name, None) is getattr(stock, name) and name not in vars(owner)


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the Trainer that runs a module; None without one and under Fabric."""
    try:
        return None if module.fabric is not None else module.trainer
    except RuntimeError:
        return None


def is_training(trainer: pl.Trainer) -> bool:
    """Return ``trainer.training`` in a tenth of its time, since that compares texts."""
    return trainer.state.stage is RunningStage.TRAINING


def log_interval(trainer: pl.Trainer) -> int:
    """Return ``log_every_n_steps``; 0 if nothing is logged."""
    untyped: Any = trainer
    return int(untyped.log_every_n_steps)


def log_after_update(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Log numbers and the epoch to every logger, at the step of the update that was just made."""
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
