"""Wraps training loaders of any kind as loaders of updates, once, before Lightning asks for their length.

This is the only place that asks what kind of loader somebody's loader is. From here on each is an `UpdateLoader`.
"""

import copy
import os
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from callbacks.lib import lightning_internals as internals
from callbacks.lib.updates import flattened
from datamodules.errors import UserError, spelled
from datamodules.lightning import CombinedLoader, pl, sized_len
from datamodules.loading.foreign import ForeignLoader, JointLoader, foreign_loader
from datamodules.loading.numbered import NumberedDataLoader, batch_sampler_of, can_be_numbered
from datamodules.loading.resumable import ResumableLoader
from datamodules.loading.updates import Update, UpdateLoader, join_updates


def _combined(loaders: Any) -> CombinedLoader:
    """Return a `CombinedLoader` of its own over a loader or a collection of loaders."""
    return copy.copy(loaders) if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)


def known_batch_size(loader: Any) -> int | None:
    """Return the samples of an ordinary batch where the loader, its samplers or a loader within it tell.

    Example:
        >>> from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
        >>> known_batch_size(DataLoader(range(9), batch_size=None, sampler=BatchSampler(range(9), 4, False)))
        4
    """
    for owner in (loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler"))):
        size = getattr(owner, "batch_size", None)
        if type(size) is int:
            return size
    inner = [getattr(loader, name, None) for name in ("loader", "dataloader")]
    inner += _values(getattr(loader, "loaders", None)) + _values(getattr(loader, "dataloaders", None))
    sizes = {known_batch_size(member) for member in inner if member is not None and hasattr(member, "__iter__")}
    return sizes.pop() if len(sizes) == 1 else None


def _values(loaders: Any) -> list[Any]:
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else []


def as_update_loader(loader: Any, trainer: pl.Trainer, batch_size: int | None = None) -> UpdateLoader:
    """Return a loader of any kind as an `UpdateLoader`; one that is wrapped already as it is."""
    if isinstance(loader, UpdateLoader):
        return loader

    def set_epoch(epoch: int) -> None:
        internals.set_sampler_epoch(loader, epoch)

    size = known_batch_size(loader) if batch_size is None else batch_size
    return foreign_loader(loader, size, trainer.global_rank, trainer.world_size, set_epoch=set_epoch)


def wrap_training_loaders(loaders: Any, trainer: Any, seeds: Any) -> Any:
    """Return the training loaders as loaders whose items are `Update` objects.

    A single stock `DataLoader` gets numbers, see `can_be_numbered`. Other loaders are wrapped in a `ForeignLoader`.

    Args:
        seeds: the `SeedControl` of the run. Without it the order follows from ``PL_GLOBAL_SEED`` or from the seed of
            torch's generator on rank 0, and the noise of the samples from torch's generators.
    """
    members = flattened(loaders)
    if len(members) == 1 and _gets_numbers(members[0], trainer):
        wrapped: list[UpdateLoader] = [_numbered(members[0], trainer, seeds)]
    else:
        if trainer.overfit_batches:
            in_order = _combined(loaders)
            internals.turn_off_shuffling(in_order)  # Lightning does so for loaders that are not wrapped.
            members = in_order.flattened
        wrapped = [_wrapped(loader, trainer) for loader in members]
    combined = _combined(loaders)
    combined.flattened = wrapped
    loaders = combined if isinstance(loaders, CombinedLoader) else combined.iterables
    for loader in update_loaders(loaders):
        if isinstance(loader, ResumableLoader):
            loader.keeps_order = trainer.overfit_batches > 0
            loader.divide_updates(loader.items_of(loader.world_size))
    saved_states = internals.unused_loader_states(trainer)
    _check_states(wrapped, len(saved_states))
    numbered = [loader for loader in update_loaders(loaders) if isinstance(loader, NumberedDataLoader)]
    for loader, state in zip(numbered, saved_states):
        loader.keep_length(state)  # Before Lightning asks for the length of the epoch.
    return loaders


def _check_states(loaders: list[UpdateLoader], saved: int) -> None:
    """Refuse to resume with another number of loaders that have a position than the checkpoint has."""
    names = " and ".join(type(loader.source).__name__ for loader in loaders)
    positions = sum(loader.has_position for loader in loaders)
    if saved and saved != positions:
        raise UserError(
            f"the checkpoint holds the positions of {saved} training loaders, and here {positions} of {len(loaders)}"
            f" ({names}) have one: resume with the loaders of the saved run, on as many devices"
        )


def _gets_numbers(loader: Any, trainer: Any) -> bool:
    # With use_distributed_sampler=False each device reads its own samples, which is left as it is.
    return can_be_numbered(loader) and (
        trainer.world_size == 1
        or isinstance(batch_sampler_of(loader).sampler, DistributedSampler)
        or internals.uses_distributed_sampler(trainer)
    )


def _numbered(loader: Any, trainer: Any, seeds: Any) -> NumberedDataLoader:
    if seeds is not None:
        seed = seeds.seed
        noise_seed = seed
    else:
        noise_seed = None
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() >> 1))
        # All ranks need one order, and the seed of torch's generator may differ between them.
        seed = trainer.strategy.broadcast(seed)
    keeps_order = trainer.overfit_batches > 0
    return NumberedDataLoader(loader, seed, trainer.global_rank, trainer.world_size, noise_seed, keeps_order)


