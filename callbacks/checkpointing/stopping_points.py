"""Points of a run at which it may be saved so that Lightning resumes it exactly.

`SAVE_POINTS` states for each point whether a save is allowed, and which counters of Lightning's loops are changed in
the checkpoint.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from callbacks.lib.updates import may_hold_gradients
from datamodules.lightning import pl

SavePoint = str
"""A key of `SAVE_POINTS`."""


class Rule(NamedTuple):
    """Rule of a point: whether a save is allowed, which counters are changed for the resume, and the reason."""

    saves: bool
    adjusts: Literal["", "validation", "epoch"]
    reason: str


SAVE_POINTS: Mapping[SavePoint, Rule] = {
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
"""Rules in the order of a run; "evaluation" is one outside of training."""


def move_counters(loops: dict[str, Any], place: SavePoint) -> None:
    """Change the counters of a checkpoint so that Lightning resumes at the point where it is saved.

    Args:
        loops: the checkpoint's entry "loops"; changed in place.
        place: the point of the save.
    """
    fit = loops["fit_loop"]
    moves = SAVE_POINTS[place].adjusts
    if moves == "validation":
        # One batch started and none processed: Lightning enters the validation again, and starts it from its beginning.
        progress = fit["epoch_loop.val_loop.batch_progress"]
        progress["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        progress["current"] |= {"ready": 0, "started": 0, "processed": 0, "completed": 0}
        progress["is_last_batch"] = False
    elif moves == "epoch":
        # As when ModelCheckpoint saves: the last epoch is processed and not completed, and the next one not yet ready.
        for counters in (fit["epoch_progress"]["total"], fit["epoch_progress"]["current"]):
            counters |= {"ready": counters["processed"], "completed": counters["processed"] - 1}


def rewind_interrupted_epoch(loop: dict[str, Any]) -> None:
    """Mark an epoch that `max_steps` has cut as not processed, so that a run resumes within it.

    Args:
        loop: the state of the fit loop; changed in place.
    """
    epoch = loop["epoch_progress"]
    batch = loop["epoch_loop.batch_progress"]
    is_processed = epoch["current"]["processed"] == epoch["current"]["started"]
    if is_processed and not batch["is_last_batch"] and batch["current"]["completed"]:
        epoch["total"]["processed"] -= 1
        epoch["current"]["processed"] -= 1


def save_point_after_update(trainer: pl.Trainer) -> SavePoint:
    """Return the key of `SAVE_POINTS` for `on_update_end`."""
    if trainer.is_last_batch:
        return "before epoch end"
    return "within update" if may_hold_gradients(trainer) else "update"


def trains(trainer: pl.Trainer) -> bool:
    """Whether a Trainer trains, and its validation is neither a sanity check nor outside of training."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking
