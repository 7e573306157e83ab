"""A run that is killed and resumed ends with the bits of the run that was never stopped, whatever callback it uses.

Each life of a run is a fresh process (or two, over gloo) that is ended by SIGKILL; the next one resumes from the newest
file that Lightning's ModelCheckpoint wrote. Dropout is on, samples are augmented by addressed noise, the rate follows a
schedule, AdamW keeps moments, every epoch is validated, accumulation windows are cut by the epoch's end. The answer of
a run is the SHA-256 of its parameters and buffers, on every rank.

Alone means with SeedControl: no checkpoint holds the generators that dropout draws from, so that without SeedControl no
run with dropout can be exact.
"""

import contextlib
import hashlib
import importlib
import os
import pkgutil
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import callbacks
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.lightning_internals import OneLightningCallback
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from datamodules.loading.randomness import uniform
from tests.support.ranks import run_ranks
from tests.support.tables import CALLBACKS, TOGETHER, Tiny, image_network, noisy_images, quiet_trainer

EPOCHS = 3
BATCH_SIZE = 4
# 13 micro-batches an epoch on one process and 7 on two; the last one holds 2 samples.
TRAIN, VALIDATION = ((inputs.float(), targets) for inputs, targets in map(noisy_images, (50, 9)))


def augment(inputs: Tensor, rows: Tensor, epoch: int) -> Tensor:
    """Adds noise that is a function of the epoch and the sample."""
    return inputs + uniform(1, "augment", epoch, rows, draws=25).view_as(inputs)


Place = tuple[int, int]
"""An epoch, and the micro-batch of it that is next."""


class Case(NamedTuple):
    """A run: its rows of the table, and when it is saved, after "epochs" or "updates"."""

    callbacks: tuple[str, ...]
    saves: str = "updates"


class End(NamedTuple):
    """What is left of a run: the SHA-256 of its weights, and where its last life began."""

    sha256: str
    began: Place


class Life(pl.Callback):
    """Records where a run resumes, and kills its processes at a place, once all of them are there."""

    def __init__(self, dies_at: Place | None) -> None:
        self.dies_at = dies_at
        self.began: Place | None = None

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        place = trainer.current_epoch, batch_idx
        self.began = self.began or place
        if place == self.dies_at:
            trainer.strategy.barrier()
            time.sleep(0.05)  # The barrier's last message is to leave this process before it ends.
            os.kill(os.getpid(), signal.SIGKILL)


def adamw(parameters: Iterator[torch.nn.Parameter], fused: bool | None = None) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=0.02, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def hash_of(model: pl.LightningModule) -> str:
    """The SHA-256 of all weights and buffers."""
    sha256 = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha256.update(name.encode() + tensor.cpu().numpy().tobytes())
    return sha256.hexdigest()


def live(case: Case, world_size: int, folder: Path, dies_at: Place | None = None, seconds: float | None = None) -> End:
    """One life of a run, from its newest checkpoint to its end, unless it dies at a place or some time after set-up."""
    life = Life(dies_at)
    interval: dict[str, Any] = {"every_n_epochs": 1} if case.saves == "epochs" else {"every_n_train_steps": 1}
    own = [*(CALLBACKS[name]() for name in case.callbacks), life, ExactCheckpoint(folder, save_last=True, **interval)]
    trainer = quiet_trainer(*own, world_size=world_size, max_epochs=EPOCHS)
    rank = trainer.global_rank
    rows = torch.arange(len(TRAIN[1]))
    train = TrainLoader(*TRAIN, rows, BATCH_SIZE, 1, rank, world_size, transform=augment)
    validation = EvaluationLoader(*VALIDATION, torch.arange(len(VALIDATION[1])), BATCH_SIZE, rank, world_size)
    model = Tiny(image_network(dropout=0.3), adamw)
    if seconds is not None and rank == 0:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    newest = "last" if (folder / "last.ckpt").exists() else None
    trainer.fit(model, train, validation, ckpt_path=newest, weights_only=True)
    assert (trainer.current_epoch, trainer.state.status) == (EPOCHS, "finished")
    return End(hash_of(model), life.began or (EPOCHS, 0))


def unstopped(cases: list[Case], world_size: int, folder: Path) -> list[End]:
    """The ends of whole runs, one after the other in processes that start once."""
    return [live(case, world_size, folder / f"unstopped {number}") for number, case in enumerate(cases)]


