"""Seconds to list and split the images of class folders or of an archive: in the first run, and in later ones.

The files are empty, since none is read. What is timed on our side is the set-up of the data module: listing, sorting,
the split into training and validation, and the keys of the caches; of `ImageFolder`, listing alone.
"""

import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from unittest.mock import patch

from torchvision.datasets import ImageFolder

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
from datamodules import ImageFolderDataModule
from datamodules.images.pixel_cache import cache_folder

__all__ = ["run"]

FILES, QUICK_FILES, IN_FOLDER = 100_000, 12_000, 1000
MILLION = 1_000_000
STOCK = "torchvision, ImageFolder"
FIRST, LATER = "folders, first run", "folders, later runs"
FIRST_ZIP, LATER_ZIP = "zip, first run", "zip, later runs"
GOALS = {FIRST: 20, FIRST_ZIP: 20, LATER: 2, LATER_ZIP: 2}
"""Seconds for a million files."""


def write_files(folder: Path, count: int) -> Path:
    """Writes FOLDER/images/CLASS/ with a thousand empty files each, and images.zip beside it, as if a while ago."""
    images = folder / "images"
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for start in range(0, count, IN_FOLDER):
            inner = images / f"n{start // IN_FOLDER:08}"
            inner.mkdir(parents=True)
            for number in range(start, min(count, start + IN_FOLDER)):
                (inner / f"{inner.name}_{number}.JPEG").touch()
                archive.writestr(zipfile.ZipInfo(f"{inner.name}/{inner.name}_{number}.JPEG"), b"")
            os.utime(inner, (1, 1))
    for path in (images, folder / "images.zip"):
        os.utime(path, (1, 1))  # Listings of what has just changed are not kept.
    return images


def list_ours(place: Path) -> None:
    """What a run does before it reads its first image."""
    ImageFolderDataModule(data_dir=str(place), image_size=224).setup("fit")


def goals(timings: Timings, count: int) -> list[Goal]:
    """A million files within a time, from those of `count`."""
    found = []
    for name, most in GOALS.items():
        of_million = timings.spread(name, unit=count / MILLION)
        text = f"{of_million.median:.1f} s ({of_million.low:.1f} to {of_million.high:.1f})"
        found.append(Goal(f"{name}: a million files in {most} s", text, of_million.median <= most))
    return found


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measures the listings in turn."""
    threads = pin_threads(1)
    count = QUICK_FILES if options.quick else FILES
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as temporary:
        home = {"XDG_CACHE_HOME": str(Path(temporary) / "cache")}
        images = write_files(Path(temporary), count)
        archive = images.with_suffix(".zip")

        def first(place: Path) -> float:
            shutil.rmtree(cache_folder("listings"), ignore_errors=True)
            return stopwatch(lambda: list_ours(place))()

        def later(place: Path) -> float:
            list_ours(place)  # A first run of the other place has deleted the listing.
            return stopwatch(lambda: list_ours(place))()

        contenders = {
            STOCK: stopwatch(lambda: ImageFolder(str(images))),
            FIRST: lambda: first(images),
            LATER: lambda: later(images),
            FIRST_ZIP: lambda: first(archive),
            LATER_ZIP: lambda: later(archive),
        }
        with patch.dict(os.environ, home):
            timings = alternate(contenders, options.repeats or (3 if options.quick else 7), progress=progress)
    rows: dict[str, list[Spread | None]] = {
        name: [timings.spread(name), timings.spread(name, unit=count / MILLION), timings.ratio(name, STOCK)]
        for name in contenders
    }
    return Section(
        title=f"image_listing: {count:,} image files",
        header={
            "data": f"{count:,} empty files, {IN_FOLDER:,} in a folder, which the operating system holds in memory",
            "threads": threads,
            "precision": "none, only names",
            "repeats": f"{timings.rounds} rounds in turn after 1 that does not count",
        },
        columns=[
            Column("seconds", ".2f"),
            Column("seconds for a million files", ".1f"),
            Column("time of ImageFolder", ".2f"),
        ],
        rows=rows,
        goals=goals(timings, count),
        ours=[FIRST, LATER, FIRST_ZIP, LATER_ZIP],
        interrupted=timings.interrupted,
    )
