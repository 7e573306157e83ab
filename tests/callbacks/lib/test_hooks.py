"""Hooks that have nothing to do are not called in each step, and nothing else changes."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, TensorDataset

from callbacks import GradientAccumulation, SeedControl, SyncBN, WarmupLR
from callbacks.lib.hooks import attached_trainer
from tests.support.tables import QUIET, Tiny, image_network, noisy_images

OF_A_STEP = {
    f"on_{name}" for name in ("before_backward", "after_backward", "before_zero_grad", "before_optimizer_step")
}
OF_A_STEP |= {"on_train_batch_start", "on_train_batch_end"}


def hooks_of_steps(*callbacks: pl.Callback) -> dict[str, set[str]]:
    """The hooks that a Trainer calls in a step, by callback."""
    profiler = SimpleProfiler()
    loader = DataLoader(TensorDataset(*noisy_images(8)), batch_size=4)
    options = QUIET | {"enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=1, callbacks=list(callbacks), profiler=profiler, **options)
    trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), loader)
    calls = [name.removeprefix("[Callback]").split(".") for name in profiler.recorded_durations if "[Callback]" in name]
    return {type(c).__name__: {hook for name, hook in calls if name == type(c).__name__} & OF_A_STEP for c in callbacks}


def test_a_trainer_calls_only_the_hooks_that_have_something_to_do_and_later_all() -> None:
    callbacks = GradientAccumulation(), SeedControl(1), WarmupLR("1 steps"), SyncBN()
    assert hooks_of_steps(*callbacks) == {
        "GradientAccumulation": {"on_train_batch_start"},
        "SeedControl": {"on_train_batch_start", "on_train_batch_end"},
        "WarmupLR": {"on_train_batch_end"},
        "SyncBN": set(),
    }
    assert all(callable(getattr(callback, hook)) for callback in callbacks for hook in OF_A_STEP)
    assert hooks_of_steps(GradientAccumulation(2))["GradientAccumulation"] >= {"on_after_backward"}


class Watching(SyncBN):
    batches = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, index)
        self.batches += 1


def test_a_method_of_a_subclass_is_called() -> None:
    callback = Watching()
    assert hooks_of_steps(callback)["Watching"] == {"on_train_batch_start"}
    assert callback.batches == 2


def test_hooks_are_called_again_after_an_exception() -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("planted")

    callbacks = GradientAccumulation(), SeedControl(1), WarmupLR("1 steps"), SyncBN()
    with pytest.raises(ValueError, match="planted"):
        hooks_of_steps(*callbacks, Fails())
    assert all(callable(getattr(callback, hook)) for callback in callbacks for hook in OF_A_STEP)


def test_the_attached_trainer_is_none_before_a_run() -> None:
    module, options = Tiny(image_network().double(), torch.optim.SGD, lr=0.1), QUIET | {"enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=1, **options)
    assert attached_trainer(module) is None
    trainer.fit(module, DataLoader(TensorDataset(*noisy_images(4)), batch_size=4))
    assert attached_trainer(module) is trainer
