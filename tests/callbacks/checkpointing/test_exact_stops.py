"""A run that is told to stop, in any hook at any micro-batch, ends after the update, and its resume loses nothing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.signals import Preempted
from callbacks.preemption import Preemption
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.end_to_end.test_exact_resume import TRAIN, VALIDATION, adamw, hash_of
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, equal, image_network, quiet_trainer

# 13 micro-batches an epoch on one process, 7 on two: windows of 4, 4, 4, 1 and of 4, 3.
EPOCHS = 2
Place = tuple[int, int]


class Model(Tiny):
    """Asks for the end in a hook of its own, which Lightning calls after those of all callbacks."""

    def __init__(self, hook: str = "", place: Place = (-1, -1)) -> None:
        super().__init__(image_network(dropout=0.3), adamw)
        self.hook, self.place = hook, place
        self.trained: list[Place] = []

    def _stop(self, hook: str) -> None:
        if hook == self.hook and (self.current_epoch, self.trainer.fit_loop.batch_idx) == self.place:
            self.trainer.should_stop = True

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.trained.append((self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    @override
    def on_train_epoch_start(self) -> None:
        self._stop("on_train_epoch_start")

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop("on_train_batch_end")

    @override
    def on_validation_end(self) -> None:
        self._stop("on_validation_end")


class Stop(pl.Callback):
    """Asks for the end in `on_train_batch_end`, once: later it sets `should_stop` to False."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = (trainer.current_epoch, trainer.fit_loop.batch_idx) == self.place


