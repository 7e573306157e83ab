"""Draws and tabulates how far the results of one training lie apart, by program and layout."""

import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["drift_picture", "with_tables"]

Rows = Mapping[str, Mapping[str, Any]]
"""The runs of a program or a recipe by their layouts: the loss in hexadecimal and the SHA-256 of the weights."""

_LEFT = 16
_WIDTH = 440
_RIGHT = _WIDTH - _LEFT
_PAD = 20
_STRIP = 62
_STYLE = """
:root { color-scheme: light dark; }
.paper { fill: #ffffff; stroke: #d5dae0; } .ink { fill: #171b21; } .faint { fill: #5c6673; } .grid { stroke: #e3e7ec; }
.one { fill: #12805c; } .many { fill: #c95400; } .count { fill: #ffffff; } .dot { stroke: #ffffff; }
@media (prefers-color-scheme: dark) {
.paper { fill: #14171c; stroke: #343b46; } .ink { fill: #e6e9ee; } .faint { fill: #9aa4b2; } .grid { stroke: #2f3642; }
.one { fill: #4fd6a5; } .many { fill: #ff9a4d; } .count { fill: #14171c; } .dot { stroke: #14171c; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px; }
.hash { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; font-size: 13px; }
.title { font-size: 17px; font-weight: 600; } .name { font-weight: 600; } .count { font-size: 12px; font-weight: 600; }
"""


def _losses(rows: Rows) -> list[float]:
    return [float.fromhex(row["loss"]) for row in rows.values()]


def _hashes(rows: Rows) -> set[str]:
    return {row["sha256"] for row in rows.values()}


def _count(rows: Rows) -> str:
    different = len(_hashes(rows))
    return f"{len(rows)} runs, {'one result' if different == 1 else f'{different} results'}"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def drift_picture(programs: Mapping[str, Rows], recipes: Mapping[str, Rows], updates: int) -> str:
    """Draw the loss of each run of each program on one axis, and the one of each recipe in figures.

    Runs with equal weights are one dot, whose area is their number.
    """
    losses = [loss for rows in programs.values() for loss in _losses(rows)]
    low, high = min(losses), max(losses)

    def position(loss: float) -> float:
        return _LEFT + _PAD + (_RIGHT - _LEFT - 2 * _PAD) * (loss - low) / (high - low)

    elements = [
        _text(_LEFT, 30, f"One training: its loss after {updates} updates", "ink title"),
        _text(_LEFT, 52, "on 1, 2 and 4 processes, with and without workers,", "faint"),
        _text(_LEFT, 70, "whole, and stopped and resumed; equal runs are one dot", "faint"),
    ]
    top = 84
    bottom = top + _STRIP * len(programs)
    step = _tick_step(high - low)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        x = position(number * step)
        elements.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 6}" y2="{bottom}"/>')
        elements.append(_text(x, bottom + 18, f"{number * step:g}", "faint", "middle"))
    for number, (name, rows) in enumerate(programs.items()):
        y = top + _STRIP * number
        kind = "one" if len(_hashes(rows)) == 1 else "many"
        elements.append(_text(_LEFT, y + 20, name, "ink name"))
        elements.append(_text(_RIGHT, y + 20, _count(rows), f"{kind} name", "end"))
        middle = y + 42
        elements.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{middle}" y2="{middle}"/>')
        equal = Counter((row["sha256"], row["loss"]) for row in rows.values())
        for (_, loss), runs in equal.most_common():
            x = position(float.fromhex(loss))
            radius = 3.9 * math.sqrt(runs)
            elements.append(f'<circle class="{kind} dot" cx="{x:.1f}" cy="{middle}" r="{radius:.1f}"/>')
            if runs > 3:
                elements.append(_text(x, middle + 4.3, str(runs), "count", "middle"))
    y = bottom + 50
    elements.append(_text(_LEFT, y, "The recipes, also from folder and archive", "ink title"))
    for name, rows in recipes.items():
        y += 26
        kind = "one" if len(_hashes(rows)) == 1 else "many"
        elements.append(_text(_LEFT, y, name, "ink name"))
        elements.append(_text(_LEFT + 76, y, _count(rows), f"{kind} name"))
        elements.append(_text(_RIGHT, y, _range(rows), "ink hash", "end"))
    height = y + 20
    label = f"Losses of one training after {updates} updates in {len(programs)} programs, by layout"
    paper = f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>'
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}"'
    opening = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{_STYLE}</style>", paper]
    return "\n".join([*opening, *elements, "</svg>", ""])


