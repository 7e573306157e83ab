"""Durations of training with a unit: ``"500 steps"``, ``"2 epochs"``, ``"5%"``, or an int of steps; and times."""

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from datamodules.errors import UserError

_PATTERN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(steps?|epochs?|%)?")
_TIME = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*(s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def read_time(text: str) -> timedelta | None:
    """Read a time of one unit as users write it; None where the text is none.

    Example:
        >>> str(read_time("1.5h")), str(read_time("90 minutes")), read_time("2 epochs")
        ('1:30:00', '1:30:00', None)
    """
    match = _TIME.fullmatch(text.strip().lower())
    return timedelta(**{_UNITS[match[2][0]]: float(match[1])}) if match else None


@dataclass(frozen=True)
class Duration:
    """Length of training in optimizer steps, epochs or per cent of the run.

    Args:
        value: the number of units.
        unit: a step is one update of the weights, however many micro-batches it accumulates. Under manual optimization
            each trained batch is a step, whatever the number of optimizers.
    """

    value: float
    unit: Literal["steps", "epochs", "%"]

    @classmethod
    def parse(cls, text: "int | str | Duration", what: str = "the duration") -> "Duration":
        """Read a duration as users write it.

        Args:
            what: name of the setting, for errors.

        Raises:
            UserError: `text` is neither an int of steps nor a number with a unit.

        Example:
            >>> Duration.parse("2 epochs")
            Duration(value=2.0, unit='epochs')
            >>> Duration.parse(500) == Duration.parse("500 steps") == Duration.parse("500")
            True
        """
        if isinstance(text, Duration):
            return text
        match = _PATTERN.fullmatch(str(text).strip().lower()) if type(text) in (int, str) else None
        if match is None:
            raise UserError(f'{what} {text!r} cannot be read: write "500 steps", "2 epochs", "5%" or 500 (steps)')
        value = float(match[1])
        unit = (match[2] or "steps")[:4]
        if unit == "%":
            if value > 100:
                raise UserError(f"{what} {text!r} is longer than the run: expected 0% to 100%")
            return cls(value, "%")
        if unit == "step":
            if value != int(value):
                raise UserError(f'{what} {text!r} is not a whole number of steps: write "{math.ceil(value)} steps"')
            return cls(value, "steps")
        return cls(value, "epochs")

    def to_steps(self, steps_per_epoch: float, total_steps: float) -> int:
        """Convert to steps, rounded up, so that only a duration of zero has no step.

        Args:
            steps_per_epoch: updates of an epoch; infinite if the loader has no length.
            total_steps: updates of the run; infinite if nothing ends it.

        Raises:
            UserError: the unit has no length in this run.

        Example:
            >>> Duration.parse("5%").to_steps(steps_per_epoch=100, total_steps=1010)
            51
        """
        scale = {"steps": 1.0, "epochs": steps_per_epoch, "%": total_steps / 100}[self.unit]
        if math.isinf(scale) and self.value:
            reason = "the loader has no length" if self.unit == "epochs" else "the run has no end"
            raise UserError(f'"{self}" is unknown because {reason}: write the duration in steps, such as "500 steps"')
        # Without rounding, 7 % of 100 steps would be 7.000000000000001, and eight steps.
        return math.ceil(round(self.value * scale, 6)) if self.value else 0

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{number}{'' if self.unit == '%' else ' '}{self.unit}"
