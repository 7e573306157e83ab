"""``python -m recipes compare RUN RUN ...``: what differs between runs, what each reached, and how long it took.

It reads the small files of the runs' folders, also of unfinished and damaged ones, and loads no torch.
"""

import argparse
import csv
import glob
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from callbacks.lib.terminal import terminal_width
from callbacks.lib.whole_files import whole_or_nothing
from datamodules.errors import RunFailedError, UserError
from recipes.cli.messages import one_line
from recipes.files import write_rows, write_text
from recipes.results.curves import (
    Curves,
    Line,
    Panel,
    colours,
    panel_of,
    panel_svg,
    panels_figure,
    read_curves,
    shown_panels,
)
from recipes.results.page import Section, render
from recipes.results.results_file import PARTS, RESULTS, Results, read_results
from recipes.results.texts import duration, is_number, memory_text, score_text, time_text, value_text
from recipes.resume.settings_file import read_settings
from recipes.text_scores import TRANSLATIONS, Estimate, p_value, standard_metrics

__all__ = ["add_significance", "compare", "find_runs", "names_of", "print_table", "read_runs"]

CONFIG = "config.yaml"
_OUTPUTS = (".png", ".html", ".csv", ".json")
_WIDEST_NAME, _WIDEST_CELL = 32, 30  # Columns of the terminal.

Sections = dict[str, dict[str, Any]]
"""What there is to say of a run: by section and name."""

_TEXTS: dict[str, Callable[[Any], str]] = {
    "about": value_text,
    "settings": value_text,
    "scores": score_text,
    "translations": value_text,
    "seconds": duration,
}
_ABOUT, _SETTINGS, _SCORES, _TRANSLATIONS, _SECONDS = _TEXTS
_ALWAYS = {"state", "epochs", "best update", "samples/s", "peak memory"}
"""What is shown of runs where it is equal, too."""


@dataclass(frozen=True)
class Run:
    """A run's folder, under a name that distinguishes it from the others."""

    name: str
    folder: Path
    sections: Sections
    changed: Sequence[str]
    monitor: str | None
    best: tuple[float, float] | None
    curves: Curves
    tokenize: str
    translations: Sequence[Mapping[str, str]]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, RESULTS))


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """The folders of runs that names and patterns such as ``runs/mnist/*`` stand for, each once.

    What else a pattern matches is left out.

    Raises:
        UserError: a name matches nothing, or there are fewer than two runs.
    """
    found: dict[Path, Path] = {}
    others = []
    for pattern in patterns:
        # Path.exists raises an error for a name that is too long.
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))  # noqa: PTH110, PTH207
        if not paths:
            raise UserError(f"there is no {pattern}; expected folders of runs, such as runs/mnist/NAME")
        for path in map(Path, paths):
            if _is_run(path):
                found.setdefault(path.resolve(), path)
            else:
                others.append(path)
    if len(found) < 2:
        got = ", ".join(map(str, found.values())) or "none"
        hint = "".join(f"; {path} is no folder of a run, which holds {CONFIG}" for path in others[:3])
        above = next((path for path in others if any(map(_is_run, path.glob("*/")))), None)
        hint += f"; pass '{above}/*' for the runs in it" if above else ""
        raise UserError(f"compare needs two runs or more, got {got}{hint}")
    return list(found.values())


def names_of(folders: Sequence[Path]) -> list[str]:
    """The ends of paths, as short as distinguishes them.

    Example:
        >>> names_of([Path("/runs/mnist/a"), Path("/runs/resnet/a")])
        ['mnist/a', 'resnet/a']
    """
    parts = [folder.resolve().parts for folder in folders]
    lengths = range(1, max(map(len, parts)) + 1)
    candidates = (["/".join(part[-length:]) for part in parts] for length in lengths)
    return next(names for names in candidates if len(set(names)) == len(names))


def _mapping(value: Any) -> dict[str, Any]:
    """A value of a file that may be damaged, where it is a mapping."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _read_translations(folder: Path) -> list[dict[str, str]]:
    """The sentences of a run's test with their translations; none where there is no such file or it is damaged."""
    try:
        with (folder / TRANSLATIONS).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    columns = {"source", "translation", "reference"}
    return rows if all(set(row) == columns and None not in row.values() for row in rows) else []


