"""Stock DataLoaders of a user's data module in an evaluation: every sample once, on any number of devices.

Lightning repeats samples so that every device has as many, and counts them twice. To predict it makes another
DataLoader, which fails where ``batch_size`` was passed by position. It leaves loaders alone that are no DataLoader.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, SequentialSampler

from datamodules.notes import warn


class _AsIs:
    """A DataLoader as an iterable with a length."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.dataset, self.batch_sampler = loader.dataset, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def share_of(loader: Any, rank: int, world_size: int) -> Any:
    """This rank's batches of a DataLoader in order; another loader, or one with too few samples, is returned as it is.

    Whole batches go to the ranks in turn, as those of `datamodules.EvaluationLoader`; of fewer batches than ranks the
    samples do.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if world_size == 1:
        return _AsIs(loader)
    in_order = type(loader) is DataLoader and isinstance(loader.sampler, SequentialSampler)
    batches = list(loader.batch_sampler or ()) if in_order else []
    if len(batches) < world_size:
        samples = [number for batch in batches for number in batch]
        batches = [samples[first::world_size] for first in range(min(len(samples), world_size))]
    if len(batches) < world_size:
        if batches:
            warn(f"warning: of fewer samples ({len(batches)}) than devices ({world_size}) some are evaluated twice")
        return loader
    share = copy(loader)
    vars(share)["batch_sampler"] = batches[rank::world_size]  # A DataLoader refuses to have it set.
    return _AsIs(share)


def _shared(make: Callable[[], Any], rank: int, world_size: int) -> Any:
    """The shares of all loaders that are in what a method of a data module returns."""
    loaders = make()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    combined.flattened = [share_of(loader, rank, world_size) for loader in combined.flattened]
    return loaders if combined is loaders else combined.iterables


def evaluate_each_sample_once(data: pl.LightningDataModule, rank: int, world_size: int) -> None:
    """Have the loaders of a data module for validation, test and prediction replaced by their `share_of` this rank."""
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        if is_overridden(name, data):
            # No closure: in a copy of the data module it would make the loaders of the original.
            setattr(data, name, partial(_shared, getattr(data, name), rank, world_size))
