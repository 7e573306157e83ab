"""Valid ranges of numeric parameters, and their checks. No range contains NaN or infinity.

Constructors check their parameters, so the same ranges hold in Python and on the command line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from datamodules.errors import UserError

_INT32_MAX = 2**31 - 1
"""Upper limit of counts, too large to be worth naming in an error message."""


@dataclass(frozen=True)
class Range:
    """Interval of the numbers from `low` to `high`.

    Args:
        above: whether `low` is excluded.
        below: whether `high` is excluded.
        whole: whether only integers are valid.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        if isinstance(number, float) and not math.isfinite(number):
            return False
        low = self.low < number if self.above else self.low <= number
        return bool(low and (number < self.high if self.below else number <= self.high))

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else ""
        has_upper_limit = self.high not in (math.inf, _INT32_MAX)
        if has_upper_limit and not (self.above or self.below or math.isinf(self.low)):
            return f"{kind} from {self.low:,} to {self.high:,}".strip()
        bounds = []
        if not math.isinf(self.low):
            bounds.append(f"above {self.low:,}" if self.above else f"{self.low:,} or more")
        if has_upper_limit:
            bounds.append(f"below {self.high:,}" if self.below else f"{self.high:,} at most")
        return f"{kind}, {' and '.join(bounds)}".strip(", ") or "a finite number"


NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1)
NATURAL = Range(0, _INT32_MAX, whole=True)
COUNT = Range(1, _INT32_MAX, whole=True)
COUNT_OR_NO_LIMIT = Range(-1, _INT32_MAX, whole=True)
"""A count; -1 stands for all, or for no limit."""
SIZE = Range(1, 2**16, whole=True)
"""Size of a layer."""
RATE = Range(0, 10**6, above=True)
"""Learning rate, or a factor on it."""
SECONDS = Range(0, 10**7, above=True)


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that a parameter is one of the allowed values.

    Raises:
        UserError: the value is not allowed; the message has the choices.
    """
    if value not in allowed:
        raise UserError(f"expected one of {', '.join(allowed)}", setting=name, value=value)


def check_types(**values: tuple[Any, bool, str]) -> None:
    """Check the types of parameters.

    Args:
        values: value of each parameter, whether its type is right, and the expected type, by name.

    Raises:
        UserError: a type is wrong.
    """
    for name, (value, is_right, expected) in values.items():
        if not is_right:
            raise UserError(f"expected {expected}", setting=name, value=value)


def check_ranges(**numbers: tuple[Any, Range]) -> None:
    """Check that parameters are within their ranges. None, an unset parameter, is always valid.

    Args:
        numbers: value and range of each parameter, by name.

    Raises:
        UserError: a value is outside of its range; the message has the range.
    """
    for name, (value, allowed) in numbers.items():
        if value is not None and value not in allowed:
            raise UserError(f"expected {allowed}", setting=name, value=value)
