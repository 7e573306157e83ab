"""When a run may be saved so that Lightning resumes it exactly: one table, and where a Trainer is in it.

`RULES` says for each place whether a save may happen there, and which counters of Lightning's loops are moved in the
checkpoint.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl

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
    "within update": Rule(False, "", "no checkpoint holds the gradients that a module accumulates by itself"),
    "update": Rule(True, "", "it goes on with the next update; a validation and schedules come before"),
    "validation start": Rule(True, "validation", "it validates from the start; the counters say that it is done"),
    "validation": Rule(True, "validation", "it validates from the start; the counters say that it is done"),
    "before epoch end": Rule(True, "", "it goes on with the end of the epoch"),
    "epoch end": Rule(True, "", "it goes on with the next epoch; one that was cut, with its next update"),
    "epoch start": Rule(True, "epoch", "it begins the epoch; the counters give it the batches of the last one"),
    "run end": Rule(True, "epoch", "it goes on with the next epoch; the counters say that it has begun"),
    "evaluation": Rule(False, "", "nothing is trained, as in a sanity check"),
}
"""In the order in which a run comes by; an evaluation is one outside of training."""


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


def rewind_interrupted_epoch(loop: dict[str, Any]) -> None:
    """Take back that an epoch which `max_steps` has ended early counts as done, so that a run resumes within it.

    Args:
        loop: the state of the fit loop; changed in place.
    """
    epoch = loop["epoch_progress"]
    batch = loop["epoch_loop.batch_progress"]
    counted = epoch["current"]["processed"] == epoch["current"]["started"]
    if counted and not batch["is_last_batch"] and batch["current"]["completed"]:
        epoch["total"]["processed"] -= 1
        epoch["current"]["processed"] -= 1


def place_after_update(trainer: pl.Trainer) -> Place:
    """The place in `on_update_end`."""
    if trainer.is_last_batch:
        return "before epoch end"
    return "within update" if may_hold_gradients(trainer) else "update"


def trains(trainer: pl.Trainer) -> bool:
    """Whether a run trains: its validations are no sanity check, and no evaluation of its own."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking
