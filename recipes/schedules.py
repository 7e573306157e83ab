"""Learning-rate schedules in closed form: pure functions of how far a run is, so that no resume or split shifts them.

`ReduceLROnPlateau`, which follows a score, is the one that has a state.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.hooks import attached_trainer
from callbacks.lib.rates import UpdateSchedule
from callbacks.lib.updates import duration_to_updates, total_updates
from datamodules.errors import UserError
from datamodules.ranges import NATURAL, Range, check_ranges

ScheduleName = Literal["one_cycle", "constant", "linear", "cosine", "multistep", "plateau"]

ENDS_AT_0 = ("one_cycle", "linear", "cosine")
_TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ENDS_AT_0, ("min_lr",)),
    "constant": (),
    "multistep": ("milestones", "gamma", "min_lr"),
    "plateau": ("gamma", "patience", "min_lr"),
}
"""The arguments of each schedule."""


def curve(schedule: str, progress: float) -> float:
    """The factor on the learning rate after a share of the run.

    "one_cycle" rises in a straight line from 0.04 to 1 in a quarter of the run, and falls to 0 (Smith and Topin, 2018);
    "linear" is a straight line from 1 to 0, "cosine" half a cosine (Loshchilov and Hutter, 2017); the others are 1.

    Example:
        >>> {name: [round(curve(name, x), 2) for x in (0, 0.25, 1)] for name in ("one_cycle", "linear", "cosine")}
        {'one_cycle': [0.04, 1.0, 0.0], 'linear': [1, 0.75, 0], 'cosine': [1.0, 0.85, 0.0]}
    """
    match schedule:
        case "one_cycle":
            return 0.04 + (1 - 0.04) * progress / 0.25 if progress < 0.25 else (1 - progress) / (1 - 0.25)
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
    return 1.0


@dataclass(frozen=True)
class ScheduleSettings:
    """A schedule with its parameters, as those of `Recipe`.

    Args:
        lr: peak learning rate, of which the argument `min_lr` is a share.
        arguments: further ones by name, as `Recipe` has them in ``schedule_args``.

    Raises:
        UserError: there is no such schedule, or an argument is out of its range or not one of this schedule.

    Example:
        >>> ScheduleSettings("cosine", lr=0.1, arguments={"min_lr": 0.01}).floored(0.5)
        0.55
    """

    schedule: str
    lr: float
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule not in get_args(ScheduleName):
            names = ", ".join(get_args(ScheduleName))
            raise UserError(f"no schedule {self.schedule!r}; expected one of {names}")
        taken = _TAKES[self.schedule]
        if unknown := [name for name in self.arguments if name not in taken]:
            raise UserError(
                f"`schedule_args`: {self.schedule} has no {unknown[0]}; it takes {', '.join(taken) or 'none'}"
            )
        ranges = {"gamma": Range(0, 1, above=True, below=True), "min_lr": Range(0, self.lr), "patience": NATURAL}
        check_ranges(**{name: (self.arguments[name], ranges[name]) for name in ranges if name in self.arguments})
        self.milestones  # noqa: B018  Refused here, not when training begins.

    @cached_property
    def milestones(self) -> list[Duration]:
        """Those that were given, or of "multistep" at 50 and 75 %, as He et al. (2016) have them on CIFAR."""
        milestones = self.arguments.get("milestones", ["50%", "75%"] if self.schedule == "multistep" else [])
        found: list[Duration] = []
        texts = milestones if isinstance(milestones, list) else str(milestones).split(",")
        for number, text in enumerate(texts, start=1):
            try:
                time = Duration.parse(text)
            except UserError as error:
                raise UserError(f"milestones={milestones!r}, number {number}: {error}") from error
            before = [other for other in found if other.unit == time.unit and other.value >= time.value]
            if before or not time.value:
                earlier = before[0] if before else "the start of the run"
                raise UserError(f"milestones={milestones!r}, number {number}: {time} is not after {earlier}")
            found.append(time)
        return found

    @cached_property
    def floor(self) -> float:
        """The lowest factor on the learning rates."""
        return float(self.arguments.get("min_lr", 0.0)) / self.lr

    def floored(self, factor: float) -> float:
        """A factor between the floor and 1: what falls to 0 falls to the floor, and the others stop there."""
        if self.schedule in ENDS_AT_0:
            return self.floor + (1 - self.floor) * factor
        return max(self.floor, factor)

    def factor(self, update: int, trainer: pl.Trainer) -> float:
        """The factor on the learning rates at the update that follows `update` others; 1 where it needs an end.

        Args:
            trainer: one that trains: the length of the run is not known before.

        Raises:
            UserError: a milestone is in epochs of a loader without length, or in per cent of a run without end.
        """
        if self.schedule == "multistep":
            updates = sorted(duration_to_updates(time, trainer) for time in self.milestones)
            return self.floored(float(self.arguments.get("gamma", 0.1) ** bisect_right(updates, update)))
        total = total_updates(trainer)
        return self.floored(1.0 if math.isinf(total) else curve(self.schedule, min(1.0, update / max(1.0, total))))


class Plateau(ReduceLROnPlateau):
    """torch's, whose checkpoint restores the rates, too: the optimiser's restores its moments only.

    Args:
        settings: the factor is their `gamma`, 0.1 by default, after more validations than `patience`, 2 by
            default, in succession that were not better than the best by a ten-thousandth of it.
        mode: "min" where less is better, else "max".
    """

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings, mode: Literal["min", "max"]) -> None:
        gamma, patience = settings.arguments.get("gamma", 0.1), settings.arguments.get("patience", 2)
        lowest = [settings.floor * group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, mode, gamma, patience, min_lr=lowest)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("best", "num_bad_epochs", "last_epoch", "cooldown_counter"):
            setattr(self, name, state_dict[name])
        for group, rate in zip(self.optimizer.param_groups, state_dict["_last_lr"], strict=True):
            group["lr"] = float(rate)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def settings_of(recipe: Any) -> ScheduleSettings:
    options = recipe.hparams
    return ScheduleSettings(options.schedule, options.lr, options.schedule_args or {})


def build_schedule(optimizer: Optimizer, recipe: Any) -> OptimizerLRScheduler:
    """What `configure_optimizers` returns: an optimiser with the ``schedule`` of a recipe's parameters.

    Args:
        recipe: its ``hparams`` are those of `Recipe`; the plateau follows its ``monitor``.
    """
    settings = settings_of(recipe)
    if settings.schedule == "plateau":
        plateau = Plateau(optimizer, settings, recipe.monitor_mode)
        every = getattr(attached_trainer(recipe), "check_val_every_n_epoch", None) or 1
        config: Any = {"scheduler": plateau, "monitor": recipe.monitor, "frequency": every}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def factor(update: int) -> float:
        if update == 0:
            # The length of the run is not known yet, and its first update has the same factor in a run of any length.
            return settings.floored(curve(settings.schedule, 0.0))
        return settings.factor(update, recipe.trainer)

    schedule = UpdateSchedule(optimizer, recipe, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
