"""Measures how many photographs a core reads, decodes, augments and normalizes per second, at 224 pixels.

The photographs are scaled to 500 pixels on their long side, as in many data sets. All contenders read the same JPEG
files, which the operating system has cached, without worker processes. The time is that of one pass over a training
loader without further work. The bare decoder has the bytes of the files in memory and discards the pixels. Every loader
crops at random, flips, and varies brightness, contrast and saturation.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

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
    stopwatch,
)
from benchmarks.sections.fine_tuning import count_photographs, find_photographs, write_photographs
from benchmarks.sections.input_pipeline import one_epoch
from datamodules import ImageFolderDataModule
from datamodules.images.builtin_datasets import IMAGENET_MEAN, IMAGENET_STD

__all__ = ["run"]

SIZE = 224
BATCH_SIZE = 32
LONG_SIDE = 500
STOCK = "torchvision, ImageFolder and DataLoader"
DECODER = "torchvision's decoder alone"
FIRST = "first epoch"
LATER = "later epochs, from the cache"
UNCACHED = "without a cache"
TIMES_STOCK = 3.0
OF_DECODER = 1.3


def scale_photographs(source: Path, target: Path) -> None:
    """Write the photographs of a folder's ``train`` as JPEG files of `LONG_SIDE` pixels."""
    for path in sorted((source / "train").rglob("*.jpg")):
        target_path = target / path.relative_to(source)
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            scale = LONG_SIDE / max(image.size)
            size = round(image.width * scale), round(image.height * scale)
            image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(target_path, quality=90)


def stock_loader(folder: Path, size: int = SIZE) -> Iterable[tuple[Tensor, Tensor]]:
    """Return a `DataLoader` over `ImageFolder`, with the same augmentation as our loader."""
    steps = [
        v2.RandomResizedCrop(size, scale=(0.25, 1.0)),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.2, 0.2, 0.2),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    return DataLoader(datasets.ImageFolder(str(folder / "train"), v2.Compose(steps)), BATCH_SIZE, shuffle=True)


def our_loader(folder: Path, cache: Path | None, size: int = SIZE) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the recipe's training loader over all images, without workers."""
    if cache:
        os.environ["XDG_CACHE_HOME"] = str(cache)
    data = ImageFolderDataModule(
        data_dir=str(folder),
        image_size=size,
        batch_size=BATCH_SIZE,
        val_fraction=0.0,
        num_workers=0,
        cache_gb=2 if cache else 0,
    )
    data.setup("fit")
    loader: Iterable[tuple[Tensor, Tensor]] = data.train_dataloader()
    return loader


def decode_all(folder: Path) -> Callable[[], None]:
    """Return a contender that decodes the bytes of all files."""
    files = [path for path in sorted((folder / "train").rglob("*")) if path.is_file()]
    contents = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in files]

    def decode() -> None:
        for content in contents:
            decode_jpeg(content, mode=ImageReadMode.RGB)

    return decode


def goals(timings: Timings) -> list[Goal]:
    """Return the goals for the speed compared with the stock loader and with the decoder."""
    goal_list = []
    for name in (FIRST, LATER):
        faster = timings.ratio(STOCK, name)
        text = f"{faster.median:.2f} times ({faster.low:.2f} to {faster.high:.2f})"
        goal_list.append(
            Goal(f"{name}: {TIMES_STOCK:g} times the speed of {STOCK}", text, faster.median >= TIMES_STOCK)
        )
    over = timings.ratio(FIRST, DECODER)
    text = f"{over.median:.2f} times ({over.low:.2f} to {over.high:.2f})"
    goal_list.append(Goal(f"{FIRST}: within {OF_DECODER} times {DECODER}", text, over.median <= OF_DECODER))
    return goal_list


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure the loaders and the decoder in turn."""
    threads = pin_threads(1)
    repeats = options.rounds(7, quick=3)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = find_photographs(options.data_dir)
        folder = Path(temporary) / "photographs"
        is_hymenoptera = source is not None and not options.quick
        if source is None or options.quick:
            write_photographs(folder, 12 if options.quick else 244, (500, 375))
        else:
            scale_photographs(source, folder)
        count = count_photographs(folder)
        fresh = Path(temporary) / "fresh"
        kept = Path(temporary) / "kept"

        def first_epoch() -> float:
            shutil.rmtree(fresh, ignore_errors=True)
            return stopwatch(one_epoch(our_loader(folder, fresh), count))()

        contenders = {
            STOCK: stopwatch(one_epoch(stock_loader(folder), count)),
            DECODER: stopwatch(decode_all(folder)),
            UNCACHED: stopwatch(one_epoch(our_loader(folder, None), count)),
            FIRST: first_epoch,
            LATER: stopwatch(one_epoch(our_loader(folder, kept), count)),
        }
        timings = alternate(contenders, repeats, progress=progress)
    names = (
        "hymenoptera" if is_hymenoptera else "SYNTHETIC images; pass --data-dir FOLDER with hymenoptera's train folder"
    )
    rows = {
        name: [
            Spread(tuple(count / seconds for seconds in timings.seconds[name])),
            None if name == STOCK else timings.ratio(STOCK, name),
            None if name == DECODER else timings.ratio(name, DECODER),
        ]
        for name in contenders
    }
    return Section(
        title=f"images: photographs at {SIZE} pixels on one core",
        header={
            "data": f"{names}; {count} JPEG files of {LONG_SIDE} px an epoch, batch {BATCH_SIZE}, shuffled, augmented",
            "threads": f"{threads}; no workers",
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds in turn after 1 that does not count",
        },
        columns=[
            Column("images a second", ",.0f"),
            Column("times faster than ImageFolder", ".2f"),
            Column("time of the decoder", ".2f"),
        ],
        rows=rows,
        goals=goals(timings),
        interrupted=timings.interrupted,
    )
