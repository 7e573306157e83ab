"""What accumulation of gradients asks of a Trainer, and where it stands in a run."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from callbacks.lib.hooks import callbacks_of
from callbacks.lib.updates import loader_batch_size
from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader


def check_closures(trainer: pl.Trainer, steps: int) -> None:
    """Refuses LBFGS where its closure would compute a part of the update.

    Args:
        steps: of each device in an update.

    Raises:
        UserError: there are several devices or micro-batches.
    """
    if (steps > 1 or trainer.world_size > 1) and isinstance(trainer.optimizers[0], LBFGS):
        raise UserError(describe_second_call(trainer.optimizers[0]))


def describe_second_call(optimizer: Optimizer) -> str:
    """What is wrong with an optimiser that calls its closure again on several devices or micro-batches."""
    return (
        f"{type(optimizer).__name__} calls its closure several times per update, which is exact on one device with one"
        " micro-batch per update only: pass devices=1, no accumulation and a `batch_size` that holds the whole"
        " update, or another optimiser"
    )


def check_single_accumulation(trainer: pl.Trainer, pl_module: pl.LightningModule, kinds: tuple[type, ...]) -> None:
    """Refuses a run in which something else accumulates as well.

    Args:
        kinds: the classes of callbacks that accumulate.

    Raises:
        UserError: there are several, or the module optimises manually.
    """
    if not pl_module.automatic_optimization:
        raise UserError(
            f"{type(pl_module).__name__} optimises manually, so only its training_step can accumulate: remove"
            " GradientAccumulation, or set automatic_optimization = True"
        )
    found = [type(callback).__name__ for callback in callbacks_of(trainer) if isinstance(callback, kinds)]
    if trainer.accumulate_grad_batches != 1:
        found.append(f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})")
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)} would both accumulate: keep one GradientAccumulation")


def check_strategy(trainer: pl.Trainer) -> None:
    """Refuses strategies that do not average gradients over the ranks as DDP does.

    Raises:
        UserError: it is such a strategy.
    """
    averages = isinstance(trainer.strategy.model, DistributedDataParallel) or trainer.world_size == 1
    if not averages or trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"{type(trainer.strategy).__name__} reduces gradients in its own way, which GradientAccumulation cannot"
            ' weigh: pass strategy="ddp", or remove the callback'
        )


def resumable_loaders(loaders: Any) -> list[ResumableLoader[Any]]:
    """Those of a Trainer's training loaders that deal micro-batches to the ranks by their numbers."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return [loader for loader in combined.flattened if isinstance(loader, ResumableLoader)]


def samples_per_batch(trainer: pl.Trainer, loaders: Any) -> int | None:
    """Samples that all devices process at once, of several loaders together; None where one does not say."""
    try:
        return sum(map(loader_batch_size, CombinedLoader(loaders).flattened)) * trainer.world_size
    except UserError:
        return None


def move_place_in_epoch(trainer: pl.Trainer, loader: ResumableLoader[Any]) -> None:
    """Makes the steps done in this epoch those that lie before the place from which a loader goes on.

    On other devices the same updates take other numbers of steps; and an update that was begun is made again.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    progress = batches.current
    steps = trainer.num_training_batches if batches.is_last_batch else loader.steps_done
    moved = int(steps) - progress.processed
    for counter in ("ready", "started", "processed", "completed"):
        setattr(progress, counter, getattr(progress, counter) + moved)


def ends_window(trainer: pl.Trainer) -> bool:
    """Whether the present micro-batch is the last of its update; for `on_before_backward`."""
    done = trainer.fit_loop.batch_idx + 1
    ends_epoch = done == trainer.num_training_batches or trainer.is_last_batch
    return ends_epoch or done % trainer.accumulate_grad_batches == 0


def steps_for_samples(samples: int, at_once: int, found: str) -> int:
    """The steps of each device in an update of so many samples.

    Args:
        at_once: samples that all devices process in a step.
        found: what asks for the samples, for the error.

    Raises:
        UserError: they do not divide.

    Example:
        >>> steps_for_samples(1024, at_once=256, found="global_batch_size=1024")
        4
    """
    steps, rest = divmod(samples, at_once)
    if steps and not rest:
        return steps
    sizes = " or ".join(f"{size}" for size in (steps * at_once, (steps + 1) * at_once) if size)
    raise UserError(
        f"{found}: {samples} samples of an update are no multiple of the {at_once} that all devices process at once;"
        f" expected {sizes}, or another `batch_size` of the loader"
    )
