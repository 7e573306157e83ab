"""Which micro-batch of the epoch a rank trains on in a step."""

import inspect
from typing import Any

import lightning.pytorch as pl

from datamodules.errors import UserError

__all__ = ["micro_batch_number", "refuse_dataloader_iter"]


def refuse_dataloader_iter(callback: pl.Callback, pl_module: pl.LightningModule) -> None:
    """For callbacks that depend on the number of a batch, of which Lightning's hooks then get another (#18619).

    Raises:
        UserError: the module's `training_step` reads batches by itself.
    """
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise UserError(
            f"{type(pl_module).__name__}.training_step takes a dataloader_iter, and {type(callback).__name__} has to"
            " know which batch it reads: write training_step(self, batch, batch_idx), or remove the callback"
        )


def micro_batch_number(loader: Any, batch_idx: int, rank: int, world_size: int) -> int:
    """The number of a rank's micro-batch in its epoch, counted over all ranks.

    Loaders of `datamodules` say it themselves (``loader.micro_batch_number(batch_idx)``), so that a micro-batch has the
    same number on any number of ranks. Others are taken to deal one batch to each rank in turn.

    Args:
        loader: the training loader, or several in a container.
        batch_idx: number of the batch within its epoch, on this rank.

    Example:
        >>> [micro_batch_number([], batch_idx, rank=1, world_size=2) for batch_idx in range(3)]
        [1, 3, 5]
    """
    if hasattr(loader, "micro_batch_number"):
        number: int = loader.micro_batch_number(batch_idx)
        return number
    return batch_idx * world_size + rank
