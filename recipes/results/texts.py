"""Values of a run as short texts; whatever a damaged file holds has one."""

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["is_number", "memory_text", "score_text", "value_text", "with_unit"]


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
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # Such as a mapping of dates, which YAML may hold.
        return str(value)


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


def memory_text(sizes: Any) -> str:
    """Bytes by where they were used.

    Example:
        >>> memory_text({"host": 990_000_000, "device": 3_200_000_000})
        '0.99 GB host, 3.20 GB device'
    """
    if not isinstance(sizes, Mapping):
        return ""
    return ", ".join(f"{size / 1e9:.2f} GB {where}" for where, size in sizes.items() if is_number(size))


def with_unit(number: float, unit: str = "") -> str:
    """A number with three digits and k, M, G or T.

    Example:
        >>> with_unit(102778), with_unit(51380224, "B"), with_unit(0)
        ('103 k', '51.4 MB', '0')
    """
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()