def _tick_step(width: float) -> float:
    """Return a distance of 1, 2 or 5 times a power of ten that divides a range into at most five parts."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step for step in (power / 5, power / 2, power, 2 * power) if width / step <= 5)


def _range(rows: Rows) -> str:
    """Return the loss in hexadecimal, or in decimal the range of several."""
    different = {str(row["loss"]) for row in rows.values()}
    if len(different) == 1:
        return different.pop()
    return f"{min(_losses(rows)):.4f} to {max(_losses(rows)):.4f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f'<div class="numbers" markdown>\n\n{rows}\n\n</div>'


def _summary(names: Mapping[str, Rows]) -> str:
    body = []
    for name, rows in names.items():
        losses = _losses(rows)
        different = str(len(_hashes(rows)))
        spread = f"{max(losses) - min(losses):.6f}" if max(losses) > min(losses) else "0"
        strong = f"**{different}**" if different == "1" else different
        body.append([name, str(len(rows)), strong, f"{min(losses):.6f}", f"{max(losses):.6f}", spread])
    return _table(("", "runs", "different weights", "lowest loss", "highest loss", "spread"), body)


def _runs(names: Mapping[str, Rows], order: Sequence[str]) -> str:
    def cell(rows: Rows, layout: str) -> str:
        if layout not in rows:
            return ""
        loss = rows[layout]["loss"]
        return f"`{loss}`<br>{float.fromhex(loss):.6f}, `{rows[layout]['sha256'][:6]}`"

    measured = {layout for rows in names.values() for layout in rows}
    layouts = [layout for layout in dict.fromkeys(order) if layout in measured]
    body = [[layout, *(cell(rows, layout) for rows in names.values())] for layout in layouts]
    return _table(("layout", *names), body)


def with_tables(
    page: str,
    results: Mapping[str, Any],
    programs: Mapping[str, Rows],
    recipes: Mapping[str, Rows],
    order: Sequence[str],
) -> str:
    """Return a page with the measured figures in the place of those between its comments ``<!-- measured: NAME -->``.

    Args:
        page: text of the page.
        results: date and conditions of the measurement.
        programs: runs of the programs by layout.
        recipes: runs of the recipes by layout.
        order: names of all layouts, in the order of the tables.
    """
    conditions = results["conditions"]
    day = datetime.date.fromisoformat(results["date"])
    packages = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    threads = "one thread" if conditions["threads"] == 1 else f"{conditions['threads']} threads"
    machine = f"{conditions['processor']}, {conditions['cores']} cores, {threads} in each process; {packages}"
    commands = [
        f"python -m recipes.{name} {conditions['recipes'][name]} --threads {conditions['threads']} --max-steps"
        f" {conditions['updates']} {conditions['flags']}"
        for name in recipes
    ]
    blocks = {
        "conditions": f"Measured on {day.day} {day:%B %Y}: {machine}.",
        "summary": _summary({**programs, **{f"`recipes.{name}`": rows for name, rows in recipes.items()}}),
        "programs": _runs(programs, order),
        "recipes": _runs(recipes, order),
        "commands": "```{.text .wrap}\n" + "\n".join(commands) + "\n```",
    }
    for name, text in blocks.items():
        before, opening, rest = page.partition(f"<!-- measured: {name} -->\n")
        _, closing, after = rest.partition("<!-- end -->")
        page = f"{before}{opening}\n{text}\n\n{closing}{after}"
    return page
