"""A run that is killed and resumed ends with the bits of the run that was never stopped, whatever callback it uses.

Each life of a run is a fresh process (or two, over gloo) that is ended by SIGKILL; the next one goes on from the newest
file that Lightning's ModelCheckpoint wrote. Dropout is on, samples are augmented by addressed noise, the rate follows a
schedule, AdamW keeps moments, every epoch is validated, accumulation windows are cut by the epoch's end. The answer of
a run is the SHA-256 of its parameters and buffers, on every rank.

Alone means with SeedControl: no checkpoint holds the generators that dropout draws from, so that without SeedControl no
run with dropout can be exact (one test shows it).

Loader workers: a data set that draws from its worker's generator depends on how many workers there are and on what
they prefetched when they died. So `WorkerLoader` augments by (seed, epoch, index) in the worker, and counts its
position where batches are consumed. A stock DataLoader starts its order again on a resume (test_split_data.py).
"""
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from datamodules.loaders import EvaluationLoader, TrainLoader
from datamodules.order import epoch_order, num_training_steps, training_spans
from datamodules.randomness import normal
from tests.ranks import run_ranks
from tests.tables import CALLBACKS, QUIET, TOGETHER, Tiny, on_ranks, picture_network, pictures, silence

EPOCHS = 3
BATCH_SIZE = 4
# 13 micro-batches an epoch on one process and 7 on two; the last one holds 2 samples.
TRAIN, VALIDATION = pictures(50), pictures(9)
TRAIN = TRAIN[0].float(), TRAIN[1]
VALIDATION = VALIDATION[0].float(), VALIDATION[1]


def augment(inputs: Tensor, rows: Tensor, epoch: int) -> Tensor:
    """Adds noise that is a function of the epoch and the sample."""
    return inputs + 0.3 * normal(1, "augment", epoch, rows, draws=25).view_as(inputs)


