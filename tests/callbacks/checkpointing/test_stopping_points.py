from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.stopping_points import (
    SAVE_POINTS,
    SavePoint,
    move_counters,
    save_point_after_update,
    trains,
)
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from tests.end_to_end.test_exact_resume import hash_of
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


def test_counters_are_moved_only_where_a_run_may_be_saved():
    assert {rule.adjusts for rule in SAVE_POINTS.values() if not rule.saves} == {""}


@pytest.mark.parametrize("place", [place for place, rule in SAVE_POINTS.items() if rule.adjusts == "epoch"])
def test_an_epoch_that_is_saved_as_the_next_starts_is_processed(place: SavePoint):
    counters = {"ready": 3, "started": 2, "processed": 2, "completed": 2}
    loops: dict[str, Any] = {"fit_loop": {"epoch_progress": {"total": {**counters}, "current": {**counters}}}}
    move_counters(loops, place)
    as_model_checkpoint_saves = {"ready": 2, "started": 2, "processed": 2, "completed": 1}
    assert loops["fit_loop"]["epoch_progress"] == dict.fromkeys(("total", "current"), as_model_checkpoint_saves)


def test_a_validation_that_is_saved_begins_again():
    counters = {"ready": 3, "started": 3, "processed": 2, "completed": 2}
    progress: dict[str, Any] = {"total": {**counters}, "current": {**counters}, "is_last_batch": True}
    move_counters({"fit_loop": {"epoch_loop.val_loop.batch_progress": progress}}, "validation")
    assert progress["total"] == {"ready": 1, "started": 1, "processed": 0, "completed": 0}, "Lightning enters it again"
    assert progress["current"] == dict.fromkeys(counters, 0)
    assert not progress["is_last_batch"]


class SaveAt(pl.Callback):
    """Saves a run at one place of its second epoch, or where the place is first met, whatever the table says of it."""

    def __init__(self, place: SavePoint | None, file: Path) -> None:
        self.place, self.file, self.saving = place, file, False
        self.updates, self.validations = -1, 0
        self.validated: list[int] = []
        in_second: Callable[[pl.Trainer], bool] = lambda trainer: trainer.current_epoch == 1  # noqa: E731
        hooks: dict[str, tuple[SavePoint, Callable[[pl.Trainer], bool]]] = {
            "on_sanity_check_start": ("evaluation", bool),
            "on_train_start": ("run start", bool),
            "on_train_epoch_start": ("epoch start", in_second),
            "on_after_backward": ("within batch", in_second),
            "on_validation_start": ("validation start", trains),
            "on_validation_batch_end": ("validation", trains),
            "on_train_epoch_end": ("epoch end", bool),
            "on_train_end": ("run end", bool),
        }
        for hook, (at, is_time) in hooks.items():
            setattr(self, hook, lambda trainer, *_, at=at, is_time=is_time: self._at(trainer, at, is_time(trainer)))

    def _at(self, trainer: pl.Trainer, place: SavePoint, is_time: bool) -> None:
        if place == self.place and is_time and self.updates < 0:
            self.updates, self.validations, self.saving = trainer.global_step, len(self.validated), True
            trainer.save_checkpoint(self.file)
            self.saving = False

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self.saving and self.place:
            move_counters(checkpoint["loops"], self.place)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trains(trainer):
            self.validated.append(trainer.global_step)

    def on_update_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        place = save_point_after_update(trainer)
        # A run that has no epoch left would not show that it miscounts them.
        self._at(trainer, place, place == "before epoch end" or trainer.current_epoch == 1)


def trained(place: SavePoint | None, file: Path, resume: Path | None = None) -> tuple[SaveAt, list[Any]]:
    """A run of two epochs, and what it ends with: its weights, updates and epochs.

    The updates of an epoch have 2, 2, 2 and 1 micro-batches; a validation comes after the second.
    """
    model = Tiny(image_network(dropout=0.3).double(), torch.optim.SGD, lr=0.1)
    options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(
        SeedControl(1), GradientAccumulation(2), ExactCheckpoint(file.parent), save := SaveAt(place, file), **options
    )
    data = TensorDataset(*noisy_images(14))
    trainer.fit(model, DataLoader(data, 2, shuffle=True), DataLoader(data, 8), ckpt_path=resume, weights_only=True)
    return save, [hash_of(model), trainer.global_step, trainer.current_epoch]


@pytest.mark.parametrize("place", SAVE_POINTS)
def test_the_table_says_from_where_a_run_resumes_exactly(place: SavePoint, tmp_path: Path):
    rule, (save, whole) = SAVE_POINTS[place], trained(place, tmp_path / "saved.ckpt")
    if place == "within update":
        assert not save.updates > 0, "only a module that optimizes manually comes by"
        return
    if place == "within batch":
        with pytest.raises(UserError, match=rule.reason):
            trained(None, tmp_path / "none.ckpt", tmp_path / "saved.ckpt")
        return
    again, resumed = trained(None, tmp_path / "none.ckpt", tmp_path / "saved.ckpt")
    is_exact = (whole, save.validated[save.validations :]) == (resumed, again.validated)
    # Where nothing was trained there is nothing to save.
    assert is_exact == (rule.saves or not save.updates)
