"""Where a run can be cut so that Lightning resumes it exactly, and how it is saved there.

Lightning resumes exactly from the end of an update within an epoch, and from the end of an epoch. A checkpoint that it
saves in a validation counts the validation as done; one saved as an epoch begins takes the last epoch's batches for
this one's. Both hold all that is needed, and a few counters tell Lightning what is left to do.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from callbacks.lib.exchange import broadcast
from callbacks.lib.hooks import callbacks_of, is_fast_dev_run
from callbacks.lib.lightning_internals import hold_to_updates, save_last, uncount_update, validation_time_is_over
from callbacks.lib.updates import may_hold_gradients

__all__ = [
    "Place",
    "checkpoint_callback",
    "hold_validations_and_stops",
    "move_counters",
    "save_now",
    "uncount_cut_epoch",
    "update_is_whole",
    "validation_is_next",
]

Place = Literal["update", "validation", "epoch start"]
"""After a complete update in mid-epoch, before or in a validation, and before an epoch's first hook."""

_FIT = "fit_loop"

_TIMED: WeakKeyDictionary[pl.Trainer, tuple[int, bool]] = WeakKeyDictionary()
"""The batch after which the clock was asked, and whether a validation follows it."""


def update_is_whole(trainer: pl.Trainer) -> bool:
    """Whether the micro-batch just trained was its update's last; for `on_train_batch_end`.

    Of a module that accumulates by hand it is where no parameter holds a gradient, and at an epoch's end.
    """
    done = trainer.fit_loop.batch_idx + 1
    if trainer.is_last_batch:
        return True
    return done % trainer.accumulate_grad_batches == 0 and not may_hold_gradients(trainer)


def validation_is_next(trainer: pl.Trainer) -> bool:
    """Whether a validation within the epoch comes right after this update; for `on_train_batch_end`.

    One that is due after any of its micro-batches comes after the last. Of a time, rank 0's clock decides, once.
    """
    epochs, every = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or (epochs is not None and (trainer.current_epoch + 1) % epochs):
        return False
    loop = trainer.fit_loop
    if (is_over := validation_time_is_over(trainer)) is not None:
        update, due = _TIMED.get(trainer, (-1, False))
        if update != loop.total_batch_idx:
            due = broadcast(trainer.strategy, is_over)
            _TIMED[trainer] = loop.total_batch_idx, due
        return due
    if not every or math.isinf(every):
        return bool(every) and (trainer.is_last_batch or loop.batch_idx + 1 == trainer.num_training_batches)
    done = 1 + (loop.total_batch_idx if epochs is None else loop.batch_idx)
    before = done - loop.batch_idx % trainer.accumulate_grad_batches - 1
    return done // every > before // every


def move_counters(loops: dict[str, Any], place: Place) -> None:
    """Make Lightning resume from a place as if the run had not been interrupted there.

    Args:
        loops: the checkpoint's entry of that name; changed in place.
        place: where it is being saved.
    """
    fit = loops[_FIT]
    if place == "validation":
        # One batch begun and none done: Lightning enters the validation again, and starts it from the beginning.
        progress = fit["epoch_loop.val_loop.batch_progress"]
        progress["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        progress["current"] |= {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        progress["is_last_batch"] = False
    elif place == "epoch start":
        # As where ModelCheckpoint saves: the last epoch is processed and not completed, and the next not yet ready.
        for counters in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
            counters |= {"ready": counters["processed"], "completed": counters["processed"] - 1}


def uncount_cut_epoch(loop: dict[str, Any]) -> None:
    """Make the counters of an epoch that was ended early those of its last update, from which Lightning resumes.

    When ``max_steps`` ends an epoch, it and its last batch count as done before the checkpoint is saved.

    Args:
        loop: the state of the fit loop; changed in place.
    """
    epoch, batch = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    counted = epoch["current"]["processed"] == epoch["current"]["started"]
    if not counted or batch["is_last_batch"] or not batch["current"]["completed"]:
        return
    for counters in (epoch["total"], epoch["current"]):
        counters["processed"] -= 1
    for counters in (batch["total"], batch["current"]):
        counters["completed"] -= 1
    uncount_update(loop)


def hold_validations_and_stops(trainer: pl.Trainer) -> Callable[[], None]:
    """Make a run validate and stop after complete updates; for `on_train_start`. Returns how to undo it."""
    return hold_to_updates(trainer, update_is_whole, validation_is_next)


def checkpoint_callback(trainer: pl.Trainer) -> ModelCheckpoint | None:
    """The callback through which a run is saved: the first that keeps a last checkpoint, else the first."""
    found = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    keeps_last = [callback for callback in found if callback.save_last]
    return next(iter(keeps_last + found), None)


def save_now(trainer: pl.Trainer, place: Place, validates: bool = False) -> str | None:
    """Save the run as its `last.ckpt`, whatever moments its checkpoint callback keeps to; to be called on all ranks.

    Args:
        validates: batches are being validated: Lightning's `WeightAveraging` has put the average into the module.

    Returns:
        The file; None where the run keeps no checkpoints, or it could not be written.
    """
    checkpoint = checkpoint_callback(trainer)
    if checkpoint is None or is_fast_dev_run(trainer):
        return None
    if validates:
        for callback in callbacks_of(trainer):
            if isinstance(callback, WeightAveraging):
                # The trained weights are with the callback.
                callback.on_validation_epoch_end(trainer, trainer.lightning_module)
    last = Path(checkpoint.last_model_path)
    if trainer.is_global_zero and last.is_symlink():
        last.unlink()  # Of save_last="link": writing would go through to the checkpoint behind it.
    settings = checkpoint.save_last, checkpoint.save_weights_only
    checkpoint.save_last, checkpoint.save_weights_only = True, False
    try:
        save_last(checkpoint, trainer)
    finally:
        checkpoint.save_last, checkpoint.save_weights_only = settings
    # A plug-in that survives a full disk remembers what it could not write.
    failed = checkpoint.last_model_path in getattr(trainer.strategy.checkpoint_io, "failures", {})
    return None if failed else checkpoint.last_model_path