def _read(folder: Path, name: str) -> Run:
    """Read what can be read."""
    curves, state = read_curves(folder), "unfinished"
    results = Results()
    try:
        results = read_results(folder)
        state = "stopped early" if results.get("stopped_early") else "finished"
    except UserError:
        if (folder / RESULTS).exists():
            state = f"{RESULTS} is damaged"
    config = _mapping(results.get("config"))
    if not config:
        try:
            config = _mapping(read_settings(folder / CONFIG))
        except UserError:
            state += f", {CONFIG} is damaged"
    scores = _mapping(results.get("scores"))
    if not results and curves.panels:
        state, scores = f"{state}: last scores", curves.last_values()
    seconds, best = _mapping(results.get("seconds")), _mapping(results.get("best"))
    rate = results.get("samples_per_second")
    about = {
        "state": state,
        "recipe": results.get("recipe") or folder.resolve().parent.name,
        "data": _mapping(results.get("data")).get("name"),
        "started": time_text(results.get("started_at")),
        "epochs": results.get("epochs"),
        "best update": best.get("step"),
        "samples/s": round(rate) if is_number(rate) else rate,
        "peak memory": memory_text(results.get("peak_memory_bytes")),
        "parameters": results.get("parameters"),
        **{name: results.get(name) for name in ("hardware", "host")},
        "commit": str(results.get("commit") or "")[:12],
        **_mapping(results.get("versions")),
    }
    sections: Sections = {
        _ABOUT: {key: value for key, value in about.items() if value not in (None, "")},
        _SETTINGS: dict(config),
        _SCORES: {key: value for key, value in scores.items() if "_class_" not in key},
        _TRANSLATIONS: {},
        _SECONDS: {part.replace("_", " "): seconds[part] for part in (*PARTS, "total") if part in seconds},
    }
    changed = results.get("changed")
    step, value, monitor = (best.get(name) for name in ("step", "value", "monitor"))
    mark = (curves.place(step), value) if is_number(step) and is_number(value) else None
    return Run(
        name,
        folder,
        sections,
        changed if isinstance(changed, list) else (),
        monitor if isinstance(monitor, str) else None,
        mark,
        curves,
        str(config.get("bleu_tokenize", "13a")),
        # A run that trains on keeps the file of its last test, and no results.
        _read_translations(folder) if results else (),
    )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, with the settings that differ and all scores and seconds.

    A setting that only some of the recipes have is among them if it was changed.
    """
    runs = [_read(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    known = sum(bool(run.sections[_SETTINGS]) for run in runs)

    def differs(section: str, name: str) -> bool:
        having = [run for run in runs if name in run.sections[section]]
        changed = section == _SETTINGS and any(name in run.changed for run in having)
        values = {value_text(run.sections[section][name]) for run in having}
        return len(values) > 1 or (len(having) < known and changed)

    for section in (_ABOUT, _SETTINGS):
        for name in {name for run in runs for name in run.sections[section]} - _ALWAYS:
            if not differs(section, name):
                for run in runs:
                    run.sections[section].pop(name, None)
    return runs


def _test_set(run: Run) -> list[tuple[str, str]]:
    return [(row["source"], row["reference"]) for row in run.translations]


def add_significance(runs: Sequence[Run]) -> list[str]:
    """Add the scores of translators tested on the same sentences, and whether they differ from the first one's.

    Returns:
        Lines for the user: signatures, and which runs were tested on other sentences.
    """
    tested = [run for run in runs if run.translations]
    if len(tested) < 2:
        return []
    first, *others = tested
    same = [run for run in others if _test_set(run) == _test_set(first)]
    lines = [
        f"{run.name} and {first.name} were tested on different sentences, so their translations are not compared"
        for run in others
        if run not in same
    ]
    if not same:
        return lines
    references = [row["reference"] for row in first.translations]
    for metric in standard_metrics(first.tokenize).values():
        found = [
            Estimate.of(metric, [row["translation"] for row in run.translations], references)
            for run in tested
            if run is first or run in same
        ]
        for run, estimate in zip([first, *same], found, strict=True):
            section = run.sections[_TRANSLATIONS]
            section["test sentences"] = len(references)
            section[metric.title] = f"{estimate.score:.2f} ± {estimate.interval:.2f}"
            if run is not first:
                difference, p = estimate.score - found[0].score, p_value(found[0], estimate)
                section[f"{metric.title} against {first.name}"] = f"{difference:+.2f}, p = {p:.3f}"
        lines.append(f"{metric.title}: {metric.signature}")
    return [*lines, "±: 95 % of the resamples; p: paired bootstrap resampling (Koehn, 2004)"]


def table_of(runs: Sequence[Run]) -> dict[str, list[list[str]]]:
    """By section, rows of a name and a text for each run; "" where the run has none."""
    table = {}
    for section, text in _TEXTS.items():
        names = dict.fromkeys(name for run in runs for name in run.sections[section])
        rows = []
        for name in names:
            of_runs = [run.sections[section] for run in runs]
            rows.append([name, *(text(values[name]) if name in values else "" for values in of_runs)])
        table[section] = rows
    return {section: rows for section, rows in table.items() if rows}


def _heading(section: str) -> str:
    return "settings that differ" if section == _SETTINGS else section


def print_table(runs: Sequence[Run], width: int | None) -> None:
    """Print the table, with as many runs side by side as fit; None is no limit."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def cell(text: str, style: str = "") -> Text:
        return Text(one_line(text, longest=300), style)

    table = table_of(runs)
    rows = [row for section in table.values() for row in section]
    first = min(_WIDEST_NAME, max(len(row[0]) for row in rows) + 2)
    widths = [
        min(_WIDEST_CELL, max(len(run.name), *(len(row[i]) for row in rows))) for i, run in enumerate(runs, start=1)
    ]
    width = width or first + sum(widths) + 2 * len(runs)
    console = Console(width=width, highlight=False, force_jupyter=False)
    start = 0
    while start < len(runs):
        ends = itertools.accumulate((2 + column for column in widths[start:]), initial=first)
        stop = start + max(1, sum(end <= width for end in ends) - 1)
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        shown.add_column(max_width=_WIDEST_NAME, overflow="fold")
        for run in runs[start:stop]:
            shown.add_column(cell(run.name), max_width=_WIDEST_CELL, overflow="fold")
        for section, lines in table.items():
            shown.add_row(cell(_heading(section), "bold"))
            for row in lines:
                shown.add_row(cell(f"  {row[0]}"), *map(cell, row[1 + start : 1 + stop]))
        with console.capture() as printed:
            console.print(shown)
        lines_of_block = [line.rstrip() for line in printed.get().splitlines()]
        print("\n".join(["", *lines_of_block] if start else lines_of_block))  # noqa: T201
        start = stop


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """The curves of all runs, with a colour for each run: the validation's, or else the training's."""
    monitor = next((run.monitor for run in runs if run.monitor), None)
    panels = []
    for name in shown_panels(dict.fromkeys(panel for run in runs for panel in run.curves.panels), monitor):
        lines, units = [], set()
        for run, colour in zip(runs, colours(len(runs)), strict=True):
            if parts := run.curves.panels.get(name):
                main = "val" if "val" in parts else next(iter(parts))
                best = run.best if name == panel_of(run.monitor) else None
                lines.append(Line(run.name, parts[main], colour, best=best))
                units.add(run.curves.unit)
                if main == "val" and "train" in parts:
                    lines.append(Line("", parts["train"], colour, dotted=True))
        panels.append(Panel(name, lines, " or ".join(sorted(units))))
    return panels


