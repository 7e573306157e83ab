"""Where a Trainer is in its loop, as the table of `callbacks.checkpointing.stopping_points` names the places."""

from weakref import WeakKeyDictionary

import lightning.pytorch as pl

from callbacks.checkpointing.stopping_points import Place, validation_is_due
from callbacks.lib.exchange import broadcast
from callbacks.lib.lightning_internals import validation_time_is_over
from callbacks.lib.updates import may_hold_gradients

__all__ = ["place_after_batch", "trains", "update_is_whole", "validation_is_next"]

_TIMED: WeakKeyDictionary[pl.Trainer, tuple[int, bool]] = WeakKeyDictionary()
"""The batch after which the clock was asked, and whether a validation follows it."""


def update_is_whole(trainer: pl.Trainer) -> bool:
    """Whether the micro-batch just trained was its update's last; for `on_train_batch_end`.

    Of a module that accumulates by hand it is where no parameter holds a gradient, and at an epoch's end.
    """
    done, per_update = trainer.fit_loop.batch_idx + 1, trainer.accumulate_grad_batches
    return trainer.is_last_batch or (done % per_update == 0 and not may_hold_gradients(trainer))


def validation_is_next(trainer: pl.Trainer) -> bool:
    """Whether a validation within the epoch comes right after this update; for `on_train_batch_end`.

    One that is due after any of its micro-batches comes after the last. Of a time, rank 0's clock decides, once.
    """
    epochs, loop = trainer.check_val_every_n_epoch, trainer.fit_loop
    if not trainer.enable_validation or (epochs is not None and (trainer.current_epoch + 1) % epochs):
        return False
    if (is_over := validation_time_is_over(trainer)) is not None:
        update, due = _TIMED.get(trainer, (-1, False))
        if update != loop.total_batch_idx:
            due = broadcast(trainer.strategy, is_over)
            _TIMED[trainer] = loop.total_batch_idx, due
        return due
    done = 1 + (loop.total_batch_idx if epochs is None else loop.batch_idx)
    window = 1 + loop.batch_idx % trainer.accumulate_grad_batches
    is_last = trainer.is_last_batch or loop.batch_idx + 1 == trainer.num_training_batches
    return validation_is_due(done, window, trainer.val_check_batch, is_last)


def place_after_batch(trainer: pl.Trainer) -> Place:
    """The place in `on_train_batch_end`."""
    if not update_is_whole(trainer):
        return "within update"
    if validation_is_next(trainer):
        return "before validation"
    return "before epoch end" if trainer.is_last_batch else "update"


def trains(trainer: pl.Trainer) -> bool:
    """Whether a run trains: its validations are no sanity check, and no evaluation of its own."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking
