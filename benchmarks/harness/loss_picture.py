"""Draws losses of the same training on several numbers of processes as SVG, for light and dark pages."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["picture"]

_WIDTH = 720
_HEIGHT = 356
_PLOT_WIDTH = 286
_TOP = 66
_BOTTOM = 226
_LEFTS = (52, 412)
_STYLE = """
:root { color-scheme: light dark; }
.paper { fill: #ffffff; stroke: #d5dae0; } .ink { fill: #171b21; } .faint { fill: #5c6673; } .grid { stroke: #e3e7ec; }
.c0 { stroke: #1f5fbf; } .c1 { stroke: #c95400; } .c2 { stroke: #12805c; } .c3 { stroke: #a12fa8; }
@media (prefers-color-scheme: dark) {
.paper { fill: #14171c; stroke: #343b46; } .ink { fill: #e6e9ee; } .faint { fill: #9aa4b2; } .grid { stroke: #2a303a; }
.c0 { stroke: #74abff; } .c1 { stroke: #ff9a4d; } .c2 { stroke: #4fd6a5; } .c3 { stroke: #e78bec; }
}
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14.5px; }
.hash { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
.title { font-size: 17px; font-weight: 600; } polyline { fill: none; stroke-linejoin: round; }
"""
# Lines of equal runs coincide. The first line is the widest and the last is dashed, so that all can be seen.
_WIDTHS = (7, 4, 1.8, 1.8)
_DASHES = ("", "", "", "3 5")


def picture(results: Mapping[str, Any]) -> str:
    """Draw the losses of each program beside each other, with the first digits of the SHA-256 of the final weights."""
    programs = results["programs"]
    losses = [loss for runs in programs.values() for run in runs.values() for loss in run["losses"]]
    low = math.log(min(losses))
    high = math.log(max(losses))
    updates = max(len(run["losses"]) for runs in programs.values() for run in runs.values())

    def position(left: float, update: int, loss: float) -> tuple[float, float]:
        x = left + _PLOT_WIDTH * (update - 1) / (updates - 1)
        y = _BOTTOM - (_BOTTOM - _TOP) * (math.log(loss) - low) / (high - low)
        return x, y

    elements = [f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="10"/>']
    for left, (program, runs) in zip(_LEFTS, programs.items(), strict=True):
        different = len({run["sha256"] for run in runs.values()})
        count = "one result" if different == 1 else f"{different} results"
        elements.append(f'<text class="ink title" x="{left - 36}" y="30">{program}: {count}</text>')
        elements.append(f'<text class="faint" x="{left - 36}" y="52">loss on held-out digits</text>')
        for tick in (0.1, 0.2, 0.5, 1.0, 2.0):
            if low <= math.log(tick) <= high:
                _, y = position(left, 1, tick)
                elements.append(f'<line class="grid" x1="{left}" x2="{left + _PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
                elements.append(f'<text class="faint" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for update in range(20, updates + 1, 20):
            x, _ = position(left, update, 1.0)
            elements.append(f'<text class="faint" x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{update}</text>')
        elements.append(f'<text class="faint" x="{left - 36}" y="{_BOTTOM + 18}">updates</text>')
        for number, (name, run) in enumerate(runs.items()):
            points = (position(left, update, loss) for update, loss in enumerate(run["losses"], 1))
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            stroke = f'class="c{number}" stroke-width="{_WIDTHS[number]}" stroke-dasharray="{_DASHES[number]}"'
            elements.append(f'<polyline {stroke} points="{path}"/>')
            y = _BOTTOM + 46 + 21 * number
            elements.append(f'<line {stroke} x1="{left - 36}" x2="{left - 6}" y1="{y - 5}" y2="{y - 5}"/>')
            elements.append(f'<text class="ink" x="{left + 4}" y="{y}">{name}</text>')
            elements.append(f'<text class="ink hash" x="{left + 150}" y="{y}">{run["sha256"][:12]}</text>')
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    heads = f'{size} role="img" aria-label="Loss curves and hashes of the final weights"'
    opening = [f'<svg xmlns="http://www.w3.org/2000/svg" {heads}>', f"<style>{_STYLE}</style>"]
    return "\n".join([*opening, *elements, "</svg>", ""])
