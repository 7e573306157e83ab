"""Learning-rate schedules as pure functions of a run's progress: a resumed or split run has the same rates.

Only `ReduceLROnPlateau` has a state, because it follows a score.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from callbacks.lib.lightning_internals import attached_trainer
from callbacks.lib.optimizers import UpdateSchedule
from callbacks.lib.updates import Duration, duration_to_updates, total_updates
from datamodules.errors import UserError, spelled
from datamodules.lightning import OptimizerLRScheduler, pl
from datamodules.ranges import NATURAL, Range, check_ranges

ScheduleName = Literal["one_cycle", "constant", "linear", "cosine", "exponential", "multistep", "plateau"]

ENDS_AT_0 = ("one_cycle", "linear", "cosine")
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ENDS_AT_0, ("min_lr",)),
    "constant": (),
    "exponential": ("gamma", "milestones", "milestone_gamma", "min_lr"),
    "multistep": ("milestones", "gamma", "min_lr"),
    "plateau": ("gamma", "patience", "min_lr"),
}
"""The arguments of each schedule."""

_EACH_EPOCH = Duration(1, "epochs")


def curve(schedule: str, progress: float) -> float:
    """Return the factor on the learning rate at a progress from 0 to 1.

    "one_cycle" rises linearly from 0.04 to 1 in a quarter of the run, then falls linearly to 0 (Smith and Topin, 2018).
    "linear" falls from 1 to 0, "cosine" is half a cosine (Loshchilov and Hutter, 2017), and other schedules return 1.

    Example:
        >>> {name: [round(curve(name, x), 2) for x in (0, 0.25, 1)] for name in ("one_cycle", "linear", "cosine")}
        {'one_cycle': [0.04, 1.0, 0.0], 'linear': [1, 0.75, 0], 'cosine': [1.0, 0.85, 0.0]}
    """
    match schedule:
        case "one_cycle":
            if progress < 0.25:
                return 0.04 + (1 - 0.04) * progress / 0.25
            return (1 - progress) / (1 - 0.25)
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
    return 1.0


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of a schedule: its name, the peak rate and its arguments.

    Args:
        schedule: name of the schedule.
        lr: peak learning rate; the argument `min_lr` divided by it is the lowest factor.
        arguments: arguments by name, as in ``schedule_args`` of `Recipe`.

    Raises:
        UserError: there is no such schedule, an argument is out of its range, or the schedule has no such argument.

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
        accepted = _ARGUMENTS[self.schedule]
        unknown = [name for name in self.arguments if name not in accepted]
        if unknown:
            problem = f"{self.schedule} has no {unknown[0]}; it takes {', '.join(accepted) or 'none'}"
            raise UserError(problem, setting="schedule_args")
        factors = Range(0, 1, above=True, below=True)
        ranges = {"gamma": factors, "milestone_gamma": factors, "min_lr": Range(0, self.lr), "patience": NATURAL}
        check_ranges(**{name: (self.arguments[name], ranges[name]) for name in ranges if name in self.arguments})
        self.milestones  # noqa: B018 - parsed here, so that wrong milestones are rejected before training

    @cached_property
    def milestones(self) -> list[Duration]:
        """The given milestones; "multistep" has the defaults 50 and 75 % (He et al., 2016, on CIFAR)."""
        milestones = self.arguments.get("milestones", ["50%", "75%"] if self.schedule == "multistep" else [])
        durations: list[Duration] = []
        texts = milestones if isinstance(milestones, list) else str(milestones).split(",")
        for number, milestone in enumerate(texts, start=1):
            try:
                time = Duration.parse(milestone)
            except UserError as error:
                raise UserError(f"{spelled('milestones', milestones)}, number {number}: {error}") from error
            same_unit = [duration for duration in durations if duration.unit == time.unit]
            not_before = [duration for duration in same_unit if duration.value >= time.value]
            if not_before or not time.value:
                earlier = not_before[0] if not_before else "the start of the run"
                raise UserError(f"{spelled('milestones', milestones)}, number {number}: {time} is not after {earlier}")
            durations.append(time)
        return durations

    @cached_property
    def floor(self) -> float:
        """The lowest factor on the learning rates."""
        return float(self.arguments.get("min_lr", 0.0)) / self.lr

    def floored(self, factor: float) -> float:
        """Return a factor between the floor and 1: curves that end at 0 end at the floor, other curves stop at it."""
        if self.schedule in ENDS_AT_0:
            return self.floor + (1 - self.floor) * factor
        return max(self.floor, factor)

    def plan(self, trainer: pl.Trainer) -> Callable[[int], float]:
        """Return the function from the number of completed updates to the learning-rate factor, in a run of this
        length.

        If the run has no end, curves that need an end return 1.

        Args:
            trainer: a Trainer that is training; the length of the run is not known earlier.

        Raises:
            UserError: a milestone in epochs without a loader of known length, or in per cent without an end of the run.
        """
        if self.schedule in ("exponential", "multistep"):
            updates = sorted(duration_to_updates(time, trainer) for time in self.milestones)
            of_epoch = duration_to_updates(_EACH_EPOCH, trainer) if self.schedule == "exponential" else 1
            return lambda update: self.floored(self._stepwise(update, updates, max(1, of_epoch)))
        total = total_updates(trainer)
        if math.isinf(total):
            return lambda _: self.floored(1.0)
        return lambda update: self.floored(curve(self.schedule, min(1.0, update / max(1.0, total))))

    def _stepwise(self, update: int, milestones: Sequence[int], of_epoch: int) -> float:
        """Return the factor of a schedule that is a product of its steps, as torch chains schedulers."""
        passed = bisect_right(milestones, update)
        if self.schedule == "multistep":
            return float(self.arguments.get("gamma", 0.1) ** passed)
        epochs = update // of_epoch
        return float(self.arguments.get("gamma", 0.95) ** epochs * self.arguments.get("milestone_gamma", 0.1) ** passed)


class Plateau(ReduceLROnPlateau):
    """torch's `ReduceLROnPlateau` that also restores the rates, because the optimizer restores only its moments.

    Args:
        optimizer: the optimizer whose rates are reduced.
        settings: `gamma` is the factor on the rates, by default 0.1. `patience` is the number of validations in
            succession without an improvement by a ten-thousandth, by default 2.
        mode: "min" if lower scores are better, else "max".
    """

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings, mode: Literal["min", "max"]) -> None:
        gamma = settings.arguments.get("gamma", 0.1)
        patience = settings.arguments.get("patience", 2)
        lowest = [settings.floor * group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, mode, gamma, patience, min_lr=lowest)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Only the state: the settings of a resumed run may have changed.
        for name in ("best", "num_bad_epochs", "last_epoch", "cooldown_counter"):
            setattr(self, name, state_dict[name])
        for group, rate in zip(self.optimizer.param_groups, state_dict["_last_lr"], strict=True):
            group["lr"] = float(rate)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def settings_of(recipe: Any) -> ScheduleSettings:
    """Return the schedule that the hyperparameters of a recipe describe."""
    options = recipe.hparams
    return ScheduleSettings(options.schedule, options.lr, options.schedule_args or {})


def build_schedule(optimizer: Optimizer, recipe: Any) -> OptimizerLRScheduler:
    """Return an optimizer with the ``schedule`` of a recipe, as `configure_optimizers` returns it.

    Args:
        optimizer: the optimizer.
        recipe: a recipe with the hyperparameters of `Recipe`; the plateau follows its ``monitor``.
    """
    settings = settings_of(recipe)
    if settings.schedule == "plateau":
        plateau = Plateau(optimizer, settings, recipe.monitor_mode)
        frequency = getattr(attached_trainer(recipe), "check_val_every_n_epoch", None) or 1
        config: Any = {"scheduler": plateau, "monitor": recipe.monitor, "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    schedule = UpdateSchedule(optimizer, recipe, settings.plan, first=settings.floored(curve(settings.schedule, 0.0)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
