"""Evaluate every sample of a user's stock DataLoader exactly once, on any number of devices.

Lightning repeats samples so that every device has the same number, and counts the repeated ones twice. For predictions
it builds another DataLoader, which fails where ``batch_size`` was passed by position. It does neither with an iterable
that is not a DataLoader, and this module wraps the loaders in one.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from datamodules.lightning import CombinedLoader, is_overridden, pl
from datamodules.notes import warn


class _LoaderAsIterable:
    """A DataLoader wrapped as an iterable with a length, which Lightning does not replace."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_sampler = loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def share_of(loader: Any, rank: int, world_size: int) -> Any:
    """Return this rank's batches of a DataLoader in order; other loaders are returned unchanged.

    The ranks take whole batches in turn, as with `datamodules.EvaluationLoader`, or single samples where there are
    fewer batches than ranks. A loader with fewer samples than ranks is returned unchanged.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if world_size == 1:
        return _LoaderAsIterable(loader)
    is_sequential = type(loader) is DataLoader and isinstance(loader.sampler, SequentialSampler)
    batches = list(loader.batch_sampler or ()) if is_sequential else []
    if len(batches) < world_size:
        samples = [index for batch in batches for index in batch]
        batches = [samples[start::world_size] for start in range(min(len(samples), world_size))]
    if len(batches) < world_size:
        if batches:
            warn(f"warning: of fewer samples ({len(batches)}) than devices ({world_size}) some are evaluated twice")
        return loader
    share = copy(loader)
    # `DataLoader.__setattr__` refuses to change the batch sampler.
    vars(share)["batch_sampler"] = batches[rank::world_size]
    return _LoaderAsIterable(share)


def _shared(make: Callable[[], Any], rank: int, world_size: int) -> Any:
    """Return this rank's shares of all loaders that a method of a data module returns."""
    loaders = make()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    combined.flattened = [share_of(loader, rank, world_size) for loader in combined.flattened]
    return loaders if combined is loaders else combined.iterables


def evaluate_each_sample_once(data: pl.LightningDataModule, rank: int, world_size: int) -> None:
    """Replace the evaluation loaders of a data module by their `share_of` this rank."""
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        if is_overridden(name, data):
            # Not a closure: in a copy of the data module it would build the loaders of the original.
            setattr(data, name, partial(_shared, getattr(data, name), rank, world_size))
