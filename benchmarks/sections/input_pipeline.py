"""Measures the seconds to load and augment an epoch of MNIST: whole batches from a tensor, and image by image.

Both loaders read the same files, shuffle, and yield every image once as normalized float32 in batches of 256. The time
is
that of one pass over the loader without further work: the time that a training loop waits if nothing overlaps. Reading
the files does not count, since both loaders have them in memory. Starting the workers counts, since a ``DataLoader``
does so in every epoch.
"""

import struct
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.harness.measurements import (
    Column,
    Goal,
    Options,
    Progress,
    Section,
    Timings,
    alternate,
    available_cores,
    pin_threads,
    stopwatch,
)
from datamodules import MNISTDataModule
from datamodules.images.builtin_datasets import DATASETS, find_files, read_idx

__all__ = ["run"]

BATCH_SIZE = 256
GOAL = 20
STOCK = "torchvision, DataLoader"
STOCK_WORKERS = "torchvision, DataLoader, 2 workers"
STOCK_AUGMENTED = "torchvision, DataLoader, RandomAffine"
OURS = "MNISTDataModule, augmented"
OURS_PLAIN = "MNISTDataModule, not augmented"


def find_images(data_dir: str, count: int) -> tuple[Tensor, Tensor, str]:
    """Return training images and labels of MNIST and their source, or random images of the same size.

    Returns:
        Images, uint8 of shape (count, 28, 28); labels, uint8 of shape (count,); and a description.
    """
    folders = [Path(data_dir).expanduser(), Path(data_dir).expanduser() / "mnist"]
    for folder in folders:
        files = find_files("mnist", folder)
        if files:
            images, labels = (read_idx(path, dimensions) for path, dimensions in zip(files["train"], (3, 1)))
            return images[:count], labels[:count], "MNIST"
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), dtype=torch.uint8, generator=generator)
    return images, labels, "SYNTHETIC noise in MNIST's size, since no MNIST was found; pass --data-dir FOLDER"


def write_files(root: Path, images: Tensor, labels: Tensor, test: tuple[Tensor, Tensor] | None = None) -> None:
    """Write idx files to ``root/MNIST/raw``, from which both loaders read. By default ten images are the test set."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, some_images, some_labels in (("train", images, labels), ("t10k", *(test or (images[:10], labels[:10])))):
        for kind, rows in ((f"{part}-images-idx3-ubyte", some_images), (f"{part}-labels-idx1-ubyte", some_labels)):
            header = struct.pack(f">HBB{rows.dim()}I", 0, 8, rows.dim(), *rows.shape)
            (folder / kind).write_bytes(header + rows.contiguous().numpy().tobytes())


def our_loader(root: Path, augment: bool = True) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the recipe's training loader over all images."""
    augmentation: dict[str, Any] = {} if augment else {"shift": 0.0, "rotation": 0.0, "scale": 0.0}
    data = MNISTDataModule("mnist", str(root), BATCH_SIZE, val_fraction=0, download=False, **augmentation)
    data.setup("fit")
    loader: Iterable[tuple[Tensor, Tensor]] = data.train_dataloader()
    return loader


def stock_loader(root: Path, workers: int = 0, augment: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the loader of PyTorch's example. With `augment`, it adds the closest augmentation of torchvision."""
    info = DATASETS["mnist"]
    # Bilinear, as in our augmentation: torchvision's default is nearest.
    affine = transforms.RandomAffine(
        10, translate=(2 / 28, 2 / 28), scale=(0.9, 1.1), interpolation=transforms.InterpolationMode.BILINEAR
    )
    steps: list[Any] = [transforms.ToTensor(), transforms.Normalize(info.mean, info.std)]
    dataset = datasets.MNIST(str(root), train=True, transform=transforms.Compose([affine] * augment + steps))
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers)


def one_epoch(loader: Iterable[tuple[Tensor, Tensor]], count: int) -> Callable[[], None]:
    """Return a contender that iterates over a loader once and checks that it yields `count` images."""

    def consume() -> None:
        seen = 0
        for images, _ in loader:
            seen += len(images)
        if seen != count:
            raise RuntimeError(f"an epoch had {seen} images, expected {count}")

    return consume


def goal(timings: Timings, stock: str, ours: str) -> Goal:
    """Return the goal for the speed of our loader compared with a stock loader."""
    faster = timings.ratio(stock, ours)
    result = f"{faster.median:.1f} times ({faster.low:.1f} to {faster.high:.1f})"
    return Goal(f"{ours}: at least {GOAL} times faster than {stock}", result, faster.median >= GOAL)


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure both kinds of loaders, with and without augmentation."""
    threads = pin_threads(options.threads or available_cores())
    repeats = options.rounds(7, quick=3)
    images, labels, source = find_images(options.data_dir, 2_560 if options.quick else 60_000)
    count = len(labels)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A DataLoader's advice about the number of workers.
        root = Path(folder)
        write_files(root, images, labels)
        loaders = {
            STOCK: stock_loader(root),
            STOCK_WORKERS: stock_loader(root, workers=2),
            STOCK_AUGMENTED: stock_loader(root, augment=True),
            OURS: our_loader(root),
            OURS_PLAIN: our_loader(root, augment=False),
        }
        contenders = {name: stopwatch(one_epoch(loader, count)) for name, loader in loaders.items()}
        timings = alternate(contenders, repeats, progress=progress)
    rows = {
        name: [
            timings.spread(name),
            None if name == STOCK else timings.ratio(STOCK, name),
            None if name == STOCK_AUGMENTED else timings.ratio(STOCK_AUGMENTED, name),
        ]
        for name in loaders
    }
    return Section(
        title="input pipeline: an epoch of MNIST",
        header={
            "data": f"{source}; {count:,} images an epoch, batch {BATCH_SIZE}, shuffled, normalized, on the CPU",
            "threads": f"{threads}; 1 in each worker",
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds in turn after 1 that does not count",
        },
        columns=[
            Column("seconds an epoch", ".3f"),
            Column("times faster than torchvision", ".1f"),
            Column("than torchvision, RandomAffine", ".1f"),
        ],
        rows=rows,
        goals=[goal(timings, STOCK, OURS_PLAIN), goal(timings, STOCK, OURS), goal(timings, STOCK_AUGMENTED, OURS)],
        notes=["few images: starting the workers weighs more than in a full epoch"] if options.quick else [],
        interrupted=timings.interrupted,
    )
