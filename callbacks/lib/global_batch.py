"""The number of samples that one update sees: what a loader, the devices and the accumulation make of it."""

from typing import Any

import lightning.pytorch as pl

from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader

__all__ = ["global_batch_size", "loader_batch_size", "steps_for_samples"]


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
