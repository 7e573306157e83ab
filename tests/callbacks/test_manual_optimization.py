"""Modules that optimise by hand, with one optimiser or two, and those that read batches by themselves.

Each callback of the package trains them as it trains the same module otherwise, or refuses them in one line.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from callbacks import FreezeLayers, Preemption, WarmupLR, WeightAveraging
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.signals import Preempted
from datamodules.errors import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.tables import CALLBACKS, QUIET, Tiny, image_network, noisy_images, silence

CASES = CALLBACKS | {"ExactCheckpoint": lambda: ExactCheckpoint("unused", save_top_k=0)}
REFUSED = {
    "manual": {"GradientAccumulation", "GradientAccumulation, global batch"},
    "iterates": {
        "GradientAccumulation",
        "GradientAccumulation, global batch",
        "SeedControl",
        "Preemption",
        "ExactCheckpoint",
    },
}


class Manual(Tiny):
    """Steps each of its optimisers once in every `every` batches, and in an epoch's last."""

    automatic_optimization = False

    def __init__(self, optimizers: int = 1, every: int = 1) -> None:
        super().__init__(image_network().double(), torch.optim.SGD, lr=0.1)
        self.count, self.every = optimizers, every
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

    def configure_optimizers(self) -> Any:
        parameters = list(self.network.parameters())
        return [torch.optim.SGD(parameters[i :: self.count], lr=0.1, momentum=0.9) for i in range(self.count)]


class Automatic(Manual):
    automatic_optimization = True
    training_step = Tiny.training_step  # type: ignore[assignment]


class Iterates(Automatic):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return Tiny.training_step(self, next(dataloader_iter)[0], 0)


def train(module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> dict[str, torch.Tensor]:
    """Two epochs of ten batches; the weights that were trained."""
    silence()
    settings = QUIET | {"max_epochs": 2, "enable_checkpointing": False, "devices": 1}
    settings["enable_progress_bar"] = any(isinstance(each, pl.callbacks.ProgressBar) for each in callbacks)
    resume = options.pop("ckpt_path", None)
    trainer = pl.Trainer(callbacks=list(callbacks), **(settings | options))
    trainer.fit(module, TrainLoader(*noisy_images(40), torch.arange(40), 4, 1), ckpt_path=resume)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_every_callback_trains_them_as_others_or_refuses_them(name: str) -> None:
    expected = train(Automatic(), CASES[name](), enable_checkpointing=name == "ExactCheckpoint")
    for kind, module in (("manual", Manual(1)), ("manual", Manual(2)), ("iterates", Iterates())):
        if name in REFUSED[kind]:
            with pytest.raises(UserError, match="optimises manually" if kind == "manual" else "a dataloader_iter") as e:
                train(module, CASES[name](), enable_checkpointing=name == "ExactCheckpoint")
            assert "\n" not in str(e.value)
            continue
        found = train(module, CASES[name](), enable_checkpointing=name == "ExactCheckpoint")
        assert all(torch.equal(found[key], value) for key, value in expected.items()), (kind, module)


@pytest.mark.parametrize(("optimizers", "every"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3)])
def test_shares_of_a_run_are_those_of_its_batches(optimizers: int, every: int) -> None:
    for when, batch in {"50%": 10, "1 epochs": 10, "0.5 epochs": 5}.items():
        module = Manual(optimizers, every)
        average, warmup = WeightAveraging(0.9), WarmupLR(when)
        train(module, FreezeLayers(unfreeze={"network.0.0": when}), average, warmup)
        assert module.trains_from == batch
        assert average.samples == sum(i % 10 % every == 0 or i % 10 == 0 for i in range(1, 21))
        assert warmup.length == batch
        assert warmup.updates == [20] * optimizers


def test_steps_that_are_no_number_of_batches_are_refused() -> None:
    with pytest.raises(UserError, match=r"steps of 1 optimisers in \d batches, expected one of each"):
        train(Manual(1, every=3), FreezeLayers(unfreeze={"network.0.0": "4 steps"}))
    for callback in (FreezeLayers(unfreeze={"network.0.0": "50%"}), WarmupLR("50%")):
        with pytest.raises(UserError, match="with max_epochs and without max_steps"):
            train(Manual(2, every=3), callback, max_steps=12)
    warmup = WarmupLR("50%")
    train(Manual(2), warmup, max_steps=40)
    assert warmup.length == 10


class Stop(pl.Callback):
    """Requests the end in one batch, as a signal does."""

    def __init__(self, preemption: Preemption, batch: int) -> None:
        self.preemption, self.batch = preemption, batch

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.preemption._flag.received = 15


@pytest.mark.parametrize("batch", [3, 4, 5])
def test_a_run_that_accumulates_by_hand_is_saved_where_no_gradient_waits(batch: int, tmp_path: Any) -> None:
    expected, preemption = train(Manual(2, every=3)), Preemption()
    saves = [ExactCheckpoint(tmp_path, save_last=True) for _ in range(2)]
    with pytest.raises(Preempted):
        train(Manual(2, 3), Stop(preemption, batch), saves[0], preemption, enable_checkpointing=True)
    found = train(Manual(2, 3), saves[1], ckpt_path=tmp_path / "last.ckpt", enable_checkpointing=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
