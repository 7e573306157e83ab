"""What limits mean, on any split."""

import re
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint, GradientAccumulation
from callbacks.checkpointing.stopping_points import move_counters
from datamodules import UserError
from recipes.check_optimization import reject_plateau_by_time
from recipes.runner.settings import TrainerSettings, limits_per_device, micro_batches_of_update
from tests.support.minimal_recipe import Line
from tests.support.tables import QUIET, silence


@pytest.mark.parametrize(
    ("accumulate", "items", "batch_size", "micro_batches"),
    [
        (3, None, 16, 6),
        (3, 100, 16, 7),  # Saved with the run, on other devices.
        (1, 64, None, None),
    ],
)
def test_the_micro_batches_of_an_update_follow_its_settings(accumulate, items, batch_size, micro_batches):
    assert micro_batches_of_update(accumulate, items, batch_size, 2) == micro_batches


def test_batches_of_an_evaluation_are_dealt_to_the_devices():
    options = {"limit_val_batches": 5, "limit_test_batches": 4}
    each = [limits_per_device(options, rank, 3) for rank in range(3)]
    assert [limits["limit_val_batches"] for limits in each] == [2, 2, 1]
    assert [limits["limit_test_batches"] for limits in each] == [2, 1, 1]
    with pytest.raises(UserError, match=r"limit_val_batches=1 leaves 1 of 2 devices without a batch; .*=2 or more"):
        limits_per_device({"limit_val_batches": 1}, 0, 2)
    with pytest.raises(UserError, match=r"limit_val_batches=0\.5 is a share of each device's batches.*=2$"):
        limits_per_device({"limit_val_batches": 0.5}, 0, 2)


@pytest.mark.parametrize(("value", "is_right"), [(1.5, False), (-1, False), (-0.5, False), (2.0, True), (0.5, True)])
def test_a_number_of_batches_is_whole_or_a_share(value: float, is_right: bool):
    for name in ("limit_train_batches", "overfit_batches", "val_check_interval"):
        settings: dict[str, Any] = {name: value}
        if is_right:
            TrainerSettings(**settings)
            continue
        reason = re.escape(f"{name}={value}: expected a whole number, or a share from 0 to 1")
        with pytest.raises(UserError, match=reason):
            TrainerSettings(**settings)


@pytest.mark.parametrize(("name", "lowest"), [("max_epochs", -1), ("max_steps", -1), ("log_every_n_steps", 0)])
def test_a_count_below_its_range_is_rejected(name: str, lowest: int):
    lowest_settings: dict[str, Any] = {name: lowest}
    TrainerSettings(**lowest_settings)
    below: dict[str, Any] = {name: lowest - 1}
    with pytest.raises(UserError, match=re.escape(f"{name}={lowest - 1}: expected a whole number, {lowest} or more")):
        TrainerSettings(**below)


def test_shares_stay_as_they_are():
    options = {"limit_train_batches": 0.5, "val_check_interval": 0.5, "limit_val_batches": 0, "other": 3}
    assert limits_per_device(options | {"limit_test_batches": None}, 0, 2) == {}


class Scored(Line):
    """Counts its validations."""

    def on_fit_start(self) -> None:
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        self.log("score", -abs(self.trainer.global_step - 5.0))


def fit(
    batches: int, steps: Any = 4, more: Any = (), ckpt_path: Any = None, module: Any = None, **options: Any
) -> tuple[pl.Trainer, Scored]:
    silence()
    samples = torch.linspace(-1, 1, batches).unsqueeze(1)
    loader: Any = DataLoader(TensorDataset(samples, samples), batch_size=1)
    accumulation = GradientAccumulation(steps)
    check = LambdaCallback(on_train_start=lambda trainer, _: reject_plateau_by_time(trainer))
    options = {"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0} | options
    trainer = pl.Trainer(**QUIET | options, callbacks=[accumulation, check, *more])
    module = module or Scored()
    validation = DataLoader(TensorDataset(samples[:1], samples[:1]))
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path, weights_only=True)
    return trainer, module


