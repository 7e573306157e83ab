"""Measures how much time freezing and cached features save in a step and an epoch of ResNet fine-tuning.

Everything runs in the same `Trainer` with the recipe's own network and data module, at one precision. A step is timed
on a batch in memory; an epoch reads its images, which have been decoded before, and is not validated.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

from benchmarks.harness.bare_trainer import Again, bare_trainer, suppress_output
from benchmarks.harness.measurements import (
    Column,
    Goal,
    Options,
    Progress,
    Section,
    alternate,
    available_cores,
    pin_threads,
)
from benchmarks.harness.terminal import interruptible
from datamodules import ImageFolderDataModule
from recipes import ResNetFineTuner
from recipes.runner.machine import resolve_precision

__all__ = ["run"]

SETTLING = 2
"""Steps before the clock starts. The first ones choose kernels and touch new memory."""
GOAL = 50
FULL = "a step, all layers"
HEAD = "a step, only the head"
EPOCH = "an epoch, only the head"
CACHED = "an epoch, only the head, cached features"
BASELINES = {HEAD: FULL, CACHED: EPOCH}
"""Contender that each contender is compared with."""


def image_batch(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return random images of shape (count, 3, size, size), in two classes."""
    images = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))
    return images, torch.arange(count) % 2


class Clock(pl.Callback):
    """Callback that records the seconds of each step and epoch. Features are computed before the first epoch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.epochs: list[float] = []
        self._epoch = self._step = 0.0

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch = self._step = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        before = self._step
        self._step = time.perf_counter()
        self.steps.append(self._step - before)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(time.perf_counter() - self._epoch)


def fit(freeze_until: str, size: int, precision: str, epochs: int = 1, cached: bool = False, **data: Any) -> Clock:
    """Train the recipe with new weights, which do not affect the time. `data` are arguments of `Trainer.fit`."""
    recipe = ResNetFineTuner(
        num_classes=2, image_size=size, weights="none", freeze_until=freeze_until, cache_features=cached
    )
    clock = Clock()
    with interruptible():
        bare_trainer([clock], precision=precision, max_epochs=epochs, limit_val_batches=0).fit(recipe, **data)
    return clock


def step_seconds(freeze_until: str, size: int, precision: str, batch: Any, steps: int) -> float:
    """Return the median seconds of a step."""
    return statistics.median(
        fit(freeze_until, size, precision, train_dataloaders=Again(batch, SETTLING + steps)).steps[SETTLING:]
    )


def epoch_seconds(cached: bool, epochs: int, size: int, precision: str, folder: Path, batch_size: int) -> float:
    """Return the median seconds of an epoch of the head, without the first, which decodes images and starts workers."""
    data = ImageFolderDataModule(
        data_dir=str(folder), image_size=size, batch_size=batch_size, augment="none", val_fraction=0
    )
    return statistics.median(fit("fc", size, precision, 1 + epochs, cached, datamodule=data).epochs[1:])


def find_photographs(data_dir: str) -> Path | None:
    """Return the folder of the hymenoptera images, with ``train/ants`` and ``train/bees``, or None."""
    folders = [Path(data_dir).expanduser(), Path(data_dir).expanduser() / "hymenoptera"]
    return next((f for f in folders if all((f / "train" / name).is_dir() for name in ("ants", "bees"))), None)


def write_photographs(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write blurred noise as JPEG files in two classes."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        class_folder = folder / "train" / ("ants" if number % 2 else "bees")
        class_folder.mkdir(parents=True, exist_ok=True)
        coarse = torch.randint(256, (15, 20, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.BICUBIC).save(class_folder / f"{number}.jpg")


def count_photographs(folder: Path) -> int:
    """Return the number of training files."""
    return sum(path.is_file() for path in (folder / "train").rglob("*"))


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure steps with and without frozen layers, and epochs with and without cached features."""
    threads = pin_threads(options.threads or available_cores())
    repeats = options.rounds(5)
    batch_size, size, steps, epochs = (4, 32, 2, 2) if options.quick else (16, 224, 6, 10)
    precision, why = resolve_precision("auto", "cpu")
    with suppress_output(), tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        photographs = None if options.quick else find_photographs(options.data_dir)
        folder = photographs or Path(scratch)
        if photographs is None:
            write_photographs(folder, *((12, (80, 60)) if options.quick else (244, (500, 375))))
        count = count_photographs(folder)
        batch = image_batch(batch_size, size)
        contenders = {
            FULL: partial(step_seconds, "none", size, precision, batch, steps),
            HEAD: partial(step_seconds, "fc", size, precision, batch, steps),
            EPOCH: partial(epoch_seconds, False, 1, size, precision, folder, batch_size),
            CACHED: partial(epoch_seconds, True, epochs, size, precision, folder, batch_size),
        }
        # Each measurement begins with steps or an epoch that do not count.
        timings = alternate(contenders, repeats, warmup=0, progress=progress)
    faster = {name: timings.ratio(base, name) for name, base in BASELINES.items()}
    ratio = faster[CACHED]
    return Section(
        title="fine-tuning: a frozen backbone and cached features",
        header={
            "network": f"resnet18, {size} pixels, batch {batch_size}, AdamW",
            "data": f"{'hymenoptera' if photographs else 'SYNTHETIC images; pass --data-dir FOLDER with hymenoptera'}; "
            f"{count} images an epoch, not augmented, decoded before; steps: a batch in memory",
            "threads": threads,
            "precision": f"{precision}{f' ({why})' if why else ''}",
            "repeats": f"{timings.rounds} rounds in turn; a step: the median of {steps}, after {SETTLING} more; "
            f"an epoch: the second of a fit, with cached features the median of {epochs} after the first",
        },
        columns=[Column("seconds", ".4f"), Column("times faster", ".1f")],
        rows={name: [timings.spread(name), faster.get(name)] for name in contenders},
        goals=[
            Goal(
                f"{CACHED}: at least {GOAL} times faster than without",
                f"{ratio.median:.1f} times ({ratio.low:.1f} to {ratio.high:.1f})",
                ratio.median >= GOAL,
            )
        ],
        notes=["computing the features, once, is left out; it takes as long as an epoch without them"],
        interrupted=timings.interrupted,
    )
