import math
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.loop_place import place_after_batch, trains, validation_is_next
from callbacks.checkpointing.stopping_points import (
    RULES,
    Place,
    after_batch,
    move_counters,
    update_ends,
    validation_is_due,
    waits_for_validation,
)
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from tests.end_to_end.test_exact_resume import hash_of
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence


class Validations(pl.Callback):
    """After which batches a validation came, and after which it was foretold."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.foretold: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if validation_is_next(trainer):
            self.foretold.append(trainer.fit_loop.total_batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.came.append(trainer.fit_loop.total_batch_idx)


@pytest.mark.parametrize(("interval", "every_n_epochs"), [(2, 1), (2, 2), (3, None), (0.5, 2), (1.0, 1)])
def test_a_validation_is_foretold_after_each_batch_that_one_follows(interval: float, every_n_epochs: int | None):
    silence()
    data = DataLoader(TensorDataset(*noisy_images(10)), 2)
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"val_check_interval": interval, "check_val_every_n_epoch": every_n_epochs}
    trainer = pl.Trainer(callbacks=[seen := Validations()], **QUIET | options | {"num_sanity_val_steps": 0})
    trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), data, data)
    assert seen.foretold == seen.came
    assert seen.came


def test_a_run_saved_before_a_validation_enters_it_again_from_its_first_batch():
    counters = {"ready": 3, "started": 3, "processed": 3, "completed": 3}
    progress = {"total": dict(counters), "current": dict(counters), "is_last_batch": True}
    move_counters({"fit_loop": {"epoch_loop.val_loop.batch_progress": progress}}, "validation")
    assert progress["total"] == {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    assert progress["current"] == dict.fromkeys(counters, 0)
    assert not progress["is_last_batch"]


def test_of_an_epoch_the_places_after_whole_updates_are_saved_and_those_before_a_validation_are_not():
    places = []
    for done in range(1, 11):
        whole = update_ends(done, 3, done == 10, holds_gradients=False)
        due = whole and validation_is_due(done, window=1 + (done - 1) % 3, every=4, is_last=done == 10)
        places.append(after_batch(whole, due, done == 10))
    half, due_next, end = "within update", "before validation", "before epoch end"
    assert places == [half, half, "update", half, half, due_next, half, half, due_next, end]
    assert [place for place in places if RULES[place].saves] == ["update"]
    assert not update_ends(3, 3, False, holds_gradients=True)


@pytest.mark.parametrize("per_update", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_a_validation_is_due_where_it_was_after_any_micro_batch_of_the_update(per_update: int, every: int):
    for end in range(per_update, 25, per_update):
        within = range(end - per_update + 1, end + 1)
        assert validation_is_due(end, per_update, every, False) == any(done % every == 0 for done in within)
    for every_epoch, is_last in ((math.inf, True), (math.inf, False), (None, True)):
        assert validation_is_due(7, 1, every_epoch, is_last) == (every_epoch is not None and is_last)


def test_counters_are_moved_only_where_a_run_may_be_saved():
    assert {rule.moves for rule in RULES.values() if not rule.saves} == {""}


def test_counters_that_are_not_moved_stay():
    for place, rule in RULES.items():
        if not rule.moves:
            move_counters(loops := {"fit_loop": {"untouched": 1}}, place)
            assert loops == {"fit_loop": {"untouched": 1}}


def test_a_score_of_other_weights_waits_for_the_next_validation_and_one_of_training_does_not():
    scored = (12, ["val_loss"])
    assert [waits_for_validation("val_loss", scored, updates) for updates in (12, 13)] == [False, True]
    assert not waits_for_validation("train_loss", scored, 13)
    assert not waits_for_validation(None, scored, 13)


def test_the_table_needs_no_lightning():
    code = "import sys, callbacks.checkpointing.stopping_points; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


EPOCHS, BATCHES = 2, 7


class Saves(pl.Callback):
    """Saves a run at one place, whatever the table says of it, in the second update of its second epoch or later."""

    def __init__(self, place: Place | None, folder: Path) -> None:
        self.place, self.folder, self.updates = place, folder, -1
        self.validated: list[int] = []
        self.epochs: dict[str, int] = {}

    def _at(self, trainer: pl.Trainer, place: Place, condition: bool = True) -> None:
        # The updates of an epoch are of micro-batches 2, 2, 2 and 1, with a validation after the second.
        if place == self.place and condition and self.updates < 0:
            self.updates = trainer.global_step
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        move_counters(checkpoint["loops"], cast(Place, self.place))

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, "evaluation")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, "run start")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, "epoch start", trainer.current_epoch == 1)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, "within batch", trainer.global_step > 4)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # An epoch before, so that a resumed run has another end of an epoch ahead.
        place = place_after_batch(trainer)
        self._at(trainer, place, place == "before epoch end" or trainer.global_step > 4)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trains(trainer):
            self._at(trainer, "validation start")

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trains(trainer):
            self._at(trainer, "validation")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trains(trainer):
            self.validated.append(trainer.global_step)
            self._at(trainer, "after validation")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, "epoch end")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, "run end")
        progress: Any = trainer.fit_loop.epoch_progress
        self.epochs = progress.total.state_dict()


def saved_and_resumed(place: Place | None, folder: Path, resume: Path | None = None) -> tuple[Saves, list[Any]]:
    """A run that is saved at a place, and how it ended: weights, updates, epochs, and after which it was validated."""
    silence()
    folder.mkdir()
    model = Tiny(image_network(dropout=0.3).double(), torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": 2, "val_check_interval": 4}
    callbacks = [SeedControl(1), ExactCheckpoint(folder), saves := Saves(place, folder)]
    trainer = pl.Trainer(callbacks=callbacks, **QUIET | options | {"enable_progress_bar": False})
    data = TensorDataset(*noisy_images(2 * BATCHES))
    trainer.fit(model, DataLoader(data, 2, shuffle=True), DataLoader(data, 8), ckpt_path=resume, weights_only=True)
    return saves, [hash_of(model), trainer.global_step, saves.epochs, saves.validated]


@pytest.mark.parametrize("place", RULES)
def test_the_table_says_from_where_a_run_resumes_exactly(place: Place, tmp_path: Path):
    saves, whole = saved_and_resumed(place, tmp_path / "whole")
    saved = tmp_path / "whole" / "saved.ckpt"
    try:
        _, resumed = saved_and_resumed(None, tmp_path / "resumed", saved)
    except UserError as error:
        assert RULES[place].reason in str(error)
        assert not RULES[place].saves
        return
    print(place, saves.updates, whole, resumed)