def test_limits_of_training_count_updates():
    for batches in (61, 63, 64):
        assert fit(batches, limit_train_batches=0.5)[0].global_step == 8
        assert fit(batches, limit_train_batches=3)[0].global_step == 3
    assert fit(63)[0].global_step == 16, "the last update of an epoch may be short"


@pytest.mark.parametrize(
    ("interval", "validated"),
    [
        (1, [*range(1, 9)]),
        (0.25, [2, 4, 6, 8]),
        (0.3, [2, 4, 6, 8]),
        (2, [2, 4, 6, 8]),
        (3, [3, 6]),
        (8, [8]),
        (1.0, [8]),
        (0.01, [*range(1, 9)]),
    ],
)
def test_validations_follow_the_same_updates_on_any_split(interval, validated):
    two_epochs = [*validated, *(step + 8 for step in validated)]
    assert fit(8, 1, val_check_interval=interval, max_epochs=2)[1].validated == two_epochs
    for batches in (29, 30, 32):
        assert fit(batches, val_check_interval=interval, max_epochs=2)[1].validated == two_epochs, batches


def test_an_epoch_that_is_resumed_is_validated_at_its_end(tmp_path):
    path = tmp_path / "cut.ckpt"
    save = LambdaCallback(on_train_batch_end=lambda trainer, *args: args[-1] == 6 and trainer.save_checkpoint(path))
    assert fit(30, val_check_interval=2, more=[save])[1].validated == [2, 4, 6, 8]
    assert fit(30, val_check_interval=2, ckpt_path=path)[1].validated == [8]


@pytest.mark.parametrize("check_epochs", [1, 2, None])
def test_an_interval_of_time_validates_after_whole_updates(tmp_path, check_epochs, monkeypatch):
    options = {"max_epochs": 2, "enable_checkpointing": True, "check_val_every_n_epoch": check_epochs}

    def validated(interval: timedelta, name: str = "best", **more: Any) -> list[int]:
        best = ExactCheckpoint(tmp_path, name, monitor="score", mode="max")
        found = fit(30, more=[best], val_check_interval=interval, **options | more)[1].validated
        assert best.best_model_path == (str(tmp_path / f"{name}.ckpt") if found else "")
        return found

    first = 9 if check_epochs == 2 else 1
    assert validated(timedelta(microseconds=1)) == [*range(first, 17)]
    assert torch.load(tmp_path / "best.ckpt")["global_step"] == max(first, 5)
    assert validated(timedelta(hours=1), "none") == []
    # A rank follows the clock of rank 0, for which no time has passed.
    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", lambda _, value, *_source: False if value is True else value)
    assert validated(timedelta(microseconds=1), "other") == []


def test_a_run_resumes_between_two_validations_by_time(tmp_path):
    path = tmp_path / "cut.ckpt"
    save = LambdaCallback(on_train_batch_end=lambda trainer, *args: args[-1] == 6 and trainer.save_checkpoint(path))
    options: dict[str, Any] = {"val_check_interval": "00:01:00:00", "enable_checkpointing": True}
    fit(30, more=[save, ExactCheckpoint(tmp_path / "whole")], **options)
    resumed, module = fit(30, more=[ExactCheckpoint(tmp_path / "cut")], ckpt_path=path, **options)
    assert (resumed.global_step, module.validated) == (8, [])
    checkpoint = torch.load(path)
    move_counters(checkpoint["loops"], "validation")
    torch.save(checkpoint, path)
    resumed, module = fit(30, more=[ExactCheckpoint(tmp_path / "in")], ckpt_path=path, **options)
    assert (resumed.global_step, module.validated) == (8, [7])


def test_a_plateau_schedule_needs_validations_by_updates():
    class Plateau(Scored):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters())
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "score"}}

    with pytest.raises(UserError, match="schedule='plateau' follows the score of each epoch"):
        fit(8, module=Plateau(), val_check_interval=timedelta(seconds=1))


def test_an_interval_longer_than_an_epoch_is_rejected_in_updates():
    with pytest.raises(UserError, match="val_check_interval=9 is more than the 8 updates of an epoch"):
        fit(30, val_check_interval=9)
    assert fit(30, val_check_interval=9, max_epochs=2, check_val_every_n_epoch=None)[1].validated == [9]
