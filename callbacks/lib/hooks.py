"""What callbacks ask of a Trainer and its hooks: attributes that type checkers do not find, and calls to leave out."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import lightning.pytorch as pl

from datamodules.errors import UserError


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
    before = callbacks_of(trainer)
    set_callbacks(trainer, [first, *(callback for callback in before if callback is not last), last])
    return lambda: set_callbacks(trainer, before)


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that runs a module; None where `LightningModule.trainer` would raise, and under Fabric."""
    try:
        return None if module.fabric is not None else module.trainer
    except RuntimeError:
        return None


def datamodule_of(trainer: pl.Trainer) -> Any:
    """The data module of the run; None where loaders were passed."""
    return getattr(trainer, "datamodule", None)


def log_interval(trainer: pl.Trainer) -> int:
    """``log_every_n_steps``; 0 where nothing is logged."""
    untyped: Any = trainer
    return int(untyped.log_every_n_steps)


def log_after_update(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Hands numbers and the epoch to every logger, as of the update that was just made."""
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)


def is_fast_dev_run(trainer: pl.Trainer) -> bool:
    """Whether the run is a trial of a few batches, which saves and logs nothing."""
    untyped: Any = trainer
    return bool(untyped.fast_dev_run)


def refuse_dataloader_iter(callback: pl.Callback, pl_module: pl.LightningModule) -> None:
    """For callbacks that depend on the number of a batch, of which Lightning's hooks then get another (#18619).

    Raises:
        UserError: the module's `training_step` reads batches by itself.
    """
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise UserError(
            f"{type(pl_module).__name__}.training_step takes a dataloader_iter, and {type(callback).__name__} has to"
            " know which batch it reads: write training_step(self, batch, batch_idx), or remove the callback"
        )


_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def drop_idle_hooks(callback: pl.Callback, idle: Collection[Callable[..., Any]] = ()) -> None:
    """Keep Lightning from calling hooks of a callback in each step, until `restore_hooks`.

    Args:
        idle: methods of the callback's class that would do nothing in this run. Those that it inherits from Lightning's
            `Callback` do nothing in any. A method that a subclass overrides is called.

    Example:
        >>> class Prints(pl.Callback):
        ...     def on_train_batch_end(self, *args): ...
        >>> callback = Prints()
        >>> drop_idle_hooks(callback)
        >>> callback.on_train_batch_start is None, callback.on_train_batch_end is None
        (True, False)
    """
    for name in _OF_A_STEP:
        if name not in vars(callback) and getattr(type(callback), name) in (getattr(pl.Callback, name), *idle):
            setattr(callback, name, None)


def restore_hooks(callback: pl.Callback) -> None:
    """Have all hooks of a callback called again."""
    for name in _OF_A_STEP:
        if vars(callback).get(name, callback) is None:
            delattr(callback, name)