def _write(output: Path, runs: Sequence[Run]) -> None:
    """Write the table as CSV, JSON or a page, or the curves as a picture, by the file's suffix."""
    if output.suffix == ".png":
        if not (panels := panels_of(runs)):
            raise UserError(f"--output {output}: none of these runs has curves in metrics.csv; pass a name in .csv")
        with whole_or_nothing(output) as part:
            panels_figure(panels).savefig(part, format="png")
    elif output.suffix == ".html":
        columns = ["", *(run.name for run in runs)]
        tables = [
            Section(_heading(section).capitalize(), columns=columns, rows=rows)
            for section, rows in table_of(runs).items()
        ]
        # Above the drawings, which the names of many runs would cover.
        legend = list(zip((run.name for run in runs), colours(len(runs)), strict=True))
        plain = [panel._replace(lines=[line._replace(name="") for line in panel.lines]) for panel in panels_of(runs)]
        text = "Rings mark the best checkpoints; dotted curves are of the training."
        curves = [Section("Curves", text, legend=legend, drawings=list(map(panel_svg, plain)))] if plain else []
        write_text(output, render(f"Comparison of {len(runs)} runs", ", ".join(columns[1:]), [*curves, *tables]))
    elif output.suffix == ".json":
        write_rows(output, [{"name": run.name, "folder": str(run.folder), **run.sections} for run in runs])
    else:
        flat = [
            {"name": run.name} | {f"{part}.{key}": v for part, rows in run.sections.items() for key, v in rows.items()}
            for run in runs
        ]
        write_rows(output, flat, list(dict.fromkeys(column for row in flat for column in row)))


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def compare(args: Sequence[str], program: str) -> None:
    """Carry out the command.

    Translators that were tested on the same sentences are compared by paired bootstrap resampling.

    Args:
        args: what was typed after its name.
        program: what was typed before.

    Raises:
        UserError: there are no two runs to compare, or the file of the output cannot be written.
    """
    parser = _Parser(f"{program} compare", description="Compares runs: settings that differ, scores, seconds, curves.")
    parser.add_argument("run", nargs="+", help="folders of runs, finished or not; or patterns, as in 'runs/mnist/*'")
    parser.add_argument(
        "--output", type=Path, help="file for the table (.csv .json), the curves (.png) or both (.html)"
    )
    typed = parser.parse_args(args)
    output: Path | None = typed.output
    if output is not None and output.suffix not in _OUTPUTS:
        raise UserError(f"--output {output}: expected a name that ends in {', '.join(_OUTPUTS)}")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    runs = read_runs(find_runs(typed.run))
    lines = add_significance(runs)
    if output is not None:
        try:
            _write(output, runs)
        except OSError as error:
            raise RunFailedError(f"{output} could not be written: {error.strerror or error}") from error
    print_table(runs, terminal_width(sys.stdout))
    for line in lines:
        print(line)  # noqa: T201
    if output is not None:
        print(f"written: {output}")  # noqa: T201
