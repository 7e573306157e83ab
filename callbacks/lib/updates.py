"""Counts of a run, its updates and those made so far, and durations with a unit: "500 steps", "2 epochs", "5%".

``trainer.estimated_stepping_batches`` builds the loaders as a side effect. These functions change nothing.
"""

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from typing import Any, Literal

from callbacks.lib.lightning_internals import callbacks_of
from datamodules.errors import UserError
from datamodules.lightning import CombinedLoader, GradientAccumulationScheduler, pl

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


def _updates_of_epochs(trainer: pl.Trainer, epochs: int) -> float:
    """Return the number of updates of some epochs, regardless of `max_steps`."""
    if trainer.train_dataloader is None:
        raise RuntimeError(
            "the number of updates was asked for before the training loader exists: ask in training, that is from"
            " `on_train_start` on, or from the function of a LambdaLR once its step is above 0"
        )
    if any(map(isinstance, callbacks_of(trainer), repeat(GradientAccumulationScheduler))):
        raise UserError(
            "GradientAccumulationScheduler changes how many updates an epoch has, and durations and schedules count"
            " them: accumulate by one number"
        )
    batches = trainer.num_training_batches
    return math.inf if math.isinf(batches) else epochs * math.ceil(batches / trainer.accumulate_grad_batches)


def total_updates(trainer: pl.Trainer) -> int | float:
    """Return the number of updates after which the run will end; infinite if nothing ends it.

    Respects accumulation, `limit_train_batches`, `max_epochs` and `max_steps`, and is cheap enough for every step. The
    training loader must exist, as from `on_train_start` on. `max_steps` counts the steps of all optimizers, so with
    several of them it is divided by their number.

    Raises:
        RuntimeError: the training loader is not built yet.
        UserError: Lightning's `GradientAccumulationScheduler` changes the number.
    """
    steps = trainer.max_steps
    max_steps = math.inf if steps == -1 else -(-steps // max(1, len(trainer.optimizers)))
    epochs = trainer.max_epochs
    if epochs is None or epochs == -1:
        return max_steps
    return min(max_steps, _updates_of_epochs(trainer, epochs))


def _trained_batches(trainer: pl.Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(progress.processed)


def updates_made(trainer: pl.Trainer) -> int:
    """Return the number of updates so far, in which all callbacks count; for the hooks around a training batch.

    Lightning's `global_step` adds the steps of all optimizers. Under manual optimization only the module knows when
    they step, so each trained batch counts as an update.
    """
    # `UpdateLoop` knows the number without asking the module; several callbacks ask for it in each update.
    made: int | None = getattr(trainer.fit_loop.epoch_loop, "updates_made", None)
    if made is None:
        automatic = trainer.lightning_module.automatic_optimization
        made = trainer.global_step if automatic else _trained_batches(trainer)
    return made


def may_hold_gradients(trainer: pl.Trainer) -> bool:
    """Whether a module that optimizes manually may hold accumulated gradients, which no checkpoint saves.

    It holds none if each optimizer steps once per batch, or if no parameter has a gradient, as after ``zero_grad()``.
    """
    module = trainer.lightning_module
    if module.automatic_optimization:
        return False
    if trainer.global_step == _trained_batches(trainer) * len(trainer.optimizers):
        return False
    return any(parameter.grad is not None for parameter in module.parameters())


def duration_to_updates(duration: Duration, trainer: pl.Trainer) -> int:
    """Convert a duration from the run's start to updates; works from `on_train_start` on.

    Raises:
        UserError: the duration is in epochs of a loader without length, or in per cent of a run without end.
    """
    if duration.unit == "steps":
        return int(duration.value)
    if duration.unit == "%":
        return duration.to_steps(math.inf, total_updates(trainer))
    return duration.to_steps(_updates_of_epochs(trainer, 1), math.inf)


def flattened(loaders: Any) -> list[Any]:
    """Return the loaders of a collection as a list; a single loader as a list of one."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether a device computes several micro-batches per update of an `UpdateLoop`; works from `on_train_start` on."""
    return any(loader.has_several for loader in flattened(trainer.train_dataloader))
