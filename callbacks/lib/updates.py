"""How many updates a run makes, exact under a schedule of accumulation factors and safe to ask for, and their samples.

``trainer.estimated_stepping_batches`` ignores such a schedule, and reading it before training builds the loaders too
early, which drops the position of a resumed one (Lightning #20550). The functions here read, and change nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from callbacks.lib.durations import Duration
from callbacks.lib.hooks import callbacks_of
from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader


@dataclass(frozen=True)
class AccumulationSchedule:
    """Micro-batches per update, as a pure function of the epoch.

    Args:
        entries: the epoch in which a factor begins, and the factor. The last entry whose time has come counts, in the
            order written.
    """

    entries: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, steps: int | Mapping[Any, int]) -> "AccumulationSchedule":
        """Read one factor, or factors by the moment when they begin; before the first of them it is 1.

        Raises:
            UserError: a factor is not an int above 0, or a moment is not an integral number of epochs.

        Example:
            >>> schedule = AccumulationSchedule.parse({0: 8, "2 epochs": 4})
            >>> [schedule.wanted(epoch) for epoch in range(4)]
            [8, 8, 4, 4]
        """
        entries = []
        for key, factor in (steps if isinstance(steps, Mapping) else {0: steps}).items():
            start = Duration.parse(key)
            if type(factor) is not int or factor < 1:
                raise UserError(
                    f"`steps`: cannot accumulate over {factor!r} micro-batches from {start} on: write an int above 0"
                )
            if (start.unit != "epochs" and start.value) or start.value != int(start.value):
                raise UserError(f'`steps`: accumulation cannot change at "{start}": write whole epochs, as "2 epochs"')
            entries.append((int(start.value), factor))
        if all(start for start, _ in entries):
            entries.insert(0, (0, 1))
        return cls(tuple(entries))

    def map(self, function: Callable[[int], int]) -> "AccumulationSchedule":
        """The same epochs with other factors."""
        return AccumulationSchedule(tuple((start, function(factor)) for start, factor in self.entries))

    def wanted(self, epoch: int) -> int:
        """The factor of an epoch."""
        return next(factor for start, factor in reversed(self.entries) if epoch >= start)


@lru_cache(maxsize=64)
def count_updates(schedule: AccumulationSchedule, batches: int, epochs: int) -> int:
    """Updates of the first `epochs` epochs of `batches` micro-batches each; the last window of each may be short.

    Example:
        >>> count_updates(AccumulationSchedule.parse({0: 4, "2 epochs": 1}), batches=10, epochs=3)
        16
    """
    last = min(epochs, max(start for start, _ in schedule.entries))
    rest = math.ceil(batches / schedule.wanted(epochs)) * (epochs - last)
    return rest + sum(math.ceil(batches / schedule.wanted(epoch)) for epoch in range(last))


def _schedule(trainer: pl.Trainer) -> AccumulationSchedule:
    """The accumulation of a run: our callback's, Lightning's callback's, or the Trainer's own factor."""
    for callback in callbacks_of(trainer):
        # Not a protocol and isinstance, which takes 10 microseconds a callback: schedules ask in every step.
        schedule: Callable[[pl.Trainer], AccumulationSchedule] | None = getattr(callback, "accumulation_schedule", None)
        if schedule:
            return schedule(trainer)
        if isinstance(callback, GradientAccumulationScheduler):
            factors = {f"{epoch} epochs": callback.scheduling[epoch] for epoch in callback.epochs}
            return AccumulationSchedule.parse(factors)
    return AccumulationSchedule.parse(trainer.accumulate_grad_batches)


def _updates_of_epochs(trainer: pl.Trainer, epochs: float) -> float:
    """Updates of the first `epochs` epochs (a fraction counts from its epoch's start), not looking at `max_steps`."""
    if trainer.train_dataloader is None:
        raise RuntimeError(
            "the number of updates was asked for before the training loader exists: ask in training, that is from"
            " `on_train_start` on, or from the function of a LambdaLR once its step is above 0"
        )
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return math.inf
    schedule, whole = _schedule(trainer), int(epochs)
    before = count_updates(schedule, int(batches), whole)
    if whole == epochs:
        return before
    return before + (epochs - whole) * (count_updates(schedule, int(batches), whole + 1) - before)


def total_updates(trainer: pl.Trainer) -> int | float:
    """The number of optimiser steps at which the run will end; infinite where nothing ends it.

    Respects the schedule of accumulation, `limit_train_batches`, `max_epochs` and `max_steps`. Cheap enough for every
    step; works from the moment the training loader is built, that is from `on_train_start` on. The unit is that of
    `updates_made`: `max_steps`, too, adds up the steps of several optimisers.

    Raises:
        RuntimeError: the training loader is not built yet.
    """
    max_steps = math.inf if trainer.max_steps == -1 else -(-trainer.max_steps // max(1, len(trainer.optimizers)))
    if trainer.max_epochs in (None, -1):
        return max_steps
    return min(max_steps, _updates_of_epochs(trainer, trainer.max_epochs))


def _trained_batches(trainer: pl.Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(progress.processed)


def updates_made(trainer: pl.Trainer, duration: Duration | None = None) -> int:
    """The updates so far, in which all callbacks count; for the hooks of training around a batch.

    Lightning's `global_step` adds up the steps of all optimisers. Where a module optimises by hand it alone knows when
    they step, and the updates are the batches that were trained.

    Args:
        duration: what the number is compared with.

    Raises:
        UserError: the duration depends on a number of steps, its own or `max_steps`, and a module that optimises by
            hand has not made one of each optimiser in each batch.
    """
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    batches, optimizers = _trained_batches(trainer), len(trainer.optimizers)
    unit = duration.unit if duration is not None and duration.value else None
    in_steps = unit == "steps" or (unit == "%" and trainer.max_steps != -1)
    if in_steps and trainer.global_step != batches * optimizers:
        raise UserError(
            f'"{duration}" depends on a number of steps, and {type(trainer.lightning_module).__name__}, which optimises'
            f" manually, made {trainer.global_step:,} steps of {optimizers} optimisers in {batches:,} batches, expected"
            ' one of each in each batch: write "2 epochs", or "50%" with max_epochs and without max_steps'
        )
    return batches


def may_hold_gradients(trainer: pl.Trainer) -> bool:
    """Whether gradients that a module accumulates by hand may wait for a step, which no checkpoint holds.

    None do where each optimiser steps once in each batch, or no parameter has a gradient, as after ``zero_grad()``.
    """
    module = trainer.lightning_module
    if module.automatic_optimization:
        return False
    if trainer.global_step == _trained_batches(trainer) * len(trainer.optimizers):
        return False
    return any(parameter.grad is not None for parameter in module.parameters())


def duration_to_updates(duration: Duration, trainer: pl.Trainer) -> int:
    """A duration counted from the run's start, in updates; works from `on_train_start` on.

    Raises:
        UserError: the duration is in epochs of a loader without length, or in per cent of a run without end.
    """
    if duration.unit == "steps":
        return int(duration.value)
    if duration.unit == "%":
        return duration.to_steps(math.inf, total_updates(trainer))
    updates = _updates_of_epochs(trainer, duration.value)
    return duration.to_steps(updates / duration.value if duration.value else 0, math.inf)


def loader_batch_size(loader: Any) -> int:
    """Samples that a loader puts into one batch.

    Raises:
        UserError: the loader does not say.
    """
    for source in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(source, "batch_size", None), int):
            return size
    raise UserError(
        f"cannot tell the batch size of the training loader, a {type(loader).__name__}, which `global_batch_size`"
        " needs: give it an attribute `batch_size`"
    )


def global_batch_size(trainer: pl.Trainer) -> int:
    """Samples per update at present; works from `on_train_start` on."""
    loader = trainer.train_dataloader
    if isinstance(loader, ResumableLoader):
        return loader.samples_per_update
    return loader_batch_size(loader) * trainer.world_size * trainer.accumulate_grad_batches
