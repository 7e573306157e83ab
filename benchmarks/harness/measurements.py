"""Alternating measurements of several contenders, their statistics, and the output of results.

The speed of a shared machine drifts by more than most differences of interest. Contenders therefore run in turn in one
process, each round compares them with each other, and a figure is the median over the rounds with its range.
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
"""Function that receives the name of the last measurement, the number of measurements done, and their total."""


@dataclass(frozen=True)
class Options:
    """Options of the command line for all sections.

    Args:
        quick: smaller sizes and fewer repeats, to test that a section runs; the figures are rough.
        repeats: number of rounds; None is the default of the section.
        threads: number of torch's threads; None is the default of the section.
        data_dir: folder of the data sets.
        devices: numbers of processes to measure, for the scaling section.
    """

    quick: bool = False
    repeats: int | None = None
    threads: int | None = None
    data_dir: str = "data"
    devices: tuple[int, ...] = ()

    def rounds(self, full: int, quick: int = 1) -> int:
        """Return the number of rounds that was asked for, or the default of a section."""
        return self.repeats or (quick if self.quick else full)


@dataclass(frozen=True)
class Spread:
    """Figure with a value from each round, and their median, minimum and maximum.

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
    """Seconds of each contender in each complete round. `interrupted` says whether Ctrl-C ended the measurement.

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
        """Return the time of a contender, in a unit of `unit` seconds."""
        return Spread(tuple(seconds / unit for seconds in self.seconds[name]))

    def ratio(self, name: str, to: str) -> Spread:
        """Return the ratio of two contenders' times in the same round, in which the machine's speed cancels out."""
        return Spread(tuple(a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)))

    def added(self, name: str, to: str, unit: float = 1.0) -> Spread:
        """Return the difference of two contenders' times in the same round."""
        return Spread(tuple((a - b) / unit for a, b in zip(self.seconds[name], self.seconds[to], strict=True)))


def stopwatch(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Return a contender that calls `work` and returns its seconds."""

    def measure() -> float:
        start = clock()
        work()
        return clock() - start

    return measure


def alternate(
    contenders: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1, progress: Progress | None = None
) -> Timings:
    """Run the contenders in turn, `repeats` times, after `warmup` rounds that do not count.

    Every other round runs backwards, so that a machine that slows down or warms up favors no contender. Ctrl-C ends
    the measurement and keeps the complete rounds.

    Args:
        contenders: functions that do one measurement and return its seconds, without those of their set-up, by name.

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
    gc.freeze()  # Existing objects need not be scanned in each collection.
    try:
        for number in range(warmup + repeats):
            seconds: dict[str, float] = {}
            for name in names if number % 2 == 0 else reversed(names):
                gc.collect()  # Otherwise a contender pays for the garbage of the one before.
                seconds[name] = contenders[name]()
                if progress is not None:
                    progress(name, number * len(names) + len(seconds), total)
            if number >= warmup:
                rounds.append(seconds)
    except KeyboardInterrupt:
        if not rounds:
            raise
        interrupted = True
    finally:
        gc.unfreeze()
    return Timings({name: [seconds[name] for seconds in rounds] for name in names}, interrupted)


@dataclass(frozen=True)
class Column:
    """Column of figures: heading with the unit, and format of a figure."""

    title: str
    form: str = ".3g"


@dataclass(frozen=True)
class Goal:
    """Goal of a section, and the result."""

    text: str
    found: str
    met: bool


@dataclass
class Section:
    """Results of one section.

    Args:
        header: conditions of the measurement: threads, precision, repeats and so on.
        columns: columns of the table; each row has a figure or None for every column.
        notes: remarks that are needed to read the figures.
    """

    title: str
    header: dict[str, str]
    columns: list[Column]
    rows: dict[str, list[Spread | None]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


def available_cores() -> int:
    """Return the number of cores that this process may use. Containers and schedulers may grant a few of them only."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pin_threads(threads: int) -> str:
    """Set torch's number of threads, and return a text for the header."""
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
    """Return the measured commit, with a plus if files have changed since."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def describe_machine(allocator_tuned: bool) -> dict[str, str]:
    """Return hardware, versions, commit, time and load of the machine, under which the figures were measured."""
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
    """Print the header, the figures as ``median (min..max)``, the goals and the notes."""
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
    """Return all results as values for JSON."""
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
    """Write the results to a temporary file and rename it, so that no reader finds a partial file."""
    # JSON has no NaN and infinity, so an error here is better than one in the program that reads the file.
    text = json.dumps(as_json(machine, sections, interrupted), indent=2, allow_nan=False)
    temporary_path = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary_path.write_text(text + "\n", encoding="utf-8")
    temporary_path.replace(path)