def _wrapped(loader: Any, trainer: Any) -> UpdateLoader:
    if isinstance(loader, UpdateLoader):
        return loader
    batch_size = known_batch_size(loader)
    # Lightning does not look into a wrapper, so it would add no `DistributedSampler` to the loader.
    return as_update_loader(internals.process_training_loader(trainer, loader), trainer, batch_size)


def grouped(loaders: Any, size: int, trainer: Any) -> Any:
    """Return one loader of updates of `size` batches of loaders that do not number theirs, of several jointly."""
    if isinstance(loaders, ForeignLoader):
        loaders.size = size
        return loaders
    members = update_loaders(loaders)

    def set_epoch(epoch: int) -> None:
        for member in members:
            member.set_epoch(epoch)

    joint = JointLoader(_combined(loaders), _joined)
    return foreign_loader(joint, None, trainer.global_rank, trainer.world_size, size=size, set_epoch=set_epoch)


def _joined(item: Any) -> Update[Any]:
    return item if type(item) is Update else join_updates(item)


def global_batch_size(trainer: pl.Trainer) -> int:
    """Return the present number of samples per update; works from `on_train_start` on.

    Raises:
        UserError: it is not known how many samples a batch has.
    """
    loader = as_update_loader(trainer.train_dataloader, trainer)
    samples = loader.samples_per_update
    if samples is None:
        raise UserError(unknown_batch_size(loader.source))
    return samples * trainer.accumulate_grad_batches


def unknown_batch_size(loader: Any) -> str:
    """Return the message of an error about a loader whose batch size is unknown."""
    return (
        f"cannot tell the batch size of the training loader, a {type(loader).__name__}: expected an attribute"
        " `batch_size` of the loader or its sampler; give it one, or pass GradientAccumulation(steps=...)"
    )


def update_loaders(loaders: Any) -> list[UpdateLoader]:
    """Return the wrapped training loaders of a Trainer with an `UpdateLoop`; none before it has made them."""
    return [] if loaders is None else flattened(loaders)


def numbered_loaders(loaders: Any) -> list[ResumableLoader[Any]]:
    """Return the training loaders that distribute micro-batches to the ranks by their numbers."""
    return [loader for loader in update_loaders(loaders) if isinstance(loader, ResumableLoader)]


def check_interval(loader: Any, trainer: Any) -> None:
    """Reject a `val_check_interval` that is longer than an epoch; Lightning's own error would count batches.

    Raises:
        UserError: the interval is longer than an epoch.
    """
    interval = getattr(trainer, "val_check_interval", None)
    limit = trainer.limit_train_batches
    if type(interval) is not int or trainer.check_val_every_n_epoch is None:
        return
    if isinstance(loader, (list, tuple, dict)) or not trainer.limit_val_batches:
        return
    length = sized_len(loader)
    if length is None:
        return
    updates = min(length, limit) if isinstance(limit, int) else int(length * limit)
    if interval > updates:
        raise UserError(
            f"{spelled('val_check_interval', interval)} is more than the {updates} updates of an epoch; pass"
            f" {spelled('val_check_interval', updates)} or less"
        )
