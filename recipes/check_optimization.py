"""Check of a recipe's optimizer and schedule at the start of training, against its settings and the run.

Tested in `tests/recipes/test_schedules.py`.
"""

import math
from typing import Any

from typing_extensions import override

from callbacks.lib.optimizers import schedule_of
from callbacks.lib.updates import total_updates
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import warn
from recipes.optim import optimizer_class
from recipes.schedules import ENDS_AT_0, settings_of


class CheckOptimization(pl.Callback):
    """Callback that checks a recipe's optimizer and schedule, and sets the rates of the first update.

    It is not a hook of the recipe: a subclass that overrides the hook without super() would skip the checks silently.

    Runs on: `on_train_start`.

    Raises:
        UserError: the schedule follows a score, and the run does not validate, or validates by time; or the milestones
            do not suit the run.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        reject_plateau_by_time(trainer)
        _check_optimizer(trainer, pl_module)
        _check_schedule(trainer, pl_module)
        for optimizer in trainer.optimizers:
            schedule = schedule_of(optimizer, trainer)
            if schedule:
                schedule.read_length(trainer)


def reject_plateau_by_time(trainer: pl.Trainer) -> None:
    """Reject a schedule that follows the score of each epoch in a run that validates by time.

    Raises:
        UserError: ``val_check_interval`` is a time, so ReduceLROnPlateau would step on a score that is not new.
    """
    # Lightning sets this attribute only if the interval is not a time.
    validates_by_time = getattr(trainer, "val_check_interval", None) is None
    if validates_by_time and any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise UserError(
            f"{spelled('schedule', 'plateau')} follows the score of each epoch, and {spelled('val_check_interval')} is"
            " a time; pass a number of updates or a share of an epoch"
        )


def _check_optimizer(trainer: pl.Trainer, recipe: Any) -> None:
    """Warn if `configure_optimizers` has built an optimizer that differs from the settings, or no schedule."""
    if not trainer.optimizers:
        return
    name = recipe.hparams.optimizer
    built = type(trainer.optimizers[0])
    if not issubclass(built, optimizer_class(name)):
        is_torchs = built.__module__.startswith("torch.optim")
        path = built.__name__.lower() if is_torchs else f"{built.__module__}.{built.__name__}"
        warn(
            f"note: configure_optimizers() built {built.__name__}, and {spelled('optimizer', name)} is saved with the"
            " run and scales the learning rate; call build_optimizer(parameters, self), or pass"
            f" {spelled('optimizer', path)}"
        )
    elif not trainer.lr_scheduler_configs:
        warn(
            f"note: configure_optimizers() built no schedule, and {spelled('schedule', recipe.hparams.schedule)} is"
            " saved with the run; return build_schedule(optimizer, self)"
        )


def _check_schedule(trainer: pl.Trainer, recipe: Any) -> None:
    """Reject a schedule that the run cannot follow, and warn if it needs the end of a run that has none."""
    settings = settings_of(recipe)
    followed = recipe.monitor if settings.schedule == "plateau" else ""
    if followed.startswith("val/") and not trainer.enable_validation:
        raise UserError(
            f"{spelled('schedule', 'plateau')} follows {followed}, and this run validates nothing; pass another"
            " schedule"
        )
    settings.plan(trainer)
    if math.isinf(total_updates(trainer)) and settings.schedule in ENDS_AT_0:
        warn(f"the run has no end, so {spelled('schedule', settings.schedule)} stays at its peak")
