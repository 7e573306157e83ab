"""Alternating measurements, their statistics, and how they are printed and written.

A machine that others use drifts by more than most differences of interest. So the things to compare run in turn in one
process, each round compares them with each other, and a figure is the median over the rounds with the extremes beside.
"""

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "Column",
    "Goal",
    "Options",
    "Section",
    "Spread",
    "Timings",
    "alternate",
    "as_json",
    "available_cores",
    "describe_machine",
    "pin_threads",
    "print_section",
    "stopwatch",
    "write_json",
]

Progress = Callable[[str, int, int], None]
"""Told what was just measured, how many measurements are done, and of how many."""


@dataclass(frozen=True)
class Options:
    """What the command line asks of every section.

    Args:
        quick: smaller sizes and fewer repeats, to see that it works; the figures are rough.
        repeats: rounds; None is the section's own choice.
        threads: of torch; None is the section's own choice.
        data_dir: where data sets are looked for.
        devices: of the scaling section: processes, for each world to measure.
    """

    quick: bool = False
    repeats: int | None = None
    threads: int | None = None
    data_dir: str = "data"
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spread:
    """One figure: what each round found, and the median, smallest and largest of it.

    Example:
        >>> spread = Spread((3.0, 1.0, 2.0, 9.0))
        >>> spread.median, spread.low, spread.high
        (2.5, 1.0, 9.0)
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass
class Timings:
    """Seconds of each contender in each complete round; `interrupted` where Ctrl-C ended it early.

    Example:
        >>> timings = Timings({"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 6.0, 4.0]})
        >>> timings.ratio("theirs", "ours").values
        (2.0, 3.0, 1.0)
        >>> timings.added("theirs", "ours", unit=1e-3).values
        (1000.0, 4000.0, 0.0)
    """

    seconds: dict[str, list[float]]
    interrupted: bool = False

    @property
    def rounds(self) -> int:
        return min(map(len, self.seconds.values()))

    def spread(self, name: str, unit: float = 1.0) -> Spread:
        """The time of a contender; `unit` is its length in seconds."""
        return Spread(tuple(seconds / unit for seconds in self.seconds[name]))

    def ratio(self, name: str, to: str) -> Spread:
        """The time of a contender over another's in the same round, so that what slows the machine cancels out."""
        return Spread(tuple(a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)))

    def added(self, name: str, to: str, unit: float = 1.0) -> Spread:
        """The time of a contender less another's in the same round."""
        return Spread(tuple((a - b) / unit for a, b in zip(self.seconds[name], self.seconds[to], strict=True)))


def stopwatch(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A contender that does `work` and returns how many seconds it took."""

    def measure() -> float:
        start = clock()
        work()
        return clock() - start

    return measure


def alternate(
    contenders: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1, progress: Progress | None = None
) -> Timings:
    """Runs the contenders in turn, `repeats` times, after `warmup` rounds that do not count.

    Every other round goes backwards, so that a machine that slows down or warms up favours no contender. Ctrl-C ends it
    and keeps the complete rounds.

    Args:
        contenders: by name, functions that do one measurement and return its seconds; set-up of their own is theirs to
            leave out.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first round was complete.

    Example:
        >>> ticks = iter([5.0, 7.0, 1.0, 2.0, 3.0, 1.5])
        >>> take = lambda: next(ticks)
        >>> alternate({"a": take, "b": take}, repeats=2).seconds
        {'a': [2.0, 3.0], 'b': [1.0, 1.5]}
    """
    if repeats < 1 or not contenders:
        raise ValueError(f"found {repeats} repeats of {len(contenders)} contenders, expected one of each at least")
    names, total = list(contenders), (warmup + repeats) * len(contenders)
    rounds: list[dict[str, float]] = []
    interrupted = False
    gc.freeze()  # What is there already need not be looked through each time.
    try:
        for number in range(warmup + repeats):
            found: dict[str, float] = {}
            for name in names if number % 2 == 0 else reversed(names):
                gc.collect()  # Else one pays for what the one before has left behind.
                found[name] = contenders[name]()
                if progress is not None:
                    progress(name, number * len(names) + len(found), total)
            if number >= warmup:
                rounds.append(found)
    except KeyboardInterrupt:
        if not rounds:
            raise
        interrupted = True
    finally:
        gc.unfreeze()
    return Timings({name: [found[name] for found in rounds] for name in names}, interrupted)


@dataclass(frozen=True)
class Column:
    """A column of figures: its heading with the unit, and how a figure is written in it."""

    title: str
    form: str = ".3g"


@dataclass(frozen=True)
class Goal:
    """What a section must show, and what it showed."""

    text: str
    found: str
    met: bool


@dataclass
class Section:
    """The results of one section.

    Args:
        header: how it was measured: threads, precision, repeats and the like.
        columns: of the figures; each row has one for every column, or None.
        notes: what a reader must know to read the figures.
    """

    title: str
    header: dict[str, str]
    columns: list[Column]
    rows: dict[str, list[Spread | None]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


def available_cores() -> int:
    """Cores that this process may use; containers and job schedulers grant fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pin_threads(threads: int) -> str:
    """Sets torch's number of threads, and returns the text for the header."""
    import torch

    torch.set_num_threads(threads)
    return f"{torch.get_num_threads()} of torch, on {available_cores()} cores"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """The commit that is measured, with a plus where files were changed since."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def describe_machine(allocator_tuned: bool) -> dict[str, str]:
    """What the figures hold for: the hardware, the versions, the commit, the time and how busy the machine is."""
    import torch

    from recipes.runner.machine import bf16_unit

    unit = bf16_unit()
    machine = {
        "processor": f"{_processor()}, {available_cores()} cores{unit and f', {unit}'}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("torch", "torchvision", "lightning")),
        "commit": _commit(),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "allocator": "keeps large blocks, for all that is measured" if allocator_tuned else "as the system has it",
    }
    if torch.cuda.is_available():
        machine["accelerator"] = torch.cuda.get_device_name()
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        busy = "; something else is running, so take the figures with care" if load > 0.5 else ""
        machine["load before"] = f"{load:.1f}{busy}"
    return machine


def _pairs(pairs: Mapping[str, str], console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, text in pairs.items():
        table.add_row(name, text)
    console.print(table)


def _cell(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    if len(spread.values) == 1:
        return format(spread.median, form)
    median, low, high = (format(value, form) for value in (spread.median, spread.low, spread.high))
    return f"{median} ({low}..{high})" if len(spread.values) > 1 else median


def print_section(section: Section, console: Console) -> None:
    """Prints the header, the figures as ``median (min..max)``, the goals and the notes."""
    console.rule(f"[bold]{section.title}", align="left")
    _pairs(section.header, console)
    table = Table(caption="median (min..max) of the rounds", caption_justify="left")
    table.add_column("")
    for column in section.columns:
        table.add_column(column.title, justify="right")
    for name, spreads in section.rows.items():
        table.add_row(name, *(_cell(spread, column.form) for spread, column in zip(spreads, section.columns)))
    console.print(table)
    for goal in section.goals:
        verdict = "[green]met[/]" if goal.met else "[red]missed[/]"
        console.print(f"goal {verdict}: {goal.text}; found {goal.found}")
    for note in section.notes:
        console.print(f"note: {note}")
    if section.interrupted:
        console.print("[yellow]interrupted: what is shown are the rounds that were complete")
    console.print()


def _figure(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {"median": spread.median, "min": spread.low, "max": spread.high, "rounds": len(spread.values)}


def as_json(machine: Mapping[str, str], sections: Mapping[str, Section], interrupted: bool) -> dict[str, Any]:
    """All results as plain values."""
    return {
        "format": 1,
        "interrupted": interrupted,
        "machine": dict(machine),
        "sections": {
            name: {
                "title": section.title,
                "interrupted": section.interrupted,
                "header": section.header,
                "rows": {
                    row: {column.title: _figure(spread) for column, spread in zip(section.columns, spreads)}
                    for row, spreads in section.rows.items()
                },
                "goals": [{"goal": goal.text, "found": goal.found, "met": goal.met} for goal in section.goals],
                "notes": section.notes,
            }
            for name, section in sections.items()
        },
    }


def write_json(
    path: Path, machine: Mapping[str, str], sections: Mapping[str, Section], interrupted: bool = False
) -> None:
    """Writes the results beside `path` and renames, so that no reader finds a partial file."""
    # Figures that are not finite have no place in JSON: better to fail here than in whatever reads it.
    text = json.dumps(as_json(machine, sections, interrupted), indent=2, allow_nan=False)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)
