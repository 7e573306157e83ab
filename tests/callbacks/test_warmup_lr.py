"""The rates with which the optimizer really steps, recorded inside its step, follow a closed form."""

import csv
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.optimizers import warmup_factor
from callbacks.step_metrics import StepMetrics
from callbacks.warmup_lr import WarmupLR
from tests.support.devices import precision_on
from tests.support.tables import quiet_trainer


class Recorder(torch.optim.SGD):
    """SGD that notes the rates of each real step.

    Like many optimizers it calls its parent's step, which runs the hooks a second time once a plain SGD was made.
    """

    used: list[list[float]]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert "hooked" in vars(torch.optim.SGD.step)
        result = super().step(closure)
        self.__dict__.setdefault("used", []).append([float(group["lr"]) for group in self.param_groups])
        return result


torch.optim.SGD([torch.zeros(1)])


class Model(pl.LightningModule):
    """A linear model whose optimizer steps with a rate of 1, or as `schedule` says."""

    def __init__(self, schedule: Callable[..., Any] | None = None, lr: float | Tensor = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.other = nn.Linear(4, 2), nn.Linear(4, 2)
        self.schedule, self.lr, self.explodes = schedule, lr, frozenset[int]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = 1e-6 * (self.layer(batch[0]) + self.other(batch[0])).square().mean()
        self.log("loss", loss)
        return loss * (math.inf if self.global_step in self.explodes else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = Recorder(self.layer.parameters(), lr=self.lr)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    @property
    def used(self) -> list[float]:
        """The rate of the first group at each real step."""
        return [rates[0] for rates in self.trainer.optimizers[0].used]  # type: ignore[attr-defined]


def train(model: pl.LightningModule, *callbacks: pl.Callback, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    """Fit on 40 samples, in 10 batches of 4."""
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 160).view(40, 4)), batch_size=4)
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 2} | options)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def curve(length: int, steps: int) -> list[float]:
    return [warmup_factor(step / length) for step in range(steps)]


@pytest.mark.parametrize(("duration", "length"), [(5, 5), ("1.5 epochs", 15), ("25%", 5), ("0%", 0), ("99 steps", 99)])
def test_a_warm_up_lasts_for_its_duration(duration: Any, length: int, caplog) -> None:
    trainer = train(model := Model(), WarmupLR(duration))
    said = [message for message in caplog.messages if "the learning rate reaches 21.0% of its schedule's" in message]
    assert len(said) == (length > 20)
    assert model.used == pytest.approx([min(1, 0.01 + 0.99 * step / length) if length else 1.0 for step in range(20)])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1


@pytest.mark.parametrize("last", [False, True])
def test_durations_count_updates_in_any_order_of_callbacks(last: bool) -> None:
    for warmup, length in (("2 epochs", 8), ("50%", 6)):
        callbacks = [GradientAccumulation(3), WarmupLR(warmup)]
        train(model := Model(), *(callbacks[::-1] if last else callbacks), max_epochs=3)
        assert model.used == curve(length, 12)


