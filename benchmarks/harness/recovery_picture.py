"""Draws the seconds of recovery from faults as SVG."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["picture"]


def picture(outcomes: Mapping[tuple[str, str, int], Any]) -> str:
    """Draw the seconds of recovery: two bars for each fault, recipe and number of processes."""
    title = "seconds from a fault: dark, until the command has ended; light, until the next update"
    elements = [f'<text x="10" y="20" font-weight="bold">{title}</text>']
    y = 30
    before = ""
    longest = max(
        [1.0, *(outcome.updates_after for outcome in outcomes.values() if math.isfinite(outcome.updates_after))]
    )
    for (fault, recipe, processes), outcome in outcomes.items():
        recovered = math.isfinite(outcome.updates_after)
        if fault != before:
            y += 26
            before = fault
            elements.append(f'<text x="10" y="{y - 2}">{fault}</text>')
        label = f"{recipe}, {processes} process{'es' * (processes > 1)}"
        elements.append(f'<text x="180" y="{y + 12}" text-anchor="end">{label}</text>')
        for seconds, color in ((outcome.updates_after, "#9ec5f8"), (outcome.ended_after, "#2f6fd0")):
            if outcome.updates_after >= seconds:  # A run that continues by itself has no end before its next update.
                width = max(1.0, 400 * seconds / longest)
                elements.append(f'<rect x="190" y="{y + 3}" width="{width:.1f}" height="11" fill="{color}"/>')
        end = 198 + 400 * outcome.updates_after / longest if recovered else 198
        text = f"{outcome.updates_after:.1f} s" if recovered else "no further update"
        elements.append(f'<text x="{end:.0f}" y="{y + 12}">{text}</text>')
        y += 16
    size = f'width="670" height="{y + 14}" viewBox="0 0 670 {y + 14}" font-family="sans-serif" font-size="11"'
    elements[:0] = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    return "\n".join([*elements, "</svg>", ""])