class Augmented(Dataset):
    """Pictures under keys (epoch, number), for worker processes."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, number = key
        rows = torch.tensor([number])
        return augment(TRAIN[0][rows], rows, epoch)[0], TRAIN[1][number]


class WorkerLoader:
    """A DataLoader for each epoch, in the global order; resumable at any batch, however far its workers are ahead."""

    def __init__(self, num_workers: int, rank: int, world_size: int) -> None:
        self.num_workers, self.rank, self.world_size = num_workers, rank, world_size
        self.batch_size = BATCH_SIZE
        self.epoch = self.done = 0

    @property
    def sampler(self) -> "WorkerLoader":
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def __len__(self) -> int:
        return num_training_steps(len(TRAIN[1]), BATCH_SIZE, self.world_size)

    def __iter__(self) -> Iterator[list[Tensor]]:
        epoch, done = self.epoch, self.done
        order = epoch_order(len(TRAIN[1]), 1, epoch).tolist()
        spans = list(training_spans(len(order), BATCH_SIZE, self.rank, self.world_size))[done:]
        batches = [[(epoch, number) for number in order[start:stop]] for start, stop in spans]
        settings: dict[str, Any] = {"multiprocessing_context": "fork"} if self.num_workers else {}
        loader: DataLoader = DataLoader(Augmented(), batch_sampler=batches, num_workers=self.num_workers, **settings)
        for number, batch in enumerate(loader, done + 1):
            self.epoch, self.done = (epoch, number) if number < len(self) else (epoch + 1, 0)
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


class AfterUpdates(ModelCheckpoint):
    """Saves after each update, in mid-epoch too, but never in mid-window: no checkpoint holds half-summed gradients.

    Lightning forgets on a resume which update it has saved, and saves it again after the next micro-batch.
    """

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.is_last_batch or (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, pl_module, *args)


class Case(NamedTuple):
    """A run: its rows of the table, where batches come from, and when it is saved.

    `loader` is "memory" (TrainLoader) or the number of workers of a DataLoader; `saves` "epochs", "updates" or "stock"
    (Lightning's own way of saving after updates).
    """

    callbacks: tuple[str, ...]
    loader: str | int = "memory"
    saves: str = "updates"


Place = tuple[int, int]
"""An epoch and the micro-batch before which the run dies."""


class DieAt(pl.Callback):
    """Kills all processes of the run at a place, once all of them are there."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (trainer.current_epoch, trainer.fit_loop.batch_idx) == self.place:
            trainer.strategy.barrier()
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def schedule_of(parameters: Iterator[torch.nn.Parameter]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def digest(model: pl.LightningModule) -> str:
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def live(case: Case, world_size: int, folder: Path, place: Place | None = None) -> str:
    """One life of a run: from the newest checkpoint, if any, to its end or to the place where it dies."""
    silence()
    extra: list[pl.Callback] = [DieAt(place)] if place else []
    if case.saves == "epochs":
        extra.append(ModelCheckpoint(folder, save_last=True))
    else:
        kind = ModelCheckpoint if case.saves == "stock" else AfterUpdates
        extra.append(kind(folder, save_last=True, every_n_train_steps=1))
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[*(CALLBACKS[name]() for name in case.callbacks), *extra],
        enable_progress_bar="RunProgress" in case.callbacks,
        **on_ranks(world_size),
        **QUIET,
    )
    rank = trainer.global_rank
    train: Any
    if case.loader == "memory":
        rows = torch.arange(len(TRAIN[1]))
        train = TrainLoader(*TRAIN, rows, BATCH_SIZE, 1, rank, world_size, transform=augment)
    else:
        train = WorkerLoader(int(case.loader), rank, world_size)
    validation = EvaluationLoader(*VALIDATION, torch.arange(len(VALIDATION[1])), BATCH_SIZE, rank, world_size)
    model = Tiny(picture_network(dropout=0.3), schedule_of)
    resume = "last" if (folder / "last.ckpt").exists() else None
    trainer.fit(model, train, validation, ckpt_path=resume, weights_only=True)
    assert trainer.current_epoch == EPOCHS
    return digest(model)


def live_to_the_end(lives: list[tuple[Case, Path]], world_size: int) -> list[str]:
    """Several runs to their ends, one after another in the same processes."""
    return [live(case, world_size, folder) for case, folder in lives]


def die(case: Case, world_size: int, folder: Path, place: Place) -> None:
    with pytest.raises(AssertionError, match="died with exit status -9"):
        run_ranks(live, world_size, case, world_size, folder, place)


PLACES: dict[str, tuple[str, list[Place]]] = {
    "at an epoch's end": ("epochs", [(1, 4)]),
    "in mid-window": ("updates", [(1, 4)]),
    "again before the window ends": ("updates", [(1, 4), (1, 4)]),
    "after an epoch's last update": ("updates", [(2, 0)]),
    "in every epoch": ("updates", [(0, 1), (0, 3), (1, 6), (2, 2)]),
}
"""How a run is saved, and where its lives end."""


def differing(cases: list[tuple[tuple[str, ...], str | int, str]], world_size: int, folder: Path) -> list[str]:
    """Run each case without a stop and with the stops of its place; name those whose weights differ in any bit."""
    whole: dict[Case, Path] = {}
    broken: list[tuple[Case, Path]] = []
    for number, (callbacks, loader, place) in enumerate(cases):
        saves, places = PLACES[place]
        case = Case(callbacks, loader, saves)
        whole.setdefault(case, folder / f"whole {world_size} {len(whole)}")
        broken.append((case, folder / f"broken {world_size} {number}"))
        for stop in places:
            die(case, world_size, broken[-1][1], stop)
    ends = run_ranks(live_to_the_end, world_size, [*whole.items()], world_size)
    expected = [dict(zip(whole, end, strict=True)) for end in ends]
    found = run_ranks(live_to_the_end, world_size, broken, world_size)
    return [
        f"{world_size} processes, rank {rank}, {' + '.join(callbacks)}, loader {loader}, {place}"
        for rank, hashes in enumerate(found)
        for (callbacks, loader, place), (case, _), found_hash in zip(cases, broken, hashes, strict=True)
        if found_hash != expected[rank][case]
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_callbacks_together_resume_to_the_bit_after_kill_9(world_size: int, tmp_path: Path):
    cases = [(TOGETHER, loader, place) for loader in ("memory", 2) for place in PLACES]
    assert differing(cases, world_size, tmp_path) == []
