"""What freezing layers and caching their features save of a step and of an epoch of ResNet fine-tuning.

Everything runs in the same `Trainer` with the recipe's own network, data module and callbacks, at one precision. A step
is timed on a batch that is in memory already; an epoch reads its images, which have been decoded before, and leaves
validation out on all sides.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

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
    available_cores,
    pin_threads,
)
from benchmarks.harness.terminal import interruptible
from datamodules import ImageFolderDataModule
from recipes import ResNetFineTuner
from recipes.launch.precision import resolve_precision

__all__ = ["run"]

SETTLING = 2  # Steps before the clock starts: the first choose kernels and touch new memory.
STEP_GOAL, EPOCH_GOAL = 3, 50

FULL, LAYER4, HEAD = "a step, all layers", "a step, frozen up to layer4", "a step, only the head"
LAYER4_EPOCH, HEAD_EPOCH = "an epoch, frozen up to layer4", "an epoch, only the head"
LAYER4_CACHED, HEAD_CACHED = f"{LAYER4_EPOCH}, cached features", f"{HEAD_EPOCH}, cached features"

STEPS = {FULL: "none", LAYER4: "layer4", HEAD: "fc"}
"""Up to which layer the recipe freezes."""
EPOCHS = {
    LAYER4_EPOCH: ("layer4", False, 1),
    LAYER4_CACHED: ("layer4", True, 1),
    HEAD_EPOCH: ("fc", False, 1),
    HEAD_CACHED: ("fc", True, 10),
}
"""Up to which layer the recipe freezes, whether it caches the features of the layers before, and epochs to time:
a single one of a few milliseconds is not enough."""
BASELINES = {LAYER4: FULL, HEAD: FULL, LAYER4_CACHED: LAYER4_EPOCH, HEAD_CACHED: HEAD_EPOCH}
"""What each is compared with."""


class SameBatch:
    """The same random images again and again, as a loader that Lightning leaves alone."""

    def __init__(self, batch_size: int, image_size: int, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
        self.batch = images, torch.arange(batch_size) % 2
        self.batch_size, self.count = batch_size, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch for _ in range(self.count))


class Clock(pl.Callback):
    """When each step ended, and how long each epoch took.

    Features are computed before the first epoch begins, so they are in no epoch.
    """

    def __init__(self) -> None:
        self.step_ends: list[float] = []
        self.epochs: list[float] = []
        self._start = 0.0

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.step_ends.append(time.perf_counter())

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(time.perf_counter() - self._start)


def fit(
    recipe: ResNetFineTuner,
    precision: Any,
    max_epochs: int = 1,
    clock: Clock | None = None,
    accelerator: str = "cpu",
    **data: Any,
) -> Clock:
    """A fit of the recipe without validation, logger, checkpoints and bar; `data` is what `Trainer.fit` takes."""
    clock = clock or Clock()
    trainer = bare_trainer(
        [clock], accelerator=accelerator, precision=precision, max_epochs=max_epochs, limit_val_batches=0
    )
    with interruptible():
        trainer.fit(recipe, **data)
    return clock


def fine_tuner(freeze_until: str, image_size: int, cache_features: bool = False) -> ResNetFineTuner:
    """The recipe with new weights: what they are changes no time."""
    return ResNetFineTuner(
        num_classes=2,
        image_size=image_size,
        weights="none",
        freeze_until=freeze_until,
        cache_features=cache_features,
    )


def step_seconds(freeze_until: str, precision: str, batch_size: int, image_size: int, steps: int) -> float:
    """The median step of a fit on one batch."""
    batches = SameBatch(batch_size, image_size, SETTLING + steps)
    ends = fit(fine_tuner(freeze_until, image_size), precision, train_dataloaders=batches).step_ends[SETTLING - 1 :]
    return statistics.median(after - before for before, after in pairwise(ends))


def epoch_seconds(
    freeze_until: str, cached: bool, epochs: int, precision: str, folder: Path, batch_size: int, image_size: int
) -> float:
    """The median epoch of a fit on a folder, without the first, in which images are decoded and workers start."""
    data = ImageFolderDataModule(
        data_dir=str(folder), image_size=image_size, batch_size=batch_size, augment="none", val_fraction=0
    )
    clock = fit(fine_tuner(freeze_until, image_size, cached), precision, max_epochs=1 + epochs, datamodule=data)
    return statistics.median(clock.epochs[1:])


def find_photographs(data_dir: str) -> Path | None:
    """Hymenoptera's folder, with ``train/ants`` and ``train/bees``, if it is there."""
    folders = [Path(data_dir).expanduser(), Path(data_dir).expanduser() / "hymenoptera"]
    return next((f for f in folders if all((f / "train" / name).is_dir() for name in ("ants", "bees"))), None)


