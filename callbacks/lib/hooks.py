"""What callbacks ask of a Trainer, of which type checkers do not find all attributes."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage

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


def is_idle(owner: Any, name: str, stock: type) -> bool:
    """Whether a hook is that of Lightning's class, which does nothing."""
    kind: Any = type(owner)
    is_plain = isinstance(owner, stock) and kind.__getattribute__ is object.__getattribute__
    return is_plain and getattr(kind, name, None) is getattr(stock, name) and name not in vars(owner)


def after_own_hook(pl_module: pl.LightningModule, name: str, action: Callable[[], None]) -> None:
    """Calls an action as soon as the module's hook has ended, which Lightning calls after those of callbacks.

    What the module changes there is then in a checkpoint that the action saves. Without such a hook it is called now.
    """
    if is_idle(pl_module, name, pl.LightningModule):
        action()
        return
    attributes: dict[str, Any] = vars(pl_module)
    hook, own = getattr(pl_module, name), attributes.get(name)

    def hook_then_action(*args: Any) -> Any:
        undo()
        answer = hook(*args)
        action()
        return answer

    def undo() -> None:
        del attributes[name]
        if own is not None:
            attributes[name] = own

    attributes[name] = hook_then_action
    attributes[name].undo = undo


def forget_actions(pl_module: pl.LightningModule) -> None:
    """Drops the actions of `after_own_hook` that an exception of another callback has left."""
    for name in ("on_train_batch_end", "on_validation_end"):
        while undo := getattr(vars(pl_module).get(name), "undo", None):
            undo()


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that runs a module; None where `LightningModule.trainer` would raise, and under Fabric."""
    try:
        return None if module.fabric is not None else module.trainer
    except RuntimeError:
        return None


def is_training(trainer: pl.Trainer) -> bool:
    """``trainer.training`` in a tenth of its time: that compares texts."""
    return trainer.state.stage is RunningStage.TRAINING


def log_interval(trainer: pl.Trainer) -> int:
    """``log_every_n_steps``; 0 where nothing is logged."""
    untyped: Any = trainer
    return int(untyped.log_every_n_steps)


def log_after_update(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Hands numbers and the epoch to every logger, as of the update that was just made."""
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)


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
