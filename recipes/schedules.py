"""Learning-rate schedules in closed form: pure functions of how far a run is, so that no resume or split shifts them.

`ReduceLROnPlateau`, which follows a score, is the one that has a state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.trainer_attributes import callbacks_of
from callbacks.lib.updates import duration_to_updates, epochs_of_updates, total_updates
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import UserError
from datamodules.ranges import NATURAL, Range, check_ranges
from recipes.curves import constant, cosine, exponential, inverse_sqrt, linear, multistep, one_cycle, polynomial, wsd

__all__ = ["Plateau", "Schedule", "ScheduleName", "ScheduleSettings"]

ScheduleName = Literal[
    "one_cycle",
    "constant",
    "linear",
    "cosine",
    "polynomial",
    "exponential",
    "multistep",
    "inverse_sqrt",
    "wsd",
    "plateau",
]


_ENDS_AT_0 = ("one_cycle", "linear", "cosine", "polynomial", "wsd")
_NEEDS: dict[str, tuple[str, ...]] = {
    "milestones": ("multistep", "inverse_sqrt", "wsd"),
    "gamma": ("multistep", "exponential", "plateau"),
    "power": ("polynomial",),
    "min_lr": tuple(name for name in get_args(ScheduleName) if name != "constant"),
    "plateau_patience": ("plateau",),
}
"""The schedules that each parameter belongs to."""


@dataclass(frozen=True)
class ScheduleSettings:
    """A schedule with its parameters, as those of `Recipe`.

    Args:
        lr: peak learning rate, of which `min_lr` is a share.

    Raises:
        UserError: there is no such schedule, or a parameter is out of its range or not one of this schedule.

    Example:
        >>> ScheduleSettings("cosine", lr=0.1, min_lr=0.01).floored(0.5)
        0.55
    """

    schedule: str
    lr: float
    milestones: int | str | None = None
    gamma: float | None = None
    power: float | None = None
    min_lr: float | None = None
    plateau_patience: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in get_args(ScheduleName):
            names = ", ".join(get_args(ScheduleName))
            raise UserError(f"no schedule {self.schedule!r}; expected one of {names}")
        for name, schedules in _NEEDS.items():
            if (value := getattr(self, name)) is not None and self.schedule not in schedules:
                instead = " or ".join(f"schedule={other!r}" for other in schedules[:3])
                raise UserError(
                    f"{name}={value!r} does not apply to schedule={self.schedule!r}; leave it out, or pass {instead}"
                )
        check_ranges(
            gamma=(self.gamma, Range(0, 1, above=True, below=True)),
            power=(self.power, Range(0, 100, above=True)),
            min_lr=(self.min_lr, Range(0, self.lr)),
            plateau_patience=(self.plateau_patience, NATURAL),
        )
        if len(self.times) > 1 and self.schedule != "multistep":
            raise UserError(
                f"milestones={self.milestones!r}: schedule={self.schedule!r} has one, where it begins to fall"
            )

    @cached_property
    def times(self) -> list[Duration]:
        """The milestones that were given, or the schedule's own."""
        if self.milestones is None:
            # Of residual networks on CIFAR (He et al., 2016).
            return {"multistep": [Duration(50, "%"), Duration(75, "%")], "wsd": [Duration(80, "%")]}.get(
                self.schedule, []
            )
        found: list[Duration] = []
        for number, text in enumerate(str(self.milestones).split(","), start=1):
            try:
                time = Duration.parse(text)
            except UserError as error:
                raise UserError(f"milestones={self.milestones!r}, number {number}: {error}") from error
            before = [other for other in found if other.unit == time.unit and other.value >= time.value]
            if before or not time.value:
                earlier = before[0] if before else "the start of the run"
                raise UserError(f"milestones={self.milestones!r}, number {number}: {time} is not after {earlier}")
            found.append(time)
        return found

    @property
    def floor(self) -> float:
        """The lowest factor on the learning rates."""
        return (self.min_lr or 0.0) / self.lr

    def floored(self, factor: float) -> float:
        """A factor between the floor and 1: what falls to 0 falls to the floor, and the others stop there."""
        if self.schedule in _ENDS_AT_0:
            return self.floor + (1 - self.floor) * factor
        return max(self.floor, factor)

    @property
    def first(self) -> float:
        """The factor at the first update, which needs no Trainer."""
        return self.floored(one_cycle(0.0) if self.schedule == "one_cycle" else 1.0)

    def factor(self, update: int, trainer: pl.Trainer) -> float:
        """The factor on the learning rates at the update that follows `update` others; 1 where it needs an end.

        Args:
            trainer: one that trains: the length of the run is not known before.
        """
        if self.schedule == "multistep":
            factor = multistep(update, self.milestones_in(trainer), self.gamma or 0.1)
        elif self.schedule == "inverse_sqrt":
            factor = inverse_sqrt(update, self.milestones_in(trainer)[0])
        elif self.schedule == "exponential" and self.gamma is not None:
            factor = exponential(epochs_of_updates(update, trainer), self.gamma)
        else:
            total = total_updates(trainer)
            factor = 1.0 if math.isinf(total) else self._curve(trainer)(min(1.0, update / max(1.0, total)))
        return self.floored(factor)

    def _curve(self, trainer: pl.Trainer) -> Callable[[float], float]:
        if self.schedule == "wsd":
            (time,) = self.times
            share = (
                time.value / 100 if time.unit == "%" else duration_to_updates(time, trainer) / total_updates(trainer)
            )
            return partial(wsd, start=share)
        if self.schedule == "polynomial":
            return partial(polynomial, power=self.power or 0.9)
        curves: dict[str, Callable[[float], float]]
        curves = {"one_cycle": one_cycle, "linear": linear, "cosine": cosine, "exponential": exponential}
        return curves.get(self.schedule, constant)

    def milestones_in(self, trainer: pl.Trainer) -> list[int]:
        """The milestones in updates; that of inverse_sqrt is by default the length of the warm-up, or 10,000 as in T5.

        Raises:
            UserError: one is in epochs of a loader without length, or in per cent of a run without end.
        """
        times = self.times
        if not times and self.schedule == "inverse_sqrt":
            warmups = [each.duration for each in callbacks_of(trainer) if isinstance(each, WarmupLR)]
            times = [next((time for time in warmups if time.value), Duration(10_000, "steps"))]
        return [duration_to_updates(time, trainer) for time in times]

    def note(self, trainer: pl.Trainer) -> str:
        """What somebody may not expect of this schedule in this run; empty where there is nothing.

        Raises:
            UserError: as `milestones_in` does.
        """
        total = total_updates(trainer)
        leads_to_end = self.schedule in _ENDS_AT_0 or (self.schedule == "exponential" and self.gamma is None)
        if math.isinf(total) and leads_to_end:
            return f"the run has no end, so schedule={self.schedule!r} stays at its peak"
        late = [time for time in self.milestones_in(trainer) if time >= total]
        if not late:
            return ""
        return f"the run ends after {total:,} updates, before {len(late)} of the `milestones` (update {late[0]:,})"


