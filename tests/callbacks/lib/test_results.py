"""What ranks log under other names, in another order or of unequal numbers of samples is that of one device."""

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MeanMetric

from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl
from datamodules import EvaluationLoader, RunFailedError, TrainLoader
from datamodules.notes import log
from tests.callbacks.test_updates import Line
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

pytestmark = pytest.mark.lightning


class Notes(logging.Handler):
    """The notes of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Logs(Line):
    """Logs the values of a batch by a function in one hook."""

    monitor: str | None = None
    """What ReduceLROnPlateau reads."""

    def __init__(self, log_in: Callable[["Logs", Tensor], None], hook: str) -> None:
        super().__init__()
        self.log_in, self.hook = log_in, hook
        self.mean = MeanMetric()
        self.steps: list[float] = []

    def _log(self, hook: str, values: Tensor) -> None:
        if hook == self.hook:
            self.log_in(self, values)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._log("training_step", batch[0][:, 0])
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("validation_step", batch[0][:, 0])

    def on_validation_epoch_end(self) -> None:
        self._log("on_validation_epoch_end", torch.tensor([1.0, 4.0]))

    def on_before_backward(self, loss: Tensor) -> None:
        if self.hook == "training_step":
            self.log("micro_batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        if "step" in self.trainer.callback_metrics:
            self.steps.append(float(self.trainer.callback_metrics["step"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.monitor is None:
            return optimizer
        plateau = ReduceLROnPlateau(optimizer, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def fit(
    world_size: int,
    log_in: Callable[[Logs, Tensor], None],
    hook: str,
    *callbacks: pl.Callback,
    monitor: str | None = None,
    epochs: int = 1,
) -> dict[str, Any]:
    """Train on 1 to 7 in micro-batches of 2, three to an update, and validate on 1 to 4, of three ranks one on none."""
    values = torch.arange(1.0, 8.0, dtype=torch.float64).repeat(3, 1).T.contiguous()
    targets = torch.zeros(7, 1, dtype=torch.float64)
    callbacks = (GradientAccumulation(global_batch_size=6), *callbacks)
    trainer = quiet_trainer(*callbacks, world_size=world_size, max_epochs=epochs)
    rank = trainer.global_rank
    training = TrainLoader(values, targets, torch.arange(7), 2, 1, rank, world_size, shuffle=False)
    validation = EvaluationLoader(values, targets, torch.arange(4), 2, rank, world_size)
    model = Logs(log_in, hook)
    model.monitor = monitor
    notes = Notes()
    error = ""
    try:
        trainer.fit(model, training, validation)
    except RunFailedError as raised:
        error = str(raised)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"metrics": metrics, "steps": model.steps, "notes": notes.texts, "error": error, "rates": rates}


# Means of an epoch


def mean(model: Logs, values: Tensor) -> None:
    model.log("x", values.mean(), on_step=False, on_epoch=True, sync_dist=True)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("hook", "wanted"), [("training_step", 4.0), ("validation_step", 2.5)])
def test_a_mean_weighs_unequal_ranks_by_their_samples(hook: str, wanted: float, ranks: int) -> None:
    assert [run["metrics"]["x"] for run in run_ranks(fit, ranks, ranks, mean, hook)] == [wanted] * ranks


def test_logs_of_two_hooks_keep_all_micro_batches() -> None:
    for run in [fit(1, mean, "training_step"), *run_ranks(fit, 2, 2, mean, "training_step")]:
        assert run["metrics"] == {"x": 4.0, "micro_batches": 4.0}


def _validate(world_size: int) -> float:
    """The mean over 0 to 4 by a Trainer that only validates."""
    values = torch.arange(5.0, dtype=torch.float64).repeat(3, 1).T.contiguous()
    trainer = quiet_trainer(SeedControl(1), world_size=world_size)
    loader = EvaluationLoader(values, values[:, :1], torch.arange(5), 2, trainer.global_rank, world_size)
    return float(trainer.validate(Logs(mean, "validation_step"), loader, verbose=False)[0]["x"])


def test_a_validation_outside_of_training_weighs_alike() -> None:
    assert run_ranks(_validate, 2, 2) == [2.0, 2.0]


# Names


def by_parity(model: Logs, values: Tensor) -> None:
    """Log each number under the name of its parity; rank 1 begins with another name."""
    for value in (values.flip(0) if model.global_rank else values).tolist():
        name, number = ("odd", value) if value % 2 else ("even", 10 * value)
        model.log(name, number, on_epoch=True, sync_dist=True, batch_size=1)


def test_names_in_another_order_are_reduced_by_name() -> None:
    for run in run_ranks(fit, 2, 2, by_parity, "validation_step"):
        assert run["metrics"] == {"odd": 2.0, "even": 30.0}
        assert run["notes"] == []


def of_one_rank(model: Logs, values: Tensor) -> None:
    """Log under another name on each rank."""
    model.log(f"rank{model.global_rank}", values.mean(), on_step=False, on_epoch=True, sync_dist=True)


@pytest.mark.parametrize("hook", ["validation_step", "on_validation_epoch_end", "training_step"])
def test_a_name_of_one_rank_is_known_to_all(hook: str) -> None:
    """Also to a callback that decides by it; in stock Lightning the run waits until the collective call times out."""
    first, second = run_ranks(fit, 2, 2, of_one_rank, hook, EarlyStopping("rank1", strict=True))
    assert first["error"] == second["error"] == ""
    assert first["metrics"] == second["metrics"]
    assert {"rank0", "rank1"} <= first["metrics"].keys()
    assert any("rank1 was logged on 1 of 2 ranks (1)" in note for note in first["notes"])


def of_first_rank(model: Logs, values: Tensor) -> None:
    if model.global_rank == 0:
        model.log("x", values.mean(), on_step=False, on_epoch=True, sync_dist=True)


@pytest.mark.parametrize("hook", ["validation_step", "on_validation_epoch_end"])
def test_a_rank_that_logs_nothing_keeps_none_waiting(hook: str) -> None:
    first, second = run_ranks(fit, 2, 2, of_first_rank, hook, timeout=300)
    assert first["metrics"]["x"] == second["metrics"]["x"]


def metric_of_one_rank(model: Logs, values: Tensor) -> None:
    model.mean.update(values)
    if model.global_rank == 0:
        model.log("accuracy", model.mean)


def test_a_metric_object_of_one_rank_ends_the_run() -> None:
    for run in run_ranks(fit, 2, 2, metric_of_one_rank, "validation_step"):
        assert run["error"].startswith(
            "accuracy is logged on rank 0 and not on rank 1, and a torchmetrics object waits"
        )


# Steps


@pytest.mark.parametrize(
    ("reduce_fx", "wanted"), [("mean", [3.5, 7.0]), ("sum", [10.5, 7.0]), ("max", [5.5, 7.0]), ("min", [1.5, 7.0])]
)
def test_a_synced_step_is_that_of_its_update(reduce_fx: str, wanted: list[float]) -> None:
    """The micro-batches of the first update have the means 1.5, 3.5 and 5.5, on unequal ranks."""
    for run in [fit(1, STEPS[reduce_fx], "training_step"), *run_ranks(fit, 2, 2, STEPS[reduce_fx], "training_step")]:
        assert run["error"] == ""
        assert run["steps"] == wanted


def step_mean(model: Logs, values: Tensor) -> None:
    model.log("step", values.mean(), sync_dist=True)


def step_sum(model: Logs, values: Tensor) -> None:
    model.log("step", values.mean(), sync_dist=True, reduce_fx="sum")


def step_max(model: Logs, values: Tensor) -> None:
    model.log("step", values.mean(), sync_dist=True, reduce_fx="max")


def step_min(model: Logs, values: Tensor) -> None:
    model.log("step", values.mean(), sync_dist=True, reduce_fx="min")


STEPS = {"mean": step_mean, "sum": step_sum, "max": step_max, "min": step_min}


def step_of_one_rank(model: Logs, values: Tensor) -> None:
    if model.global_rank == 1:
        model.log("step", values.mean(), sync_dist=True)


def test_a_synced_step_of_one_rank_ends_the_run() -> None:
    for run in run_ranks(fit, 2, 2, step_of_one_rank, "training_step", timeout=300):
        assert run["error"].startswith("self.log('step', on_step=True, sync_dist=True) is called on rank 1 and not on")


# Decisions


def own_epoch(model: Logs, values: Tensor) -> None:
    model.log("x", values.mean(), on_step=True, on_epoch=True)


def own_step(model: Logs, values: Tensor) -> None:
    model.log("x", values.mean())  # In training for the step alone.


def equal_on_all(model: Logs, values: Tensor) -> None:
    model.log("x", 0.1, on_epoch=True)


@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
@pytest.mark.parametrize("log_in", [own_epoch, own_step])
def test_what_decides_is_reduced_without_sync_dist(log_in: Any, hook: str) -> None:
    one = fit(1, log_in, hook, monitor="x", epochs=3)
    for run in run_ranks(fit, 2, 2, log_in, hook, monitor="x", epochs=3):
        assert run["metrics"]["x"] == pytest.approx(one["metrics"]["x"])
        assert run["rates"] == one["rates"] != [0.01]


def test_a_value_reduced_by_the_program_is_kept() -> None:
    for run in run_ranks(fit, 2, 2, equal_on_all, "on_validation_epoch_end", monitor="x"):
        assert run["metrics"]["x"] == torch.tensor(0.1).item()
        assert run["notes"] == []


class OwnScore(pl.Callback):
    """Puts a score of this rank among the metrics, past `self.log`."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.callback_metrics["own"] = torch.tensor(float(trainer.global_rank))


def test_a_plateau_by_the_score_of_a_rank_ends_the_run() -> None:
    for run in run_ranks(fit, 2, 2, mean, "training_step", OwnScore(), monitor="own"):
        assert run["error"].startswith("own is 0 on rank 0 and 1 on rank 1, and ReduceLROnPlateau decides by it")


def _save(world_size: int, folder: str) -> Any:
    return fit(world_size, mean, "training_step", OwnScore(), ExactCheckpoint(folder, monitor="own"))


def test_a_best_score_of_one_rank_is_not_saved(tmp_path: Any) -> None:
    for run in run_ranks(_save, 2, 2, str(tmp_path)):
        assert run["error"].startswith("own is 0 on rank 0 and 1 on rank 1, and ExactCheckpoint decides by it")
    assert list(tmp_path.glob("*.ckpt")) == []