def write_photographs(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Blurred noise as JPEG files, in two classes."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        place = folder / "train" / ("ants" if number % 2 else "bees")
        place.mkdir(parents=True, exist_ok=True)
        coarse = torch.randint(256, (15, 20, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(coarse.numpy()).resize(size, Image.Resampling.BICUBIC).save(place / f"{number}.jpg")


def count_photographs(folder: Path) -> int:
    """Files to train on."""
    return sum(path.is_file() for path in (folder / "train").rglob("*"))


def goal(timings: Timings, name: str, times: int) -> Goal:
    """Whether a contender is as much faster than what it is compared with as it must be."""
    faster = timings.ratio(BASELINES[name], name)
    found = f"{faster.median:.1f} times ({faster.low:.1f} to {faster.high:.1f})"
    return Goal(f"{name}: at least {times} times faster than {BASELINES[name]}", found, faster.median >= times)


def contenders(
    folder: Path, precision: str, batch_size: int, image_size: int, steps: int
) -> dict[str, Callable[[], float]]:
    """All that is measured, by name."""

    def a_step(freeze_until: str) -> Callable[[], float]:
        return lambda: step_seconds(freeze_until, precision, batch_size, image_size, steps)

    def an_epoch(freeze_until: str, cached: bool, epochs: int) -> Callable[[], float]:
        return lambda: epoch_seconds(freeze_until, cached, epochs, precision, folder, batch_size, image_size)

    return {name: a_step(until) for name, until in STEPS.items()} | {
        name: an_epoch(*how) for name, how in EPOCHS.items()
    }


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measures steps by how much is frozen, and epochs with cached features and without."""
    threads = pin_threads(options.threads or available_cores())
    repeats = options.repeats or (1 if options.quick else 5)
    batch_size, image_size, steps = (4, 32, 2) if options.quick else (16, 224, 6)
    precision, why = resolve_precision("auto", "cpu")
    with suppress_output(), tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        found = None if options.quick else find_photographs(options.data_dir)
        folder = found or Path(scratch)
        if found is None:
            write_photographs(folder, *((12, (80, 60)) if options.quick else (244, (500, 375))))
        count = count_photographs(folder)
        timings = alternate(
            contenders(folder, precision, batch_size, image_size, steps),
            repeats,
            warmup=0,  # Each begins with steps or an epoch that do not count.
            progress=progress,
        )
    source = "hymenoptera" if found else "SYNTHETIC images; pass --data-dir FOLDER with hymenoptera's train folder"
    rows: dict[str, list[Spread | None]] = {
        name: [
            timings.spread(name),
            timings.ratio(BASELINES[name], name) if name in BASELINES else None,
        ]
        for name in timings.seconds
    }
    return Section(
        title="fine-tuning: frozen layers and cached features",
        header={
            "network": f"resnet18, {image_size} pixels, batch {batch_size}; AdamW, the recipe's callbacks",
            "data": f"{source}; {count} images an epoch, not augmented, decoded before; steps: a batch in memory",
            "device": "cpu, one process",
            "threads": threads,
            "precision": f"{precision}{f' ({why})' if why else ''}, channels_last",
            "repeats": f"{timings.rounds} rounds in turn; a step: the median of {steps}, after {SETTLING} more; "
            "an epoch: the second of a fit, or the median of 10 after the first for the head on cached features",
        },
        columns=[Column("seconds", ".4f"), Column("times faster", ".1f")],
        rows=rows,
        goals=[goal(timings, LAYER4, STEP_GOAL), goal(timings, HEAD_CACHED, EPOCH_GOAL)],
        notes=[
            "a step is compared with the one of all layers, an epoch with cached features with the one without",
            "computing the features, once, is left out; it takes as long as an epoch without them",
        ],
        interrupted=timings.interrupted,
    )