class AddGroup(pl.Callback):
    """What BackboneFinetuning does: the fourth step adds a group with a tenth of the rate."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if trainer.global_step == 3 and len(trainer.optimizers[0].param_groups) == 1:
            assert isinstance(pl_module, Model)
            group = {"params": list(pl_module.other.parameters()), "lr": 0.1, "name": "other"}
            trainer.optimizers[0].add_param_group(group)


def test_a_group_added_later_keeps_its_ratio() -> None:
    trainer = train(Model(), AddGroup(), WarmupLR("8 steps"))
    used = trainer.optimizers[0].used  # type: ignore[attr-defined]
    assert used == [[f] for f in curve(8, 3)] + [[f, 0.1 * f] for f in curve(8, 20)[3:]]
    assert {"lr", "lr/other"} <= set(trainer.callback_metrics)


def test_updates_skipped_by_float16_do_not_count() -> None:
    model, stock = Model(), Model(lambda optimizer: LinearLR(optimizer, 0.01, total_iters=8))
    model.explodes = stock.explodes = frozenset({1, 2, 5})
    warmup = WarmupLR("8 steps")
    train(model, warmup, **precision_on("cpu", "16-mixed"))
    train(stock, **precision_on("cpu", "16-mixed"))
    assert model.used == curve(8, 17)
    assert warmup.state_dict() == {"updates": [17], "length": 8}
    resumed = {"updates": [2.5], "length": 8}  # In a warm-up of another length than before.
    warmup.load_state_dict(resumed)
    assert warmup.state_dict() == resumed
    assert stock.used[1] == pytest.approx(warmup_factor(3 / 8))


def test_a_rate_that_is_a_tensor_is_the_same_one_between_steps() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    trainer = train(model := Model(lr=rate), WarmupLR("8 steps"))
    assert model.used == pytest.approx([0.5 * factor for factor in curve(8, 20)])
    assert trainer.optimizers[0].param_groups[0]["lr"] is rate
    assert rate == 0.5


@pytest.mark.parametrize(("scale", "factor"), [("linear", 3.0), ("sqrt", math.sqrt(3)), (None, 1.0)])
def test_the_rate_follows_the_global_batch(scale: Any, factor: float) -> None:
    warmup = WarmupLR("4 steps", scale=scale, base_batch_size=4 if scale else None)
    train(model := Model(), warmup, GradientAccumulation(3))
    assert model.used == pytest.approx([factor * warm for warm in curve(4, 8)])


def test_changed_accumulation_continues_the_fraction_of_warm_up(tmp_path: Any) -> None:
    first = train(Model(), WarmupLR("2 epochs"), max_epochs=1)
    first.save_checkpoint(path := tmp_path / "one.ckpt")
    train(model := Model(), WarmupLR("2 epochs"), GradientAccumulation(2), max_epochs=3, ckpt_path=path)
    assert model.used == pytest.approx([*curve(10, 10)[5:], *[1.0] * 5])


@pytest.mark.parametrize(("every", "steps"), [(4, (3, 7, 11, 15, 19)), (50, (9, 19))])
def test_the_rates_used_are_logged(every: int, steps: tuple[int, ...], tmp_path: Any) -> None:
    factors = curve(100, 20)
    trainer = train(Model(), WarmupLR("100 steps"), log_every_n_steps=every)
    assert float(trainer.callback_metrics["lr"]) == pytest.approx(factors[19])
    trainer = train(Model(), WarmupLR("100 steps"), log_every_n_steps=every, logger=CSVLogger(tmp_path))
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        logged = {int(row["step"]): float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}
    assert logged == pytest.approx({step: factors[step] for step in steps})
    assert not any(isinstance(callback, StepMetrics) for callback in trainer.callbacks)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_step_metrics_logs_the_rates_with_the_rest(order: tuple[int, int], tmp_path: Any) -> None:
    callbacks = (WarmupLR("100 steps"), StepMetrics(None))
    train(Model(), *(callbacks[i] for i in order), log_every_n_steps=10, logger=CSVLogger(tmp_path))
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["lr"] or row["monitor/gradient_norm"]]
    assert [int(row["step"]) for row in rows if row["lr"] and row["monitor/gradient_norm"]] == [9, 19]
    assert len(rows) == 2


def test_a_failing_step_leaves_the_schedules_own_rate_behind() -> None:
    class Failing(Model):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            assert optimizer.param_groups[0]["lr"] == 0.01, "the optimizer calls back in mid-step"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        train(model := Failing(), WarmupLR("8 steps"))
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == 1
    assert not model.trainer.optimizers[0]._optimizer_step_pre_hooks


def test_each_optimizer_is_warmed_up_by_its_own_steps() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(1e-6 * (self.layer(batch[0]) + self.other(batch[0])).square().mean())
            for optimizer in self.optimizers()[: 1 + batch_idx % 2]:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [Recorder(self.layer.parameters(), lr=1.0), Recorder(self.other.parameters(), lr=1.0)]

    trainer = train(Two(), WarmupLR("8 steps"), max_epochs=2)
    first, second = ([rates[0] for rates in optimizer.used] for optimizer in trainer.optimizers)  # type: ignore[attr-defined]
    assert (first, second) == (curve(8, 20), curve(8, 10))
    assert {"lr", "lr1"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "cubic", "base_batch_size": 4}, "unknown scale 'cubic'"),
        ({"scale": "linear"}, "pass both"),
        ({"base_batch_size": 256}, "pass both"),
        ({"duration": "soon"}, "the warm-up 'soon' cannot be read"),
        ({"duration": "5%"}, '"5%" is unknown because the run has no end'),
    ],
)
def test_settings_out_of_range_are_rejected_before_training(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(Model(), WarmupLR(**settings), max_epochs=-1)
