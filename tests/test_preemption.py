"""A run that is told to stop ends in time on every rank, saved so that its resume ends with the bits of a whole run."""

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from typing_extensions import override

from callbacks.exact_checkpoint import ExactCheckpoint
from callbacks.signals import Preempted
from datamodules.loaders import EvaluationLoader, TrainLoader
from tests.ranks import run_ranks
from tests.tables import CALLBACKS, QUIET, Tiny, on_ranks, picture_network, silence
from tests.test_exact_resume import BATCH_SIZE, TRAIN, VALIDATION, adamw, augment, hash_of

EPOCHS = 3

Moment = tuple[str, int, int]
"""A hook, the epoch and the batch at which it sends a signal."""


class Alarm(pl.Callback):
    """Sends signals to its own process at some moment, once."""

    def __init__(self, moment: Moment | None, signum: int) -> None:
        self.moment, self.signum, self.rung = moment, signum, 0.0
        self.places: list[tuple[str, int, int]] = []

    def _look(self, trainer: pl.Trainer, hook: str, batch: int) -> None:
        if trainer.sanity_checking:
            hook = "sanity"
        place = hook, trainer.current_epoch, batch
        self.places.append(place)
        if place == self.moment and not self.rung:
            self.rung = time.monotonic()
            os.kill(os.getpid(), self.signum)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, "train", batch_idx)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look(trainer, "validation", batch_idx)

    @override
    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look(trainer, "test", batch_idx)


class Life(NamedTuple):
    """How a life of a run ended: status 0 at the run's end, with the SHA-256 of its weights."""

    status: int
    sha256: str
    places: list[tuple[str, int, int]]
    scores: list[float]


class Scores(pl.Callback):
    """Every validation's score, kept over resumes."""

    def __init__(self) -> None:
        self.scores: list[float] = []

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.scores.append(float(trainer.callback_metrics["val_loss"]))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = list(state_dict["scores"])


def live(
    names: tuple[str, ...],
    world_size: int,
    folder: Path,
    moment: Moment | None = None,
    signum: int = signal.SIGTERM,
    rank: int | None = 0,
    **options: Any,
) -> Life:
    """One life of a run, from its last checkpoint on, in which a rank (or each of them) gets a signal."""
    silence()
    alarm, scores = Alarm(None, signum), Scores()
    checkpoint = ExactCheckpoint(folder, filename="best", monitor="val_loss", save_last=True, every_n_epochs=2)
    early = EarlyStopping("val_loss", patience=EPOCHS)
    callbacks = [*(CALLBACKS[name]() for name in names), scores, early, checkpoint, alarm]
    settings = (
        QUIET | {"max_epochs": EPOCHS, "enable_progress_bar": "RunProgress" in names} | on_ranks(world_size) | options
    )
    trainer = pl.Trainer(callbacks=callbacks, **settings)
    if rank is None or rank == trainer.global_rank:
        alarm.moment = moment
    rows = torch.arange(len(TRAIN[1]))
    train = TrainLoader(*TRAIN, rows, BATCH_SIZE, 1, trainer.global_rank, world_size, transform=augment)
    rows = torch.arange(len(VALIDATION[1]))
    validation = EvaluationLoader(*VALIDATION, rows, 2, trainer.global_rank, world_size)
    model = Tiny(picture_network(dropout=0.3), adamw)
    last = folder / "last.ckpt"
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    status = 0
    try:
        trainer.fit(model, train, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    except Preempted as stopped:
        status = int(stopped.code or 0)
        assert time.monotonic() - alarm.rung < 5 or not alarm.rung
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    return Life(status, hash_of(model), alarm.places, scores.scores)


def lives(names: tuple[str, ...], world_size: int, folder: Path, *moments: Moment, **options: Any) -> list[list[Life]]:
    """Lives of one run, each ended by a signal, and the last one which is not; of each rank."""
    found = [run_ranks(live, world_size, names, world_size, folder, moment, **options) for moment in moments]
    return [*found, run_ranks(live, world_size, names, world_size, folder)]
