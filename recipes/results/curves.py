"""The curves of a run, read from metrics.csv and drawn with matplotlib."""

import csv
import io
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.results.texts import is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "LEARNING_RATE",
    "Curve",
    "Curves",
    "Line",
    "Panel",
    "colours",
    "panel_of",
    "panel_svg",
    "panels_figure",
    "read_curves",
    "shown_panels",
]

METRICS = "metrics.csv"
LEARNING_RATE = "learning rate"
_SCORE = re.compile(r"(?:(train|val)(?:ing|id|idation)?[/_ ])?(.+?)(?:_epoch)?")
COLOURS = ("#2f81f7", "#e8730c", "#2da44e", "#bf4b8a", "#8250df", "#b08800", "#1b9aaa", "#cf222e")
"""Of curves: readable on white and on black."""

_POINTS = 400  # Of a curve that is drawn: more than its pixels make a larger file only.
TEXT_COLOUR, GRID_COLOUR = "#1f2328", "#d0d7de"
"""Colours of a picture by itself; in a page they follow the page's."""


class Curve(NamedTuple):
    """A score over the run.

    Args:
        epochs: completed at each value; updates made, where the run has logged no epochs.
        values: of the score.
    """

    epochs: list[float]
    values: list[float]


class Line(NamedTuple):
    """A curve of a panel.

    Args:
        name: in the legend; "" for none.
        best: epoch and value of the best checkpoint, which a ring marks.
    """

    name: str
    curve: Curve
    colour: str
    dotted: bool = False
    best: tuple[float, float] | None = None


class Panel(NamedTuple):
    """Curves in one pair of axes.

    Args:
        unit: of the horizontal axis.
        best: the place of the best checkpoint on it, which a vertical line marks.
    """

    title: str
    lines: Sequence[Line]
    unit: str
    best: float | None = None


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if is_number(number) else None


def _rows(path: Path) -> list[dict[str, float]]:
    """The numbers of a file of metrics; what cannot be read is left out."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [{str(k): _number(v) for k, v in row.items() if isinstance(v, str)} for row in csv.DictReader(file)]
    except (OSError, csv.Error):
        return []
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _epochs_done(rows: Iterable[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Updates made and epochs completed, in pairs, from the last row of each epoch; empty without epochs."""
    last: dict[float, float] = {}
    for row in rows:
        if {"epoch", "step"} <= row.keys():
            last[row["epoch"]] = max(row["step"], last.get(row["epoch"], 0.0))
    by_updates = {step + 1: epoch + 1 for epoch, step in last.items()}
    pairs = sorted({0.0: 0.0, **by_updates}.items()) if last else []
    if len(pairs) > 2 and pairs[-1][0] < 2 * pairs[-2][0] - pairs[-3][0]:
        pairs.pop()  # The last epoch ended early: the line through the others goes on.
    return pairs


def _place(column: str) -> tuple[str, str] | None:
    """The panel and the part ("train", "val", "run" or the learning rate's name) that a column belongs to, if any.

    Example:
        >>> _place("val/loss"), _place("train_loss_epoch"), _place("lr/no_decay"), _place("test/loss")
        (('loss', 'val'), ('loss', 'train'), ('learning rate', 'lr/no_decay'), None)
    """
    if column in ("epoch", "step") or "_class_" in column or re.match("test[/_ ]", column):
        return None
    if re.match(r"lr\b", column):
        return LEARNING_RATE, column
    match = _SCORE.fullmatch(column)
    part, name = match.groups() if match else (None, column)
    return str(name), part or "run"


@dataclass(frozen=True)
class Curves:
    """The curves of a run.

    Args:
        panels: by name of the panel, such as "loss", and of the part, such as "train" and "val".
        epochs_done: updates made and epochs completed, in pairs; empty where the run has logged no epochs.
    """

    panels: dict[str, dict[str, Curve]]
    epochs_done: list[tuple[float, float]]

    @property
    def unit(self) -> str:
        """What the horizontal axis counts."""
        return "epoch" if self.epochs_done else "update"

    def last_values(self) -> dict[str, float]:
        """The last value of each score, by names such as "val/loss"."""
        return {
            panel if part == "run" else f"{part}/{panel}": curve.values[-1]
            for panel, parts in self.panels.items()
            if panel != LEARNING_RATE
            for part, curve in parts.items()
        }

    def place(self, updates: float) -> float:
        """Where on the horizontal axis a number of updates lies.

        Example:
            >>> Curves({}, [(0, 0), (50, 1), (100, 2)]).place(75)
            1.5
        """
        if not self.epochs_done:
            return updates
        i = min(max(1, bisect_right(self.epochs_done, (updates, math.inf))), len(self.epochs_done) - 1)
        (x0, y0), (x1, y1) = self.epochs_done[i - 1], self.epochs_done[i]
        return y0 + (y1 - y0) * (updates - x0) / (x1 - x0)


