"""Values of a run as short texts."""

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["is_number", "memory_text", "score_text", "value_text"]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that can be computed with and drawn, so neither NaN nor one of 400 digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e100 < value < 1e100


def value_text(value: Any) -> str:
    """A setting as text; without quotes where it is one.

    Example:
        >>> value_text("mnist"), value_text(None), value_text([1, None])
        ('mnist', '-', '[1, null]')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def score_text(value: Any) -> str:
    """A score with four decimals, or four digits where it is large or small.

    Example:
        >>> score_text(0.97391), score_text(0.00001234), score_text(123456.7)
        ('0.9739', '1.234e-05', '123,457')
    """
    if not is_number(value):
        return value_text(value)
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4g}"


def memory_text(sizes: Mapping[str, int | None]) -> str:
    """Bytes by where they were used.

    Example:
        >>> memory_text({"host": 990_000_000, "device": 3_200_000_000})
        '0.99 GB host, 3.20 GB device'
    """
    return ", ".join(f"{size / 1e9:.2f} GB {where}" for where, size in sizes.items() if size is not None)
