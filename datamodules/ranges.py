"""The ranges of parameters that are numbers; neither NaN nor infinity is in any of them.

A constructor states and checks them, so they hold for callers in Python and for the command line alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from datamodules.errors import UserError

_TOO_MANY = 2**31 - 1  # To be named in an error.


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`.

    Args:
        above: without `low` itself.
        below: without `high` itself.
        whole: whole numbers only.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        if isinstance(number, float) and not math.isfinite(number):
            return False
        low = self.low < number if self.above else self.low <= number
        return bool(low and (number < self.high if self.below else number <= self.high))

    def __str__(self) -> str:
        kind, ends = "a whole number" if self.whole else "", self.high not in (math.inf, _TOO_MANY)
        if ends and not (self.above or self.below or math.isinf(self.low)):
            return f"{kind} from {self.low:,} to {self.high:,}".strip()
        low = "" if math.isinf(self.low) else f"above {self.low:,}" if self.above else f"{self.low:,} or more"
        high = "" if not ends else f"below {self.high:,}" if self.below else f"{self.high:,} at most"
        bounds = " and ".join(part for part in (low, high) if part)
        return f"{kind}, {bounds}".strip(", ") or "a finite number"


NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1)
NATURAL = Range(0, 2**31 - 1, whole=True)
COUNT = Range(1, 2**31 - 1, whole=True)
SIZE = Range(1, 2**16, whole=True)
"""Of a layer."""
RATE = Range(0, 10**6, above=True)
"""Of learning, and what multiplies one."""
SECONDS = Range(0, 10**7, above=True)


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse a parameter that is none of these.

    Raises:
        UserError: with the parameter, its value and the choices.
    """
    if value not in allowed:
        raise UserError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def check_ranges(**numbers: tuple[Any, Range]) -> None:
    """Refuse parameters outside of their ranges; None, which leaves a parameter open, is in all of them.

    Args:
        numbers: by the parameter's name: its value and its range.

    Raises:
        UserError: with the first parameter, its value and the range.
    """
    for name, (value, allowed) in numbers.items():
        if value is not None and value not in allowed:
            raise UserError(f"{name}={value!r}: expected {allowed}")