def read_curves(folder: Path) -> Curves:
    """The curves of a run's folder, without those of single classes and of the test; none without metrics.csv."""
    rows = _rows(folder / METRICS)
    places = {column: place for column in {c: None for row in rows for c in row} if (place := _place(column))}
    for column in [column for column in places if column.removesuffix("_epoch") in places.keys() - {column}]:
        # The means of epochs and those within them: a run of several epochs shows the first, beside its validations.
        several = sum(column in row for row in rows) > 1
        del places[column.removesuffix("_epoch") if several else column]
    curves = Curves({}, _epochs_done(row for row in rows if row.keys() & places.keys()))
    for number, row in enumerate(rows):
        for column, value in row.items():
            if column in places:
                panel, part = places[column]
                curve = curves.panels.setdefault(panel, {}).setdefault(part, Curve([], []))
                curve.epochs.append(curves.place(row.get("step", number) + 1))
                curve.values.append(value)
    rates = curves.panels.get(LEARNING_RATE, {})
    drawn: list[Curve] = []
    for name, rate in [*rates.items()]:
        if rate in drawn:
            del rates[name]  # Groups of parameters may have the same rate.
        drawn.append(rate)
    for panel, parts in [*curves.panels.items()]:
        if "run" in parts and len(parts["run"].values) == 1:
            del curves.panels[panel]  # A number, not a curve.
    return curves


def panel_of(score: str | None) -> str | None:
    """The panel of a score such as "val/loss"."""
    place = _place(score) if score else None
    return place[0] if place else None


def shown_panels(names: Iterable[str], monitor: str | None, most: int = 8) -> list[str]:
    """The panels to show: of the monitored score, of the loss, then the others.

    The speed, the values of `TrainingMonitor` and the learning rate come last.

    Example:
        >>> shown_panels(["learning rate", "steps_per_second", "loss", "accuracy"], "val/accuracy")
        ['accuracy', 'loss', 'steps_per_second', 'learning rate']
    """
    first = panel_of(monitor)

    def rank(name: str) -> tuple[bool, ...]:
        last = (name == LEARNING_RATE, name.startswith("monitor/"), name.endswith("_per_second"))
        return (*last, name != first, name != "loss")

    order = sorted(names, key=rank)
    return [*order[: most - 1], *order[-1:]] if len(order) > most else order


def _thinned(curve: Curve) -> Curve:
    """At most `_POINTS` points of a curve, with its last one."""
    step = -(-len(curve.values) // _POINTS)
    return Curve(curve.epochs[::-1][::step][::-1], curve.values[::-1][::step][::-1])


def plain(text: str) -> str:
    """Text as matplotlib draws it: between two dollars it reads a formula."""
    return text.replace("$", r"\$")


def colours(count: int) -> list[str]:
    """Colours that differ, for as many curves."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["turbo"](0.05 + 0.9 * i / (count - 1))) for i in range(count)]


def _draw(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in panel.lines:
        curve = _thinned(line.curve)
        style, label = ":" if line.dotted else "-", plain(line.name) or "_nolegend_"
        marker = "o" if len(curve.values) <= 30 else None
        axes.plot(*curve, style, color=line.colour, label=label, marker=marker, markersize=3, linewidth=1.6)
        if line.best:
            axes.plot(*([x] for x in line.best), "o", markersize=9, markerfacecolor="none", markeredgecolor=line.colour)
    if panel.best is not None:
        axes.axvline(panel.best, color=TEXT_COLOUR, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
    axes.set_title(plain(panel.title), fontsize=11, loc="left", color=TEXT_COLOUR)
    axes.set_xlabel(panel.unit, fontsize=9, color=TEXT_COLOUR)
    axes.tick_params(color=GRID_COLOUR, labelcolor=TEXT_COLOUR, labelsize=9)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GRID_COLOUR)


def panels_figure(panels: Sequence[Panel], columns: int = 3) -> "Figure":
    """Panels side by side, over one legend."""
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.0, 4.4 * columns), 3.0 * rows + 0.6), layout="constrained", dpi=120)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one, panel in zip(axes, panels):
        _draw(one, panel)
    for one in axes[len(panels) :]:
        one.set_axis_off()
    names: dict[str, Any] = {}
    for one in axes:
        names |= {str(name): handle for handle, name in zip(*one.get_legend_handles_labels(), strict=True)}
    dotted = any(line.dotted for panel in panels for line in panel.lines)
    title = "solid: validation, dotted: training" if dotted else None
    figure.legend(
        list(names.values()), list(names), loc="outside lower center", ncols=4, fontsize=9, frameon=False, title=title
    )
    return figure


def panel_svg(panel: Panel) -> str:
    """A panel as SVG for an HTML page, in the page's font and its colours of text and lines."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.8))
    # Fixed margins: a layout that is computed takes as long as the drawing.
    axes = figure.add_axes((0.16, 0.17, 0.82, 0.72))
    _draw(axes, panel)
    if any(line.name for line in panel.lines):
        axes.legend(fontsize=9, frameon=False, labelcolor="linecolor")
    file = io.StringIO()
    # The salt makes ids that are unique in a page with several drawings.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)  # These are not unique, and nothing refers to them.
    return text.replace(TEXT_COLOUR, "currentColor").replace(GRID_COLOUR, "var(--line)")
