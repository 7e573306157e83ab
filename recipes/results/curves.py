"""The curves of a run, read from metrics.csv and drawn with matplotlib."""

import csv
import io
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "Curves", "Line", "draw_panel", "read_curves", "shown_panels", "svg"]

METRICS = "metrics.csv"
LEARNING_RATE = "learning rate"
_SCORE = re.compile(r"(?:(train|training|val|valid|validation)[/_ ])?(.+?)(?:_epoch)?")
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
    """A curve of a panel: its name in the legend, its colour, and whether it is dotted."""

    name: str
    curve: Curve
    colour: str
    dotted: bool = False


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


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
    pairs = [(0.0, 0.0), *sorted((step + 1, epoch + 1) for epoch, step in last.items())] if last else []
    if len(pairs) > 2 and pairs[-1][0] < 2 * pairs[-2][0] - pairs[-3][0]:
        pairs.pop()  # The last epoch ended early: the line through the others goes on.
    return pairs


def _place(column: str) -> tuple[str, str] | None:
    """The panel and the part ("train", "val" or the learning rate's name) that a column belongs to, if any.

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
    return str(name), "val" if part and part.startswith("val") else "train"


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
    curves = Curves({}, _epochs_done(row for row in rows if row.keys() & places.keys()))
    for number, row in enumerate(rows):
        for column, value in row.items():
            if column in places:
                panel, part = places[column]
                curve = curves.panels.setdefault(panel, {}).setdefault(part, Curve([], []))
                curve.epochs.append(curves.place(row.get("step", number) + 1))
                curve.values.append(value)
    return curves


def panel_of(score: str | None) -> str | None:
    """The panel of a score such as "val/loss"."""
    place = _place(score) if score else None
    return place[0] if place else None


def shown_panels(names: Iterable[str], monitor: str | None, most: int = 8) -> list[str]:
    """The panels to show: of the monitored score, of the loss, then the others; the learning rate is the last one.

    Example:
        >>> shown_panels(["learning rate", "ece", "loss", "accuracy"], "val/accuracy")
        ['accuracy', 'loss', 'ece', 'learning rate']
    """
    first = panel_of(monitor)
    order = sorted(names, key=lambda name: (name == LEARNING_RATE, name != first, name != "loss"))
    return [*order[: most - 1], *order[-1:]] if len(order) > most else order


def _thinned(curve: Curve) -> Curve:
    """At most `_POINTS` points of a curve, with its last one."""
    step = -(-len(curve.values) // _POINTS)
    return Curve(curve.epochs[::-1][::step][::-1], curve.values[::-1][::step][::-1])


def plain(text: str) -> str:
    """Text as matplotlib draws it: between two dollars it reads a formula."""
    return text.replace("$", r"\$")


def draw_panel(
    axes: "Axes", title: str, lines: Sequence[Line], best: tuple[float, float | None] | None, unit: str
) -> None:
    """Draw curves into axes.

    Args:
        best: the place of the best checkpoint, which a vertical line marks, and its value if this panel has it.
    """
    from matplotlib.ticker import MaxNLocator

    for line in lines:
        curve = _thinned(line.curve)
        marker = "o" if len(curve.values) <= 30 else None
        style = ":" if line.dotted else "-"
        axes.plot(*curve, style, color=line.colour, label=plain(line.name), marker=marker, markersize=3, linewidth=1.6)
    if best is not None:
        axes.axvline(best[0], color=TEXT_COLOUR, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
        if best[1] is not None:
            axes.plot([best[0]], [best[1]], "o", markersize=9, markerfacecolor="none", markeredgecolor=TEXT_COLOUR)
    axes.set_title(plain(title), fontsize=11, loc="left", color=TEXT_COLOUR)
    axes.tick_params(color=GRID_COLOUR, labelcolor=TEXT_COLOUR, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GRID_COLOUR)


def svg(figure: "Figure", salt: str) -> str:
    """A figure as SVG for an HTML page, in the page's font and its colours of text and lines.

    Args:
        salt: another one for each figure of the page, for its ids.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)  # Not unique in a page, and not referred to.
    return text.replace(TEXT_COLOUR, "currentColor").replace(GRID_COLOUR, "var(--line)")
