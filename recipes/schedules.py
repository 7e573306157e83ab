"""Learning-rate schedules in closed form: pure functions of how far a run is, so that no resume or split shifts them.

`ReduceLROnPlateau`, which follows a score, is the one that has a state.
"""

import difflib
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.hooks import attached_trainer, callbacks_of
from callbacks.lib.updates import duration_to_updates, total_updates
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import UserError
from datamodules.ranges import NATURAL, Range, check_ranges

__all__ = [
    "CheckSchedule",
    "Plateau",
    "Schedule",
    "ScheduleName",
    "ScheduleSettings",
    "build_schedule",
    "constant",
    "cosine",
    "inverse_sqrt",
    "linear",
    "multistep",
    "one_cycle",
]

log = logging.getLogger("lightning_recipes")

ScheduleName = Literal["one_cycle", "constant", "linear", "cosine", "multistep", "inverse_sqrt", "plateau"]

_ENDS_AT_0 = ("one_cycle", "linear", "cosine")
_TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ENDS_AT_0, ("min_lr",)),
    "constant": (),
    "multistep": ("milestones", "gamma", "min_lr"),
    "inverse_sqrt": ("milestones", "min_lr"),
    "plateau": ("gamma", "patience", "min_lr"),
}
"""The arguments of each schedule."""


def one_cycle(progress: float, rise: float = 0.25, start: float = 0.04) -> float:
    """Linear rise from `start` to 1 over the share `rise` of the run, then linear to 0 (Smith and Topin, 2018).

    Example:
        >>> [one_cycle(progress) for progress in (0, 0.25, 1)]
        [0.04, 1.0, 0.0]
    """
    if progress < rise:
        return start + (1 - start) * progress / rise
    return (1 - progress) / (1 - rise)


def constant(progress: float) -> float:
    """Always 1.

    Example:
        >>> [constant(progress) for progress in (0, 0.5, 1)]
        [1.0, 1.0, 1.0]
    """
    return 1.0


def linear(progress: float) -> float:
    """A straight line from 1 to 0.

    Example:
        >>> [linear(progress) for progress in (0, 0.25, 1)]
        [1, 0.75, 0]
    """
    return 1 - progress


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017).

    Example:
        >>> [round(cosine(progress), 3) for progress in (0, 0.25, 0.5, 1)]
        [1.0, 0.854, 0.5, 0.0]
    """
    return (1 + math.cos(math.pi * progress)) / 2


def multistep(update: float, milestones: Sequence[float], gamma: float = 0.1) -> float:
    """A factor of `gamma` from each milestone on.

    Example:
        >>> [multistep(update, [100, 200], gamma=0.5) for update in (99, 100, 199, 200)]
        [1.0, 0.5, 0.5, 0.25]
    """
    return float(gamma ** bisect_right(sorted(milestones), update))


def inverse_sqrt(update: float, start: float) -> float:
    """1 up to the update `start`, then falling with the square root of the updates made (Raffel et al., 2020).

    With a linear warm-up to `start` it is the schedule of the Transformer (Vaswani et al., 2017).

    Example:
        >>> [inverse_sqrt(update, start=100) for update in (0, 100, 400, 10_000)]
        [1.0, 1.0, 0.5, 0.1]
    """
    return 1.0 if update <= start else math.sqrt(start / update)


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
        for name in self.arguments:
            if name not in taken:
                close = difflib.get_close_matches(name, taken, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UserError(
                    f"`schedule_args`: {self.schedule} has no {name}{hint}; it takes {', '.join(taken) or 'none'}"
                )
        numbers = {name: value for name, value in self.arguments.items() if name != "milestones"}
        if wrong := [name for name, value in numbers.items() if type(value) not in (int, float)]:
            raise UserError(f"`schedule_args`: {wrong[0]}={numbers[wrong[0]]!r} is not a number")
        ranges = {"gamma": Range(0, 1, above=True, below=True), "min_lr": Range(0, self.lr), "patience": NATURAL}
        check_ranges(**{name: (value, ranges[name]) for name, value in numbers.items()})
        if len(self.times) > 1 and self.schedule != "multistep":
            raise UserError(
                f"milestones={self.arguments['milestones']!r}: schedule={self.schedule!r} has one, where it begins to"
                " fall"
            )

    @cached_property
    def times(self) -> list[Duration]:
        """The milestones that were given, or the schedule's own."""
        milestones = self.arguments.get("milestones")
        if milestones is None:
            # Of residual networks on CIFAR (He et al., 2016).
            return [Duration(50, "%"), Duration(75, "%")] if self.schedule == "multistep" else []
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

    @property
    def floor(self) -> float:
        """The lowest factor on the learning rates."""
        return float(self.arguments.get("min_lr", 0.0)) / self.lr

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
            factor = multistep(update, self.milestones_in(trainer), self.arguments.get("gamma", 0.1))
        elif self.schedule == "inverse_sqrt":
            factor = inverse_sqrt(update, self.milestones_in(trainer)[0])
        else:
            total = total_updates(trainer)
            factor = 1.0 if math.isinf(total) else self._curve(min(1.0, update / max(1.0, total)))
        return self.floored(factor)

    @property
    def _curve(self) -> Callable[[float], float]:
        curves: dict[str, Callable[[float], float]]
        curves = {"one_cycle": one_cycle, "linear": linear, "cosine": cosine}
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
        if math.isinf(total) and self.schedule in _ENDS_AT_0:
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


def _settings_of(recipe: Any) -> ScheduleSettings:
    options = recipe.hparams
    return ScheduleSettings(options.schedule, options.lr, options.schedule_args or {})


def build_schedule(optimizer: Optimizer, recipe: Any) -> OptimizerLRScheduler:
    """What `configure_optimizers` returns: an optimiser with the ``schedule`` of a recipe's parameters.

    Args:
        recipe: its ``hparams`` are those of `Recipe`; the plateau follows its ``monitor``.
    """
    settings = _settings_of(recipe)
    if settings.schedule == "plateau":
        plateau = Plateau(optimizer, settings, recipe.monitor_mode)
        every = getattr(attached_trainer(recipe), "check_val_every_n_epoch", None) or 1
        config: Any = {"scheduler": plateau, "monitor": recipe.monitor, "frequency": every}
        return {"optimizer": optimizer, "lr_scheduler": config}
    # The length of the run is not known before its first update.
    closed = Schedule(optimizer, lambda done: settings.factor(done, recipe.trainer) if done else settings.first)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": closed, "interval": "step"}}


class CheckSchedule(pl.Callback):
    """Logs what somebody may not expect of a recipe's schedule in this run.

    Runs on: `on_train_start`.

    Raises:
        UserError: the schedule follows a score, and nothing is validated.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        settings = _settings_of(pl_module)
        followed = pl_module.monitor if settings.schedule == "plateau" else ""
        if followed.startswith("val/") and not trainer.enable_validation:
            raise UserError(
                f"schedule='plateau' follows {followed}, and this run validates nothing; pass another schedule"
            )
        if note := settings.note(trainer):
            rank_zero_only(log.warning)(note)
