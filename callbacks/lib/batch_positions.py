"""Where the samples of a batch stand in the order of their epoch, for loaders of ours and of torch."""

import inspect
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from datamodules.errors import UserError

__all__ = ["batch_positions", "refuse_dataloader_iter"]


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


def batch_positions(loader: Any, batch_idx: int, rank: int, world_size: int) -> range | None:
    """The positions of the samples of a rank's batch in the epoch's order, which all ranks share.

    Loaders of `datamodules` say it themselves (``loader.batch_positions``). In a `DataLoader` it follows from the batch
    size, and on several ranks from torch's `DistributedSampler`, which deals the order to the ranks in turn.

    Args:
        batch_idx: number of the batch within its epoch, on this rank.

    Returns:
        None where it is not known: an iterable data set, batches of any size, several loaders, or a sampler of another
        kind on several ranks.

    Example:
        >>> loader = DataLoader(range(7), batch_size=3)
        >>> [list(batch_positions(loader, batch_idx, rank=0, world_size=1)) for batch_idx in range(3)]
        [[0, 1, 2], [3, 4, 5], [6]]
    """
    if hasattr(loader, "batch_positions"):
        positions: range = loader.batch_positions(batch_idx)
        return positions
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.rank, sampler.num_replicas) != (rank, world_size):
            return None
    elif world_size > 1:
        return None
    start = batch_idx * loader.batch_size
    stop = min(start + loader.batch_size, len(sampler))
    return range(start * world_size + rank, stop * world_size + rank, world_size)
