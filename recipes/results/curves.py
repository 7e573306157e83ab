"""The curves of a run, read from metrics.csv, and drawn as SVG for an HTML page."""

import csv
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from recipes.results.texts import is_number

__all__ = ["Curve", "curve_svg", "read_curves"]

METRICS = "metrics.csv"
Curve = list[tuple[float, float]]
"""The updates made at each value, and the value."""

_SCORE = re.compile(r"(?:(train|val)[/_])?(.+)")
_STAGES = {"train": "training", "val": "validation"}
_COLOURS = ("#2f81f7", "#e8730c", "#2da44e", "#bf4b8a", "#8250df")
_POINTS = 400  # Of a curve that is drawn: more than its pixels make a larger file only.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 350, 30, 170


def _columns(path: Path) -> dict[str, Curve]:
    """The columns of a file of metrics; what cannot be read is left out."""
    columns: dict[str, Curve] = {}
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for number, row in enumerate(csv.DictReader(file)):
                for name, text in row.items():
                    try:
                        value, step = float(text or ""), float(row.get("step") or number)
                    except (TypeError, ValueError):
                        continue
                    if is_number(value) and is_number(step):
                        columns.setdefault(str(name), []).append((step + 1, value))
    except (OSError, csv.Error):
        return {}
    return columns


def read_curves(folder: Path) -> dict[str, dict[str, Curve]]:
    """The curves of a run by score, such as "loss", and by stage; without those of single classes and of the test.

    Of a score that is logged within epochs and at their ends the means of several epochs are taken.
    """
    columns = _columns(folder / METRICS)
    curves: dict[str, dict[str, Curve]] = {}
    for column, curve in columns.items():
        name = column.removesuffix("_epoch")
        several = len(columns.get(f"{name}_epoch", ())) > 1
        is_other = f"{name}_epoch" in columns and name in columns and several == (column == name)
        if is_other or column in ("epoch", "step") or "_class_" in column or column.startswith("test"):
            continue
        match = _SCORE.fullmatch(name)
        stage, score = match.groups() if match else (None, name)
        curves.setdefault(str(score), {})[_STAGES.get(str(stage), "")] = curve
    # What counts comes first; learning rates and speeds come last.
    return dict(sorted(curves.items(), key=lambda item: ("validation" not in item[1], item[0] != "loss")))


def _axis_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # What fits beside the axis.


def curve_svg(title: str, curves: Mapping[str, Curve]) -> str:
    """The curves of one score as SVG, in the page's font and its colours of text and lines."""
    points = [point for curve in curves.values() for point in curve]
    right = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    lines, legend = [], []
    for (name, curve), colour in zip(curves.items(), _COLOURS):
        step = -(-len(curve) // _POINTS)
        thinned = [*curve[::-1][::step][::-1], curve[-1]]  # The last one twice: a single point is drawn, too.
        places = " ".join(
            f"{_LEFT + (_RIGHT - _LEFT) * x / right:.1f},"
            f"{_BOTTOM - (_BOTTOM - _TOP) * ((y - low) / (high - low) if high > low else 0.5):.1f}"
            for x, y in thinned
        )
        lines.append(f'<polyline points="{places}" stroke="{colour}"/>')
        legend.append(f'<tspan fill="{colour}"> {escape(name)}</tspan>')
    return (
        f'<svg viewBox="0 0 360 200"><g class="axes"><path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/></g>'
        f'<text x="{_LEFT}" y="18">{escape(title)}{"".join(legend)}</text>'
        f'<g text-anchor="end"><text x="{_LEFT - 5}" y="{_TOP + 4}">{_axis_text(high)}</text>'
        f'<text x="{_LEFT - 5}" y="{_BOTTOM}">{_axis_text(low)}</text>'
        f'<text x="{_RIGHT}" y="{_BOTTOM + 18}">{right:,.0f} updates</text></g>'
        f'<g class="curves">{"".join(lines)}</g></svg>'
    )
