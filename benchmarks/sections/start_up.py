"""Measures the seconds from the start of a process to the recipe's first step, of --help, and of the imports."""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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
from benchmarks.harness.processes import answer_of, seconds_of
from benchmarks.sections.input_pipeline import find_images, write_files

__all__ = ["run"]

TORCH = "import torch"
IMPORTS = "import torch, torchvision, lightning"
IMPORTED = "the same, until they are imported"
HELP = "recipe, --help"
FIRST_STEP = "recipe, first step"
COMPARED_WITH = {TORCH: IMPORTS, HELP: IMPORTS, FIRST_STEP: IMPORTED}
"""Contender that each is compared with. Of the first step that is the time until the imports are done, since the end of
a process takes a second.
"""
MOST = {HELP: 1.1, FIRST_STEP: 1.3}
_IMPORTS = "import torch, torchvision, lightning.pytorch"


def imported() -> float:
    """Return the seconds until the imports are done."""
    start = time.time()
    return float(answer_of("-c", f"{_IMPORTS}, os, time; print(time.time(), flush=True); os._exit(0)")) - start


def first_step(root: Path, runs: str, parts: dict[str, list[float]]) -> float:
    """Return the seconds to the first step, and add those of each phase to `parts`."""
    start = time.time()
    flags = ("--data-dir", str(root), "--dataset", "mnist", "--run-dir", runs, "--accelerator", "cpu")
    marks = {"start": start, **answer_of("-m", "benchmarks.contenders.first_step", *flags)}
    for (_, before), (name, after) in pairwise(marks.items()):
        parts[name].append(after - before)
    return float(marks["first step"]) - start


def goal(timings: Timings, name: str) -> Goal:
    """Return the goal for a start compared with the imports that it cannot avoid."""
    ratio = timings.ratio(name, COMPARED_WITH[name])
    result = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return Goal(f"{name}: at most {MOST[name]} times the bare imports", result, ratio.median <= MOST[name])


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure the start of each program in turn."""
    threads = pin_threads(options.threads or 1)
    repeats = options.rounds(7)
    images, labels, source = find_images(options.data_dir, 2_560 if options.quick else 60_000)
    parts: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        root = Path(folder)
        write_files(root, images, labels)
        contenders: dict[str, Callable[[], float]] = {
            TORCH: lambda: seconds_of("-c", "import torch"),
            IMPORTS: lambda: seconds_of("-c", _IMPORTS),
            IMPORTED: imported,
            HELP: lambda: seconds_of("-m", "recipes.mnist", "--help"),
            FIRST_STEP: lambda: first_step(root, str(root / "runs"), parts),
        }
        timings = alternate(contenders, repeats, warmup=0 if options.quick else 1, progress=progress)
    rows: dict[str, list[Spread | None]] = {
        name: [timings.spread(name), timings.ratio(name, COMPARED_WITH[name]) if name in COMPARED_WITH else None]
        for name in contenders
    }
    # Without the rounds of the warm-up.
    split = {name: statistics.median(seconds[-timings.rounds :]) * 1000 for name, seconds in parts.items()}
    return Section(
        title="start-up: from nothing to the first step",
        header={
            "data": f"{source}, {len(labels):,} images",
            "threads": threads,
            "precision": "as the command line chooses it",
            "repeats": f"{timings.rounds} rounds of processes in turn after 1 that fills the caches",
        },
        columns=[Column("seconds", ".2f"), Column("times the imports", ".2f")],
        rows=rows,
        goals=[goal(timings, HELP), goal(timings, FIRST_STEP)],
        notes=[
            "the first step is compared with the time until the imports are done, the rest with whole processes",
            f"milliseconds up to the first step: {', '.join(f'{name} {ms:,.0f}' for name, ms in split.items())}",
        ],
        interrupted=timings.interrupted,
    )
