"""``report.html``: a finished run on one page, from the files in its folder."""

import csv
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.files import write_text
from recipes.results.curves import (
    COLOURS,
    LEARNING_RATE,
    Curves,
    Line,
    Panel,
    colours,
    panel_of,
    panel_svg,
    read_curves,
    shown_panels,
)
from recipes.results.page import Image, Section, render
from recipes.results.results_file import FIGURES, PARTS, RESULTS, Results, read_results
from recipes.results.texts import duration, memory_text, score_text, time_text, value_text

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"
_MOST_IMAGE_BYTES = 8 << 20  # Of all figures together: a page of 11 MB still opens at once on a phone.
_MOST_ROWS = 300
_FIGURES_FIRST = ("confusion_matrix", "mistakes", "attention", "grad_cam", "predictions")
_COLOURS = {"train": COLOURS[0], "val": COLOURS[1], "run": COLOURS[0]}
_STAGES = {"train": "training", "val": "validation", "test": "test"}


def _curves(curves: Curves, results: Results) -> Section:
    best = results.get("best")
    monitor = best["monitor"] if best else None
    place = curves.place(best["step"]) if best else None
    panels = []
    for name in shown_panels(curves.panels, monitor):
        parts = curves.panels[name]
        if name == LEARNING_RATE:
            lines = [Line(part, parts[part], colour) for part, colour in zip(parts, colours(len(parts)), strict=True)]
        else:
            lines = [Line(_STAGES.get(part, ""), parts[part], _COLOURS[part]) for part in _COLOURS if part in parts]
        if best and place is not None and best["value"] is not None and name == panel_of(monitor):
            lines[-1] = lines[-1]._replace(best=(place, best["value"]))
        panels.append(Panel(name, lines, curves.unit, place))
    if not panels:
        return Section("Curves", "There are none: the run has written no metrics.csv (--logger csv).")
    text = "The dashed line marks the best checkpoint." if best else ""
    return Section("Curves", text, drawings=[panel_svg(panel) for panel in panels])


def _figures(folder: Path) -> list[Section]:
    """The figures of the test; those of the validation are folded where there are others."""
    stages: dict[str, list[Image]] = {}
    left_out, room = [], _MOST_IMAGE_BYTES
    for path in sorted((folder / FIGURES).glob("*.png"), key=_place_of_figure):
        if path.stat().st_size > room:
            left_out.append(path.name)
            continue
        stage, _, name = path.stem.partition("_")
        data = path.read_bytes()
        room -= len(data)
        stages.setdefault(stage, []).append(Image.of_png(f"{stage}: {name.replace('_', ' ')}", data))
    text = f"Too large for this page: {', '.join(left_out)} in {FIGURES}/." if left_out else ""
    first, *others = stages or [""]
    sections = [Section("Figures of the best checkpoint", text, images=stages.get(first, []))]
    return sections + [Section(images=stages[s], folded=f"Figures of the {_STAGES.get(s, s)} set") for s in others]


def _place_of_figure(path: Path) -> tuple[bool, int, str]:
    stage, _, name = path.stem.partition("_")
    return stage != "test", (*_FIGURES_FIRST, name).index(name), path.stem


def _scores(results: Results) -> list[Section]:
    """The scores, and those of single classes, folded."""
    stages: dict[str, dict[str, Any]] = {}
    for column, value in results.get("scores", {}).items():
        stage, slash, name = column.partition("/")
        stage, name = (stage, name) if slash and stage in _STAGES else ("", column)
        stages.setdefault(stage, {})[name] = value
    order = [stage for stage in ("test", "val", "train", "") if stage in stages]
    names = dict.fromkeys(name for stage in order for name in stages[stage])
    rows = [[name, *(score_text(stages[s][name]) if name in stages[s] else "" for s in order)] for name in names]
    columns = ["score", *(_STAGES.get(stage, "value") for stage in order)]
    main, classes = ([row for row in rows if ("_class_" in row[0]) == single] for single in (False, True))
    more = f"; {RESULTS} holds all {len(classes)}" if len(classes) > _MOST_ROWS else ""
    by_class = Section(columns=columns, rows=classes[:_MOST_ROWS], folded=f"By class{more}")
    return [Section("Scores", columns=columns, rows=main[:_MOST_ROWS]), *([by_class] if classes else [])]


