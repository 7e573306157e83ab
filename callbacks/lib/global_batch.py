"""The number of samples that one update sees: what a loader, the devices and the accumulation make of it."""

from typing import Any

import lightning.pytorch as pl

from datamodules.errors import UserError

__all__ = ["accumulation_factor", "global_batch_size", "loader_batch_size"]


def accumulation_factor(global_batch_size: int, batch_size: int, world_size: int) -> int:
    """Micro-batches per update, so that all devices together see `global_batch_size` samples.

    Raises:
        UserError: the global batch is no multiple of what the devices hold at once; the message names what would be.

    Example:
        >>> accumulation_factor(1024, batch_size=64, world_size=4)
        4
        >>> accumulation_factor(1000, batch_size=64, world_size=4)
        Traceback (most recent call last):
        datamodules.errors.UserError: global_batch_size=1000 is no multiple of 64 samples x 4 devices = 256: pass
        global_batch_size=768 or global_batch_size=1024, or batch_size=50
    """
    if global_batch_size < 1:
        raise UserError(f"global_batch_size={global_batch_size} leaves no sample in an update; pass 1 or more")
    at_once = batch_size * world_size
    factor, rest = divmod(global_batch_size, at_once)
    if factor and not rest:
        return factor
    sizes = " or ".join(f"global_batch_size={size}" for size in (factor * at_once, (factor + 1) * at_once) if size)
    message = (
        f"global_batch_size={global_batch_size} is no multiple of {batch_size} samples x {world_size} devices ="
        f" {at_once}: pass {sizes}"
    )
    share, uneven = divmod(global_batch_size, world_size)
    if share and not uneven:
        # One is nearer than any beyond twice the size.
        divisors = (size for size in range(1, min(share, 2 * batch_size) + 1) if share % size == 0)
        message += f", or batch_size={min(divisors, key=lambda size: abs(size - batch_size))}"
    raise UserError(message)


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
    return loader_batch_size(trainer.train_dataloader) * trainer.world_size * trainer.accumulate_grad_batches
