"""Counts of a run: its updates, those made so far, and the samples per update.

``trainer.estimated_stepping_batches`` builds the loaders as a side effect. These functions change nothing.
"""

import math
from itertools import repeat
from typing import Any

from callbacks.lib.durations import Duration
from callbacks.lib.lightning_internals import callbacks_of
from datamodules.errors import UserError
from datamodules.lightning import CombinedLoader, GradientAccumulationScheduler, pl


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
    automatic = trainer.lightning_module.automatic_optimization
    return trainer.global_step if automatic else _trained_batches(trainer)


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