def _classes(folder: Path) -> list[Section]:
    """The tables of classes, folded; those of the test first."""
    sections = []
    for path in sorted(folder.glob("*_per_class.csv"), reverse=True):
        # Of a run that was received it may hold anything.
        with suppress(OSError, ValueError, csv.Error), path.open(newline="", encoding="utf-8") as file:
            columns, *rows = itertools.islice(csv.reader(file), _MOST_ROWS + 2)
            stage = path.name.partition("_")[0]
            more = f"; {path.name} holds all" if len(rows) > _MOST_ROWS else ""
            folded = f"Classes of the {_STAGES.get(stage, stage)} set{more}"
            sections.append(Section(columns=columns, rows=rows[:_MOST_ROWS], folded=folded))
    return sections


def _seconds(results: Results) -> Section:
    seconds = results.get("seconds", {})
    total = max(1e-9, seconds.get("total", 0.0))
    shares = [
        (part.replace("_", " "), duration(seconds[part]), seconds[part] / total) for part in PARTS if part in seconds
    ]
    return Section("Time", f"{duration(total)} in all." if shares else "", shares=shares)


def _environment(results: Results) -> list[list[str]]:
    data: dict[str, Any] = results.get("data", {})
    sizes = ", ".join(f"{size:,} {part}" for part, size in data.get("sizes", {}).items())
    rows = {
        "data": ": ".join(filter(None, (data.get("name", ""), sizes))),
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in data.get("left_out", {}).items()),
        "parameters": f"{results.get('parameters', 0):,} ({results.get('trainable_parameters', 0):,} trainable)",
        "epochs": f"{results.get('epochs', 0):g}",
        "speed": f"{rate:,.0f} samples/s" if (rate := results.get("samples_per_second")) else "",
        "peak memory": memory_text(results.get("peak_memory_bytes")),
        "hardware": results.get("hardware", ""),
        "nodes": str(nodes) if (nodes := results.get("num_nodes", 1)) > 1 else "",
        "host": results.get("host", ""),
        "started": str(results.get("started_at", "")),
        "ended": str(results.get("ended_at", "")),
        "commit": results.get("commit") or "",
        **results.get("versions", {}),
    }
    return [[name, text] for name, text in rows.items() if text]


def _sections(folder: Path, results: Results) -> list[Section]:
    config, best = results.get("config", {}), results.get("best")
    headline = results.get("headline") or {n: score_text(v) for n, v in results["scores"].items() if "_class_" not in n}
    checkpoint = f"Scores of {Path(best['checkpoint']).name}, saved after {best['step']:,} updates." if best else ""
    changed = [[name, value_text(config[name])] for name in results.get("changed", ()) if name in config]
    settings = [[name, value_text(value)] for name, value in config.items()]
    scores, *classes = _scores(results)
    sections = [
        Section(text=checkpoint, tiles=dict(itertools.islice(headline.items(), 12))),
        _curves(read_curves(folder), results),
        *_figures(folder),
        scores,
        *(_classes(folder) or classes),
        Section("Settings", "" if changed else "All are the defaults.", code=results.get("command", ""), rows=changed),
        Section(rows=settings, folded=f"All {len(settings)} settings"),
        _seconds(results),
        Section("Environment", rows=_environment(results)),
    ]
    return [s for s in sections if s.rows or s.images or s.drawings or s.text or s.tiles or s.shares or s.code]


def write_report(folder: Path) -> Path:
    """Write the page of a finished run into its folder, from results.json, metrics.csv, tables of classes and figures/.

    Raises:
        UserError: the folder has no results.
        OSError: the page cannot be written; an earlier one is as it was.
    """
    results = read_results(folder)
    title = f"{results.get('recipe', folder.resolve().parent.name)}: {folder.resolve().name}"
    ended = "stopped early" if results.get("stopped_early") else "finished"
    subtitle = " ".join(filter(None, (ended, time_text(results.get("ended_at")))))
    path = folder / REPORT
    write_text(path, render(title, subtitle, _sections(folder, results)))
    return path
