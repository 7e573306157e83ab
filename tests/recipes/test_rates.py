"""The rate of an update is one function of its number: in a run, after a resume, and in a plain Trainer."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.optimizers import learning_rate, warmup_factor
from callbacks.warmup_lr import WarmupLR
from recipes import build_optimizer, build_schedule
from recipes.schedules import curve
from tests.recipes.test_schedules import EPOCHS, LR, TOTAL, UPDATES, Line, fit
from tests.support.devices import precision_on
from tests.support.own_training import TrainedRecipe
from tests.support.tables import quiet_trainer

STOP = 7
"""Updates after which a run is stopped: within an epoch, and within the warm-up."""
LENGTH = 12
"""Updates of the warm-up."""


class Rates(pl.Callback):
    """Notes the rate of each update as the optimizer steps, by the number of the update; may stop the run."""

    def __init__(self, stop: int | None = None) -> None:
        self.groups: dict[int, list[float]] = {}
        self.stop = stop

    @property
    def used(self) -> dict[int, float]:
        """Those of the first group."""
        return {update: rates[0] for update, rates in self.groups.items()}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.groups[trainer.global_step] = [group["lr"] for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.stop


def expected(total: int, length: int = LENGTH) -> dict[int, float]:
    """The rates of a cosine in updates of eight samples, where LR is stated for two, and the rule is linear."""
    return {
        update: learning_rate(LR, 4.0, warmup_factor(update / length), curve("cosine", update / total))
        for update in range(total)
    }


def run(*callbacks: pl.Callback, warmup: int | str | None = LENGTH, **options: Any) -> dict[int, float]:
    rates = Rates(options.pop("stop", None))
    if warmup is not None:
        callbacks = (WarmupLR(warmup, scale="linear", base_batch_size=2), *callbacks)
    fit(Line("cosine"), rates, *callbacks, **options)
    return rates.used


def test_a_rate_is_the_product_of_its_four_factors() -> None:
    assert learning_rate(0.5, batch_scale=4.0, warmup=0.25, curve=0.75) == 0.375


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_update_of_a_run_has_the_rate_of_its_number(micro_batches: int) -> None:
    assert run(micro_batches=micro_batches) == expected(TOTAL)


@pytest.mark.parametrize("warmup", [LENGTH, "50%", "2 epochs"])
def test_a_run_resumed_in_its_warm_up_has_the_rates_of_one_run(warmup: int | str, tmp_path: Path) -> None:
    first = run(ExactCheckpoint(tmp_path, every_n_train_steps=STOP, filename="stopped"), stop=STOP, warmup=warmup)
    resumed = run(resume=tmp_path / "stopped.ckpt", warmup=warmup)
    assert (len(first), min(resumed)) == (STOP, STOP)
    assert first | resumed == expected(TOTAL)


@pytest.mark.parametrize("epochs", [EPOCHS // 2, EPOCHS - 1])
def test_a_resumed_run_takes_the_rates_of_its_new_length(epochs: int, tmp_path: Path) -> None:
    """Half of the run is warm-up, whose length follows the run's."""
    run(ExactCheckpoint(tmp_path, every_n_train_steps=STOP, filename="stopped"), stop=STOP, warmup="50%")
    resumed = run(resume=tmp_path / "stopped.ckpt", warmup="50%", max_epochs=epochs)
    whole = expected(epochs * UPDATES, epochs * UPDATES // 2)
    assert resumed == {update: rate for update, rate in whole.items() if update >= STOP}


class Bare(Line):
    """A recipe that has lost its callbacks."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return []


def set_rate(trainer: pl.Trainer, *_: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 7.0


def lengthen(trainer: pl.Trainer, *_: Any) -> None:
    trainer.fit_loop.max_epochs = trainer.current_epoch + 2 if trainer.current_epoch < 2 else 3


@pytest.mark.parametrize(("hook", "meddles"), [("on_train_batch_start", set_rate), ("on_train_epoch_start", lengthen)])
def test_an_update_has_its_rate_whatever_was_set_before_it(hook: str, meddles: Any) -> None:
    data = TensorDataset(torch.randn(12, 3).double(), torch.randn(12).double())
    trainer = quiet_trainer(rates := Rates(), callback := pl.Callback(), max_epochs=3)
    setattr(callback, hook, meddles)
    trainer.fit(Bare("linear"), DataLoader(data, 4))
    if meddles is lengthen:
        totals = [6] * 3 + [9] * 6
        assert rates.used == pytest.approx({n: LR * (1 - n / total) for n, total in enumerate(totals)}, abs=1e-15)
        return
    assert rates.used == pytest.approx({update: LR * (1 - update / 9) for update in range(9)}, abs=1e-15)


def test_a_plain_trainer_has_the_schedule_after_a_resume(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(12, 3).double(), torch.randn(12).double())

    def train(epochs: int, resume: Path | None = None) -> tuple[pl.Trainer, dict[int, float]]:
        trainer = quiet_trainer(rates := Rates(), max_epochs=epochs)
        trainer.fit(Bare("linear"), DataLoader(data, 4), DataLoader(data, 4), ckpt_path=resume, weights_only=True)
        return trainer, rates.used

    whole = {update: LR * (1 - update / 12) for update in range(12)}
    assert train(4)[1] == pytest.approx(whole, abs=1e-15)
    train(2)[0].save_checkpoint(tmp_path / "two.ckpt")
    assert train(4, tmp_path / "two.ckpt")[1] == pytest.approx({n: whole[n] for n in range(6, 12)}, abs=1e-15)


@pytest.mark.parametrize("warmup", [LENGTH, None])
@pytest.mark.parametrize("resumed", [False, True])
def test_lightnings_monitor_logs_the_rates_that_were_used(resumed: bool, warmup: int | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "warmup": warmup}
    if resumed:
        run(ExactCheckpoint(tmp_path, every_n_train_steps=STOP, filename="stopped"), stop=STOP, warmup=warmup)
        options["resume"] = tmp_path / "stopped.ckpt"
    # In the order in which a user may well have them.
    used = run(LearningRateMonitor(), **options)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("lr-SGD/decay")]
    assert {int(row["step"]): float(row["lr-SGD/decay"]) for row in rows} == pytest.approx(used)


def test_lightnings_tuner_tries_its_own_rates() -> None:
    module = Line("cosine")
    data = DataLoader(TensorDataset(torch.randn(80, 3).double(), torch.randn(80).double()), 4)
    trainer = quiet_trainer(max_epochs=2)
    Tuner(trainer).lr_find(module, data, data, min_lr=1e-6, max_lr=1e-2, num_training=20, early_stop_threshold=None)
    tried = [*module.rates.values()]
    assert tried == sorted(tried)
    assert tried[-1] > 1e3 * tried[0]


class Overflowing(TrainedRecipe):
    """Has an infinite loss at its second update."""

    def build_network(self) -> nn.Module:
        return nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = 1e-6 * self(batch[0]).square().mean()
        return loss * (float("inf") if self.global_step == 1 else 1.0)


def test_an_update_that_float16_skips_has_a_number(tmp_path: Path) -> None:
    module = Overflowing(optimizer="sgd", lr=LR, schedule="constant")
    trainer = quiet_trainer(WarmupLR("8 steps"), rates := Rates(), max_epochs=1, **precision_on("cpu", "16-mixed"))
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 3)), 4))
    assert rates.used == {update: LR * warmup_factor(update / 8) for update in range(6)}


class Grouped(Line):
    """A bias with its own rate."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.network.weight]}, {"params": [self.network.bias], "lr": 3 * LR}]
        return build_schedule(build_optimizer(groups, self), self)


def test_a_group_with_its_own_rate_follows_the_same_curve() -> None:
    fit(Grouped("linear"), WarmupLR(LENGTH), rates := Rates())
    for update, (weight, bias) in rates.groups.items():
        factors = {"batch_scale": 1.0, "warmup": warmup_factor(update / LENGTH), "curve": 1 - update / TOTAL}
        assert (weight, bias) == (learning_rate(LR, **factors), learning_rate(3 * LR, **factors))
