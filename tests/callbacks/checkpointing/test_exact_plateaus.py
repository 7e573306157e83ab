"""ReduceLROnPlateau after a resume: the rates, bits and scheduler state of a run that was not stopped."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lean_loop import LeanLoop
from callbacks.lib.signals import Preempted
from callbacks.preemption import Preemption
from callbacks.seed_control import SeedControl
from callbacks.train_loss import TrainLoss
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.end_to_end.test_exact_resume import hash_of
from tests.support.batches import BatchWatcher, Moment
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, on_ranks, silence

# 13 micro-batches an epoch on one process, 7 on two, by two: windows of 2, 2, 2, 2, 2, 2, 1 and of 2, 2, 2, 1.
TRAIN, VALIDATION = ([part.float() if part.is_floating_point() else part for part in noisy_images(n)] for n in (50, 9))
EPOCHS = 3


class Plateau(Tiny):
    """Its rate falls whenever what it monitors is not below 1.0 and 2 % better than ever, so at most of the steps."""

    def __init__(self, scheduler: dict[str, Any]) -> None:
        super().__init__(image_network(dropout=0.3), torch.optim.SGD, lr=0.2, momentum=0.9)
        self.settings = scheduler
        self.rates: dict[tuple[int, int], float] = {}

    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.02)
        plateau.best = 1.0
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau} | self.settings}

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.rates[self.current_epoch, batch_idx] = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)


class Killed(Exception):
    """Stands for kill -9: nothing is saved."""


class Fate(BatchWatcher):
    """Ends a run somewhere: by a signal, a stop or at once."""

    def __init__(self, end: str, moment: Moment) -> None:
        self.end, self.moment = end, moment

    def _look(self, trainer: pl.Trainer, hook: str, batch: int) -> None:
        if (hook, trainer.current_epoch, batch) != self.moment:
            return
        if self.end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.end == "stop":
            trainer.should_stop = True
        else:
            raise Killed


def live(
    folder: Path,
    world_size: int,
    scheduler: dict[str, Any],
    *callbacks: pl.Callback,
    **options: Any,
) -> Plateau:
    """One life of a run, from its `last.ckpt` on."""
    silence()
    saves = ExactCheckpoint(folder, save_last=True, every_n_train_steps=1)
    settings = QUIET | on_ranks(world_size) | {"max_epochs": EPOCHS, "enable_progress_bar": False} | options
    always = [SeedControl(1), GradientAccumulation(2), TrainLoss(), LeanLoop(), Preemption()]
    trainer = pl.Trainer(callbacks=[*always, *callbacks, saves], log_every_n_steps=2, **settings)
    rank = trainer.global_rank
    train = TrainLoader(*TRAIN, torch.arange(50), 4, 1, rank, world_size)
    validation = EvaluationLoader(*VALIDATION, torch.arange(9), 4, rank, world_size)
    last = folder / "last.ckpt"
    model = Plateau(scheduler)
    with contextlib.suppress(Killed, Preempted):
        trainer.fit(model, train, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    return model


SCHEDULERS: dict[str, dict[str, Any]] = {
    "each epoch, validation": {"monitor": "val_loss"},
    "each second epoch, validation": {"monitor": "val_loss", "frequency": 2},
    "each epoch, TrainLoss": {"monitor": "train/loss"},
    "each update, validation": {"monitor": "val_loss", "interval": "step", "strict": False},
    "each third batch, TrainLoss": {"monitor": "train/loss", "interval": "step", "frequency": 3, "strict": False},
}

ENDS: list[tuple[str, Moment]] = [
    ("killed", ("train", 1, 0)),  # Resumes from the end of an epoch.
    ("killed", ("train", 1, 5)),
    ("killed", ("validation", 1, 1)),
    ("signal", ("train", 1, 4)),
    ("signal", ("train", 1, 12)),  # Saved before the validation.
    ("signal", ("validation", 0, 0)),
    ("stop", ("train", 1, 6)),
]


def differences(folder: Path, world_size: int, name: str, ends: list[tuple[str, Moment]], **options: Any) -> list[str]:
    """The ends from which a run does not resume to the bits of one that did not end."""
    scheduler = SCHEDULERS[name]
    whole = live(folder / "whole", world_size, scheduler, **options)
    assert len(set(whole.rates.values())) > 1, "the scheduler has something to do"
    broken = []
    for number, (end, moment) in enumerate(ends):
        home = folder / str(number)
        first = live(home, world_size, scheduler, Fate(end, moment), **options)
        assert len(first.rates) < len(whole.rates)
        second = live(home, world_size, scheduler, **options)
        assert second.trainer.current_epoch == EPOCHS
        rates_differ = (first.rates | second.rates) != whole.rates
        states = [model.trainer.lr_scheduler_configs[0].scheduler.state_dict() for model in (second, whole)]
        if rates_differ or states[0] != states[1] or hash_of(second) != hash_of(whole):
            broken.append(f"{name}, {end} at {moment}: {rates_differ=}, {states[0] != states[1]=}")
    return broken


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_resumes_with_the_rates_of_one_that_did_not_end(name: str, tmp_path: Path) -> None:
    assert differences(tmp_path, 1, name, ENDS) == []


@pytest.mark.parametrize("name", ["each epoch, validation", "each update, validation"])
def test_with_validations_within_the_epoch(name: str, tmp_path: Path) -> None:
    ends = [("killed", ("train", 1, 8)), ("killed", ("train", 1, 6)), ("signal", ("validation", 1, 1))]
    ends += [("signal", ("train", 1, 5)), ("stop", ("train", 1, 6)), ("stop", ("validation", 1, 1))]
    assert differences(tmp_path, 1, name, ends, val_check_interval=4) == []


def two_ranks(folder: Path) -> list[str]:
    names = ["each epoch, TrainLoss", "each update, validation"]
    moments: list[tuple[str, Moment]] = [
        ("killed", ("train", 1, 0)),
        ("killed", ("train", 1, 5)),
        ("stop", ("train", 1, 2)),
    ]
    return [line for i, name in enumerate(names) for line in differences(folder / str(i), 2, name, moments)]


@pytest.mark.slow
def test_two_ranks_resume_with_the_same_rates(tmp_path: Path) -> None:
    assert run_ranks(two_ranks, 2, tmp_path) == [[], []]
