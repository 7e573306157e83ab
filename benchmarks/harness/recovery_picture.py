"""The seconds of recovery from faults, as SVG."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["picture"]


def picture(outcomes: Mapping[tuple[str, str, int], Any]) -> str:
    """The seconds of recovery as SVG: a bar for each fault, recipe and number of processes, with the end of the run."""
    title = "seconds from a fault: dark, until the command has ended; light, until the next update"
    drawn, y, before = [f'<text x="10" y="20" font-weight="bold">{title}</text>'], 30, ""
    longest = max([1.0, *(found.updates_after for found in outcomes.values() if math.isfinite(found.updates_after))])
    for (fault, recipe, processes), found in outcomes.items():
        recovered = math.isfinite(found.updates_after)
        if fault != before:
            y, before = y + 26, fault
            drawn.append(f'<text x="10" y="{y - 2}">{fault}</text>')
        who = f"{recipe}, {processes} process{'es' * (processes > 1)}"
        drawn.append(f'<text x="180" y="{y + 12}" text-anchor="end">{who}</text>')
        for seconds, colour in ((found.updates_after, "#9ec5f8"), (found.ended_after, "#2f6fd0")):
            if found.updates_after >= seconds:  # A run that goes on has no end to wait for.
                width = max(1.0, 400 * seconds / longest)
                drawn.append(f'<rect x="190" y="{y + 3}" width="{width:.1f}" height="11" fill="{colour}"/>')
        end = 198 + 400 * found.updates_after / longest if recovered else 198
        shown = f"{found.updates_after:.1f} s" if recovered else "no further update"
        drawn.append(f'<text x="{end:.0f}" y="{y + 12}">{shown}</text>')
        y += 16
    size = f'viewBox="0 0 670 {y + 14}" font-family="sans-serif" font-size="11"'
    drawn[:0] = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    return "\n".join([*drawn, "</svg>", ""])
