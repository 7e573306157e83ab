"""How many updates a run makes, and their samples.

Unlike ``trainer.estimated_stepping_batches``, which builds the loaders, the functions here read, and change nothing.
"""

import math
from itertools import repeat
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader

from callbacks.lib.durations import Duration
from callbacks.lib.hooks import callbacks_of
from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader
from datamodules.loading.updates import GroupedUpdates


def _updates_of_epochs(trainer: pl.Trainer, epochs: int) -> float:
    """Updates of so many epochs, not looking at `max_steps`."""
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
    """The number of optimiser steps at which the run will end; infinite where nothing ends it.

    Respects accumulation, `limit_train_batches`, `max_epochs` and `max_steps`. Cheap enough for every step; works from
    the moment the training loader is built, that is from `on_train_start` on. The unit is that of `updates_made`:
    `max_steps`, too, adds up the steps of several optimisers.

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
    """The updates so far, in which all callbacks count; for the hooks of training around a batch.

    Lightning's `global_step` adds up the steps of all optimisers. Where a module optimises by hand it alone knows when
    they step, and the updates are the batches that were trained.
    """
    automatic = trainer.lightning_module.automatic_optimization
    return trainer.global_step if automatic else _trained_batches(trainer)


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
    return duration.to_steps(_updates_of_epochs(trainer, 1), math.inf)


def flattened(loaders: Any) -> list[Any]:
    """The training loaders in a collection, or the one that is none."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)


def resumable_loaders(loaders: Any) -> list[ResumableLoader[Any]]:
    """Those of a Trainer's training loaders that deal micro-batches to the ranks by their numbers."""
    return [loader for loader in flattened(loaders) if isinstance(loader, ResumableLoader)]


def loader_batch_size(loader: Any) -> int:
    """Samples that a loader puts into one batch.

    Raises:
        UserError: the loader does not say.
    """
    if isinstance(loader, GroupedUpdates):
        loader = loader.loader
    for source in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(source, "batch_size", None), int):
            return size
    raise UserError(
        f"cannot tell the batch size of the training loader, a {type(loader).__name__}, which `global_batch_size`"
        " needs: give it an attribute `batch_size`"
    )


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether a device computes several micro-batches in an update; works from `on_train_start` on."""
    loader = trainer.train_dataloader
    if isinstance(loader, ResumableLoader):
        return loader.division.micro_batches > loader.world_size
    if isinstance(loader, GroupedUpdates):
        return loader.size > 1
    return trainer.accumulate_grad_batches > 1


def global_batch_size(trainer: pl.Trainer) -> int:
    """Samples per update at present; works from `on_train_start` on."""
    loader = trainer.train_dataloader
    if isinstance(loader, ResumableLoader):
        return loader.samples_per_update
    size = loader.size if isinstance(loader, GroupedUpdates) else trainer.accumulate_grad_batches
    return loader_batch_size(loader) * trainer.world_size * size