class Sleep(Stop):
    """Sleeps there for longer than the run may take."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.current_epoch, trainer.fit_loop.batch_idx) == self.place:
            time.sleep(1.1)


class Signal(pl.Callback):
    """Ends the run in the second batch of the second validation."""

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 1 and trainer.ckpt_path is None and args[3] == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(folder: Path, world_size: int, model: Model, *callbacks: pl.Callback, again: Any = None, **options: Any) -> Any:
    """One life of a run, from its `last.ckpt` on; or the second of a Trainer."""
    settings = {"max_epochs": EPOCHS} | options
    callbacks = (SeedControl(1), GradientAccumulation(4), *callbacks)
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        callbacks = (*callbacks, ExactCheckpoint(folder, save_last=True))
    trainer = again or quiet_trainer(*callbacks, world_size=world_size, **settings)
    rank = trainer.global_rank
    train = TrainLoader(*TRAIN, torch.arange(50), 4, 1, rank, world_size)
    validation = EvaluationLoader(*VALIDATION, torch.arange(9), 4, rank, world_size)
    last = folder / "last.ckpt"
    trainer.fit(model, train, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    return trainer


STOPS: dict[str, Callable[[], tuple[Model, list[pl.Callback], dict[str, Any]]]] = {
    "a callback": lambda: (Model(), [Stop((1, 1))], {}),
    "a callback, after the first update": lambda: (Model(), [Stop((0, 0))], {}),
    "the module": lambda: (Model("on_train_batch_end", (0, 1)), [], {}),
    "the module, as an epoch starts": lambda: (Model("on_train_epoch_start", (1, 3)), [], {}),
    "a validation within an epoch": lambda: (Model("on_validation_end", (0, 1)), [], {"val_check_interval": 2}),
    "early stopping on a validation within an epoch": lambda: (
        Model(),
        [EarlyStopping("val_loss", check_finite=False, stopping_threshold=9.0, check_on_train_epoch_end=False)],
        {"val_check_interval": 1},
    ),
    "max_time": lambda: (Model(), [Sleep((1, 0))], {"max_time": {"seconds": 1}}),
    # Its module is built in float32.
    "a callback, in float64": lambda: (Model(), [Stop((1, 1))], {"precision": "64-true"}),
}


def stopped_and_resumed(folder: Path, world_size: int, name: str) -> list[str]:
    """The weights of a run that nobody stopped, and of one that was stopped and resumed."""
    model, callbacks, options = STOPS[name]()
    resumed_options = {key: value for key, value in options.items() if key != "max_time"}
    whole = fit(folder / "whole", world_size, Model(), **resumed_options)
    stopped = fit(folder / "stopped", world_size, model, *callbacks, **options)
    assert stopped.global_step < whole.global_step, "it has stopped"
    resumed = fit(folder / "stopped", world_size, again := Model(), **resumed_options)
    assert resumed.global_step == whole.global_step
    assert model.trained + again.trained == whole.lightning_module.trained, "each micro-batch once"
    return [hash_of(whole.lightning_module), hash_of(again)]


@pytest.mark.parametrize("name", STOPS)
def test_a_run_stopped_in_an_update_resumes_exactly(name: str, tmp_path: Path) -> None:
    whole, resumed = stopped_and_resumed(tmp_path, 1, name)
    assert resumed == whole


def test_a_save_in_the_midst_of_a_batch_is_rejected(tmp_path: Path) -> None:
    checkpoint = ExactCheckpoint(tmp_path, save_last=True, save_on_exception=True)
    with pytest.raises(UserError, match=r"save_on_exception=True.*add Preemption\(\)"):
        fit(tmp_path, 1, Model(), checkpoint)


def two_ranks(folder: Path) -> list[list[str]]:
    names = ["the module", "early stopping on a validation within an epoch", "max_time"]
    return [stopped_and_resumed(folder / name, 2, name) for name in names]


def test_two_ranks_stop_after_the_same_update(tmp_path: Path) -> None:
    for rank in run_ranks(two_ranks, 2, tmp_path):
        assert all(resumed == whole for whole, resumed in rank)


def test_a_second_fit_continues_an_interrupted_validation(tmp_path: Path) -> None:
    fit(tmp_path / "whole", 1, whole := Model(), max_epochs=3)
    with pytest.raises(Preempted):
        fit(tmp_path / "cut", 1, model := Model(), Preemption(), Signal(), max_epochs=3)
    fit(tmp_path / "cut", 1, model, again=model.trainer)
    assert hash_of(model) == hash_of(whole)


def test_an_early_stop_leaves_its_last_update_in_last_ckpt(tmp_path: Path) -> None:
    for name in ("a callback", "the module"):
        model, callbacks, options = STOPS[name]()
        last = ExactCheckpoint(tmp_path / name, save_top_k=0, last_every="500 steps")
        stopped = fit(tmp_path / name, 1, model, *callbacks, last, **options)
        saved = torch.load(tmp_path / name / "last.ckpt", weights_only=True)
        assert saved["global_step"] == stopped.global_step > 0
        assert equal(saved["state_dict"], model.state_dict())


@pytest.mark.parametrize(
    ("last_every", "options", "saved"),
    [
        pytest.param("500 steps", {}, [12], id="at the run's end"),
        pytest.param("2 epochs", {}, [8, 12], id="after epochs"),
        pytest.param("3 steps", {}, [3, 6, 9, 12], id="after updates"),
        pytest.param("500 steps", {"max_steps": 8}, [8], id="at max_steps"),
        pytest.param("500 steps", {"min_epochs": 2}, [8], id="at a stop, but not at one before min_epochs"),
    ],
)
def test_last_ckpt_is_saved_at_its_interval_or_the_runs_end(
    last_every: str, options: dict[str, Any], saved: list[int], tmp_path: Path
) -> None:
    steps: list[int] = []
    observer = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", "min_epochs" in options),
        on_save_checkpoint=lambda trainer, *_: steps.append(trainer.global_step),
    )
    last = ExactCheckpoint(tmp_path, save_top_k=0, last_every=last_every)
    fit(tmp_path, 1, Model(), observer, last, **{"max_epochs": 3} | options)
    assert steps == saved


def test_a_resume_with_nothing_left_to_train_keeps_last_ckpt(tmp_path: Path) -> None:
    for folder in ("killed", "resumed"):
        model = Model()
        last = ExactCheckpoint(tmp_path / folder, save_top_k=0, last_every="500 steps")
        fit(tmp_path / "killed", 1, model, last)
    saved, again = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("killed", "resumed"))
    assert not model.trained
    assert str(saved) == str(again)


def test_one_callback_saves_best_with_last_after_max_steps(tmp_path: Path) -> None:
    """The save of the last one, after the update, is none of the best, which is saved at the epoch's end."""
    fit(tmp_path, 1, Model(), ExactCheckpoint(tmp_path, "best", last_every="1 steps"), max_steps=3)
    steps = {p.name: torch.load(p, weights_only=True)["global_step"] for p in tmp_path.glob("[bl]*.ckpt")}
    assert steps["best.ckpt"] == steps["last.ckpt"] == 3