class Schedule(LambdaLR):
    """A learning rate in closed form: a checkpoint restores the number of updates, and nothing else."""

    _stale = False

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)
        optimizer.register_step_pre_hook(self._refresh)

    @override
    def step(self, epoch: int | None = None) -> None:
        """The same as LambdaLR's, where rates are plain numbers, in a fifth of its time: it runs at every update."""
        groups = self.optimizer.param_groups
        if epoch is not None or self._step_count < 2 or any(isinstance(group["lr"], Tensor) for group in groups):
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        factor = self.lr_lambdas[0](self.last_epoch)  # All groups have the same.
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        self._last_lr = [group["lr"] for group in groups]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        # The length of the run is not known yet, so the rate has to wait for the first update.
        self._stale = True

    def _refresh(self, *_: Any) -> None:
        if self._stale:
            for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas):
                group["lr"] = base * factor(self.last_epoch)
            self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
            self._stale = False


class Plateau(ReduceLROnPlateau):
    """torch's, whose checkpoint restores the rates, too: the optimiser's restores its moments only.

    Args:
        settings: the factor is their `gamma`, 0.1 by default, after more validations than `plateau_patience`, 2 by
            default, in succession that were not better than the best by a ten-thousandth of it.
        mode: "min" where less is better, else "max".
    """

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings, mode: Literal["min", "max"]) -> None:
        patience = 2 if settings.plateau_patience is None else settings.plateau_patience
        lowest = [settings.floor * group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, mode, settings.gamma or 0.1, patience, min_lr=lowest)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("best", "num_bad_epochs", "last_epoch", "cooldown_counter"):
            setattr(self, name, state_dict[name])
        for group, rate in zip(self.optimizer.param_groups, state_dict["_last_lr"], strict=True):
            group["lr"] = float(rate)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
