"""When a run may be saved so that Lightning resumes it exactly: one table, and where a Trainer is in it.

`RULES` says for each place whether a save may happen there, and which counters of Lightning's loops are moved in the
checkpoint.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import lightning.pytorch as pl

from callbacks.lib.exchange import broadcast
from callbacks.lib.lightning_internals import validation_time_is_over
from callbacks.lib.updates import may_hold_gradients

Place = str
"""A key of `RULES`."""


class Rule(NamedTuple):
    """Whether a run may be saved at a place, which counters are moved so that it goes on there, and why."""

    saves: bool
    moves: Literal["", "validation", "epoch"]
    reason: str


RULES: Mapping[Place, Rule] = {
    "run start": Rule(False, "", "nothing has been trained since"),
    "within batch": Rule(False, "", "in the midst of a batch"),
    "within update": Rule(False, "", "no checkpoint holds the gradients of half an update"),
    "update": Rule(True, "", "it goes on with the next batch"),
    "before validation": Rule(False, "", "the resumed run would leave the validation out"),
    "validation start": Rule(True, "validation", "it validates from the start; the counters say that it is done"),
    "validation": Rule(True, "validation", "it validates from the start; the counters say that it is done"),
    "after validation": Rule(True, "", "it goes on with the next batch"),
    "before epoch end": Rule(False, "", "the resumed run would not count the epoch that it begins"),
    "epoch end": Rule(True, "", "it goes on with the next epoch; one that was cut, with its next batch"),
    "epoch start": Rule(True, "epoch", "it begins the epoch; the counters give it the batches of the last one"),
    "run end": Rule(True, "epoch", "it goes on with the next epoch; the counters say that it has begun"),
    "evaluation": Rule(False, "", "nothing is trained, as in a sanity check"),
}
"""In the order in which a run comes by; an evaluation is one outside of training."""


def validation_is_due(done: int, window: int, every: float | None, is_last: bool) -> bool:
    """Whether a validation is due after any micro-batch of an update, whose last it follows.

    Args:
        done: micro-batches so far, of the epoch or of the run.
        window: how many of them are of this update.
        every: from one validation to the next; infinite for one at the epoch's end.
        is_last: whether the last was the epoch's.

    Example:
        >>> [validation_is_due(done, window=4, every=6, is_last=False) for done in (4, 8, 12)]
        [False, True, True]
    """
    if not every or math.isinf(every):
        return bool(every) and is_last
    return done // every > (done - window) // every


def move_counters(loops: dict[str, Any], place: Place) -> None:
    """Make Lightning resume from a place as if the run had not been interrupted there.

    Args:
        loops: the checkpoint's entry of that name; changed in place.
        place: where it is being saved.
    """
    fit, moves = loops["fit_loop"], RULES[place].moves
    if moves == "validation":
        # One batch begun and none done: Lightning enters the validation again, and starts it from the beginning.
        progress = fit["epoch_loop.val_loop.batch_progress"]
        progress["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        progress["current"] |= {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        progress["is_last_batch"] = False
    elif moves == "epoch":
        # As where ModelCheckpoint saves: the last epoch is processed and not completed, and the next not yet ready.
        for counters in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
            counters |= {"ready": counters["processed"], "completed": counters["processed"] - 1}


def uncount_cut_epoch(loop: dict[str, Any]) -> bool:
    """Make the counters of an epoch that was ended early those of its last update, from which Lightning resumes.

    When ``max_steps`` ends an epoch, it and its last batch count as done before the checkpoint is saved.

    Args:
        loop: the state of the fit loop; changed in place.

    Returns:
        Whether it was.
    """
    epoch, batch = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    counted = epoch["current"]["processed"] == epoch["current"]["started"]
    if not counted or batch["is_last_batch"] or not batch["current"]["completed"]:
        return False
    for counters in (epoch["total"], epoch["current"]):
        counters["processed"] -= 1
    for counters in (batch["total"], batch["current"]):
        counters["completed"] -= 1
    return True


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
    if epochs is not None and (trainer.current_epoch + 1) % epochs:
        return False
    if (is_over := validation_time_is_over(trainer)) is None:
        done = 1 + (loop.total_batch_idx if epochs is None else loop.batch_idx)
        window = 1 + loop.batch_idx % trainer.accumulate_grad_batches
        is_last = trainer.is_last_batch or loop.batch_idx + 1 == trainer.num_training_batches
        return validation_is_due(done, window, trainer.val_check_batch, is_last) and trainer.enable_validation
    if not trainer.enable_validation:
        return False
    update, due = _TIMED.get(trainer, (-1, False))
    if update != loop.total_batch_idx:
        due = broadcast(trainer.strategy, is_over)
        _TIMED[trainer] = loop.total_batch_idx, due
    return due


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