def broken_runs(runs: list[tuple[Case, list[Place]]], world_size: int, folder: Path) -> list[str]:
    """The runs, each ended at its places, whose final weights differ in any bit from those of the unstopped run."""
    # How often a run is saved changes nothing in it.
    whole = [case._replace(saves="updates") for case, _ in runs]
    cases = list(dict.fromkeys(whole))
    expected = [dict(zip(cases, ends)) for ends in run_ranks(unstopped, world_size, cases, world_size, folder)]
    assert all(end.began == (0, 0) for ends in expected for end in ends.values())
    broken = []
    for number, (case, places) in enumerate(runs):
        home = folder / str(number)
        for place in places:
            with pytest.raises(AssertionError, match="died with exit status -9"):
                run_ranks(live, world_size, case, world_size, home, place)
        ends = run_ranks(live, world_size, case, world_size, home)
        epoch, batch = places[-1]
        for end in ends:
            # Otherwise a run that starts fresh each time would pass.
            assert end.began > (0, 0)
            assert end.began[0] == epoch, f"{case} went on at {end.began}"
            assert case.saves != "updates" or end.began[1] == batch, f"{case} went on at {end.began}"
        if [end.sha256 for end in ends] != [ends[whole[number]].sha256 for ends in expected]:
            broken.append(f"{world_size} processes, {case}, stopped at {places}")
    return broken


# An epoch has 4 to 13 updates, by the callbacks and the number of processes.
STOPS: dict[str, tuple[str, list[Place]]] = {
    "at an epoch's end": ("epochs", [(1, 3)]),
    "twice within an epoch": ("updates", [(1, 3), (1, 3)]),
    "within an epoch": ("updates", [(1, 3)]),
    "in every epoch": ("updates", [(0, 1), (0, 2), (1, 3), (2, 0)]),
}


def stopped(callbacks: tuple[str, ...], *names: str) -> list[tuple[Case, list[Place]]]:
    return [(Case(callbacks, saves), places) for saves, places in (STOPS[name] for name in names)]


ALONE = [("SeedControl",)] + [("SeedControl", name) for name in CALLBACKS if name != "SeedControl"]


def test_the_table_holds_every_callback_of_the_package() -> None:
    found = pkgutil.walk_packages(callbacks.__path__, "callbacks.")
    modules = [importlib.import_module(info.name) for info in found]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, pl.Callback) and value.__module__ == module.__name__
    }
    classes = {cls for cls in classes if not cls.__name__.startswith("_")}  # Parts of one that has a row.
    # Every case saves with ExactCheckpoint, so it has no row, and neither has the base of all.
    without_row = {ExactCheckpoint, OneLightningCallback}
    assert {type(make()) for make in CALLBACKS.values()} | without_row == classes
    assert {type(CALLBACKS[name]()) for name in TOGETHER} | without_row == classes


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_callbacks_together_resume_to_the_bit_after_kill_9(world_size: int, tmp_path: Path) -> None:
    assert broken_runs(stopped(TOGETHER, "twice within an epoch", "at an epoch's end"), world_size, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_callback_alone_resumes_to_the_bit_after_kill_9(world_size: int, tmp_path: Path) -> None:
    runs = [run for alone in ALONE for run in stopped(alone, "within an epoch")]
    assert broken_runs(runs, world_size, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_callbacks_together_resume_to_the_bit(world_size: int, tmp_path: Path) -> None:
    assert broken_runs(stopped(TOGETHER, "in every epoch"), world_size, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    case = Case(TOGETHER)
    expected = [end.sha256 for end in run_ranks(live, world_size, case, world_size, tmp_path / "unstopped")]
    moments = random.Random(1)
    for attempt in range(100):
        if attempt >= 5 and (tmp_path / "killed" / "last.ckpt").exists():
            break
        # Saving, validating or in a collective: wherever it is then. Its peers lose it or are killed with it.
        seconds = moments.uniform(0.1, 1.2) * (1 + attempt // 5)
        with contextlib.suppress(AssertionError):
            run_ranks(live, world_size, case, world_size, tmp_path / "killed", seconds=seconds)
    ends = run_ranks(live, world_size, case, world_size, tmp_path / "killed")
    assert [end.sha256 for end in ends] == expected
    assert ends[0].began > (0, 0)
