"""Measures how long saving a checkpoint blocks training: by the command line, a plain Trainer and torch.save."""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from benchmarks.contenders.loops import Job, Plain
from benchmarks.contenders.recipe_loops import recipe_class
from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.measurements import (
    Column,
    Goal,
    Options,
    Progress,
    Section,
    Spread,
    Timings,
    alternate,
    pin_threads,
)
from benchmarks.harness.terminal import interruptible, unread_terminal
from benchmarks.sections.input_pipeline import find_images, write_files
from datamodules.images.mnist import MNISTDataModule
from recipes.runner.run import run as run_command_line

__all__ = ["run"]

PLAIN = "plain torch.save"
STOCK = "plain Trainer"
OURS = "command line"
WIDTHS = {"0.8 million parameters": 1_024, "6.5 million parameters": 8_192}
MOST = 2.0


def network(width: int) -> nn.Module:
    """Return a network of two linear layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


class Saves(pl.Callback):
    """Callback that saves several checkpoints during training and records the seconds of each."""

    def __init__(self, folder: Path, saves: int) -> None:
        self.folder = folder
        self.saves = saves
        self.seconds: list[float] = []
        self.size = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        path = self.folder / "saved.ckpt"
        for _save in range(self.saves):
            start = time.perf_counter()
            trainer.save_checkpoint(path)
            self.seconds.append(time.perf_counter() - start)
        self.size = path.stat().st_size
        trainer.should_stop = True


def plain_save(job: Job, folder: Path, saves: int) -> float:
    """Return the seconds of torch.save of weights and optimizer, without checksum, fsync and renaming."""
    model = job.build()
    optimizer = job.optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    seconds = []
    for _ in range(saves):
        start = time.perf_counter()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def by_trainer(job: Job, folder: Path, saves: int) -> float:
    """Return the seconds of a save by a Trainer without callbacks."""
    saving = Saves(folder, saves)
    bare_trainer([saving]).fit(Plain(job), job)
    return statistics.median(saving.seconds)


def by_command_line(job: Job, folder: Path, saves: int, sizes: list[int]) -> float:
    """Return the seconds of a save by a run of the recipe, with all callbacks, and add its size to `sizes`."""
    saving = Saves(folder, saves)
    flags = f"--data-dir {folder} --dataset mnist --run-dir {folder / 'runs'} --max-epochs 1 --limit-train-batches 4"
    flags += " --limit-val-batches 1 --limit-test-batches 1 --val-fraction 0.1 --accelerator cpu --precision 32-true"
    with interruptible(), unread_terminal():
        run_command_line(recipe_class(job.network), MNISTDataModule, lambda: [saving], flags.split())
    sizes.append(saving.size)
    return statistics.median(saving.seconds)


def goal(timings: Timings, size: str) -> Goal:
    """Return the goal for the ratio of a safe save to that of a plain Trainer."""
    ratio = timings.ratio(f"{size}, {OURS}", f"{size}, {STOCK}")
    result = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return Goal(f"{size}: a save at most {MOST:.0f} times as long as a plain Trainer's", result, ratio.median <= MOST)


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure the saves of networks of two sizes."""
    threads = pin_threads(options.threads or 1)
    saves = 2 if options.quick else 5
    repeats = options.rounds(5)
    images, labels, _ = find_images("", 2_560)
    sizes: dict[str, list[int]] = {size: [] for size in list(WIDTHS)[: 1 if options.quick else None]}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name, suppress_output():
        folder = Path(name)
        write_files(folder, images, labels)
        contenders: dict[str, Callable[[], float]] = {}
        for size in sizes:
            make = partial(network, WIDTHS[size])
            job = Job(make, images.unsqueeze(1), labels.long(), 256, 4, 1, "32-true")
            contenders |= {
                f"{size}, {PLAIN}": partial(plain_save, job, folder, saves),
                f"{size}, {STOCK}": partial(by_trainer, job, folder, saves),
                f"{size}, {OURS}": partial(by_command_line, job, folder, saves, sizes[size]),
            }
        timings = alternate(contenders, repeats, progress=progress)
    rows: dict[str, list[Spread | None]] = {
        name: [timings.spread(name, 1e-3), timings.ratio(name, f"{name.partition(', ')[0]}, {PLAIN}")]
        for name in contenders
    }
    return Section(
        title="checkpoints: how long a save blocks the loop",
        header={
            "network": "784 to WIDTH to 10 with the two moments of AdamW, on the disk of the temporary folder",
            "threads": threads,
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds in turn, each the median of {saves} saves, after 1 that does not",
        },
        columns=[Column("milliseconds a save", ".1f"), Column("times plain torch.save", ".2f")],
        rows=rows,
        goals=[goal(timings, size) for size in sizes],
        notes=[f"{size}: {size_list[0] / 1e6:.1f} MB" for size, size_list in sizes.items()],
        interrupted=timings.interrupted,
    )
