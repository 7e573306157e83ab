"""Modules that optimize by hand, with one optimizer or two, and those that read batches by themselves.

Each callback of the package trains them as it trains the same module otherwise, or rejects them in one line.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from callbacks import FreezeLayers, Preemption, SeedControl, WarmupLR, WeightAveraging
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.signals import Preempted
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.tables import CALLBACKS, Tiny, equal, image_network, noisy_images, quiet_trainer

CASES = CALLBACKS | {"ExactCheckpoint": lambda: ExactCheckpoint("unused", save_top_k=0)}
ACCUMULATIONS = {"GradientAccumulation", "GradientAccumulation, global batch"}
REJECTED = {
    "manual": ACCUMULATIONS | {"WarmupLR", "FreezeLayers"},
    "iterates": ACCUMULATIONS
    | {"SeedControl", "Preemption", "ExactCheckpoint", "BNRecalibration", "TrainLoss", "StepMetrics"},
}


class Manual(Tiny):
    """Steps each of its optimizers once in every `every` batches, and in an epoch's last."""

    automatic_optimization = False

    def __init__(self, optimizers: int = 1, every: int = 1) -> None:
        super().__init__(image_network().double(), torch.optim.SGD, lr=0.1)
        self.count, self.every = optimizers, every
        self.register_buffer("moving", torch.zeros(()))
        self.trains_from: int | None = None
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trains_from is None and self.network[0][0].weight.requires_grad:  # type: ignore[index]
            self.trains_from = self.batches
        self.batches += 1
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0 or self.trainer.is_last_batch:
            for optimizer in [self.optimizers()] if self.count == 1 else self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
            self.zero_grad()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.moving.lerp_(next(self.network.parameters()).detach().mean().float(), 0.1)

    def configure_optimizers(self) -> Any:
        parameters = list(self.network.parameters())
        return [torch.optim.SGD(parameters[i :: self.count], lr=0.1, momentum=0.9) for i in range(self.count)]


class Automatic(Manual):
    automatic_optimization = True
    training_step = Tiny.training_step  # type: ignore[assignment]


class Iterates(Automatic):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return Tiny.training_step(self, next(dataloader_iter)[0], 0)


def train(module: pl.LightningModule, *callbacks: pl.Callback, resume: Any = None) -> dict[str, torch.Tensor]:
    """Two epochs of ten batches; the weights that were trained."""
    loader = TrainLoader(*noisy_images(40), torch.arange(40), 4, 1)
    quiet_trainer(*callbacks, max_epochs=2).fit(module, loader, ckpt_path=resume)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_every_callback_trains_them_as_others_or_rejects_them(name: str) -> None:
    expected = train(Automatic(), CASES[name]())
    for kind, module in (("manual", Manual(1)), ("manual", Manual(2)), ("iterates", Iterates())):
        if name in REJECTED[kind]:
            with pytest.raises(UserError, match="optimizes manually" if kind == "manual" else "a dataloader_iter") as e:
                train(module, CASES[name]())
            assert "\n" not in str(e.value)
            continue
        assert equal(train(module, CASES[name]()), expected), (kind, module)


@pytest.mark.parametrize(("optimizers", "every"), [(1, 1), (2, 3)])
def test_durations_count_the_steps_of_each_manual_optimizer(optimizers, every) -> None:
    module, average, warmup = Manual(optimizers, every), WeightAveraging(0.9), WarmupLR("4 steps")
    train(module, FreezeLayers(unfreeze={"network.0.0": "1 epochs"}), average, warmup)
    assert module.trains_from == 10
    made = sum(i % 10 % every == 0 or i % 10 == 0 for i in range(1, 21))
    assert average.samples == made
    assert warmup.updates == [made] * optimizers
    for callback in (FreezeLayers(unfreeze={"network.0.0": "4 steps"}), WarmupLR("50%")):
        with pytest.raises(UserError, match="optimizes manually: write"):
            train(Manual(optimizers, every), callback)


@pytest.mark.parametrize("batch", [3, 4, 5])
def test_manual_accumulation_is_saved_where_no_gradient_waits(batch: int, tmp_path: Any) -> None:
    expected, preemption, stop = train(Manual(2, every=3)), Preemption(), pl.Callback()
    # As a signal does.
    stop.on_train_batch_start = lambda trainer, *_: setattr(
        preemption._flag, "received", 15 * (trainer.fit_loop.total_batch_idx >= batch)
    )
    saves = [ExactCheckpoint(tmp_path, save_last=True) for _ in range(2)]
    with pytest.raises(Preempted):
        train(Manual(2, 3), stop, saves[0], preemption)
    timed = ExactCheckpoint(tmp_path / "timed", train_time_interval=timedelta(0), save_top_k=-1)
    assert equal(train(Manual(2, 3), saves[1], timed, resume=tmp_path / "last.ckpt"), expected)
    assert list(tmp_path.glob("timed/*.ckpt"))


def test_a_second_fit_counts_the_steps_of_its_own_module() -> None:
    steps: list[int] = []
    note = LambdaCallback(on_fit_start=lambda trainer, _: steps.append(trainer.global_step))
    trainer = quiet_trainer(SeedControl(1), note, max_epochs=1)
    loader = TrainLoader(*noisy_images(40), torch.arange(40), 4, 1)
    for module in (Automatic(), Manual()):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(module, loader)
        steps.append(trainer.global_step)
    assert steps == [0, 10, 0, 10]


class StepsElsewhere(Manual):
    """Steps in a hook after `training_step`, where Lightning counts no step (#20674)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, *_: Any) -> None:
        self.manual_backward(Tiny.training_step(self, self.batch, 0))
        self.optimizers().step()  # type: ignore[union-attr]
        self.zero_grad()


def test_a_manual_step_that_lightning_misses_is_rejected(tmp_path: Path) -> None:
    saves = ExactCheckpoint(tmp_path, every_n_train_steps=2)
    with pytest.raises(UserError, match="StepsElsewhere optimizes manually, and Lightning has counted no step"):
        quiet_trainer(saves).fit(StepsElsewhere(), TrainLoader(*noisy_images(8), torch.arange(8), 2, 1))
