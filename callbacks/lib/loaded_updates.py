"""Training loaders of any kind as loaders of updates, and their positions for checkpoints.

This is the only place that asks what kind of loader somebody's loader is. A loader is wrapped once, before Lightning
asks for its length; from here on each is an `UpdateLoader`. Like `lightning_internals`, this file uses private names of
Lightning.

Tested in `tests/callbacks/test_update_positions.py`.
"""

import copy
import os
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from callbacks.lib import lightning_internals as internals
from callbacks.lib.hook_calls import is_foreign
from callbacks.lib.updates import flattened
from datamodules.errors import UserError, spelled
from datamodules.lightning import CombinedLoader, pl, sized_len
from datamodules.loading.foreign import ForeignLoader, JointLoader, foreign_loader
from datamodules.loading.loaders import ResumableLoader, TrainLoader
from datamodules.loading.numbered import NumberedDataLoader, batch_sampler_of, can_be_numbered
from datamodules.loading.sampling import UpdateDivision
from datamodules.loading.updates import Update, UpdateLoader, join_updates


def _combined(loaders: Any) -> CombinedLoader:
    """Return a new `CombinedLoader` over a loader or a collection of loaders."""
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
    """Reject to resume with another number of loaders that have a position than the checkpoint has."""
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


def draws_nothing(loader: UpdateLoader) -> bool:
    """Whether loading a batch draws no number from the global generators; our own code draws by address."""
    return type(loader) is TrainLoader and (loader.transform is None or not is_foreign(loader.transform))


class LoadedUpdates:
    """Converter from the items of a Trainer's training loaders, of any kind, to `Update` objects.

    Args:
        trainer: a Trainer whose epoch loop is an `UpdateLoop`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer
        self.members: list[UpdateLoader] = []
        """The wrapped training loaders."""
        self.restarts_iterators = False
        """Whether loaders without a position get new iterators in the epoch in which a run resumes."""
        self.inspect_loaders(None)

    def inspect_loaders(self, loaders: Any) -> None:
        """Read once per epoch the properties of the training loaders that each update needs."""
        self.members = update_loaders(loaders)
        divisions = {member.division for member in self.members}
        # The batches of several loaders form one micro-batch, which needs one division of the updates for all of them.
        self.division: UpdateDivision | None = divisions.pop() if len(divisions) == 1 else None
        """Division of the epoch's updates among the ranks; None if micro-batches have no numbers."""
        self.draws = not all(map(draws_nothing, self.members))
        """Whether loading may draw from the global generators."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the loaders which epoch begins."""
        for member in self.members:
            member.set_epoch(epoch)

    def first_number(self, batch_idx: int) -> int:
        """Return the number of this rank's first micro-batch in an update of the epoch."""
        return self.members[0].first_number(batch_idx)

    def as_update(self, item: Any, number: int, world_size: int) -> Update[Any]:
        """Return an item of the loaders as an `Update`.

        Args:
            number: number of this rank's first micro-batch in the epoch.
        """
        update = item if type(item) is Update else join_updates(item)
        if update.count is None:
            # A stateful loader that resumes within an epoch counts from its position, not from the epoch's start.
            update.numbers = range(number, number + len(update) * world_size, world_size)
        return update

    def resume(self, data_fetcher: Any, progress: Any) -> None:
        """Resume within an epoch: check that the loader's position agrees with Lightning's counters.

        Args:
            progress: Lightning's counters of the epoch's updates.

        Raises:
            UserError: the loader is at another update than the counters.
        """
        fit_loop = self.trainer.fit_loop
        if fit_loop._combined_loader_states_to_load:
            # Lightning restores positions only as it makes the loaders. If `configure_optimizers` reads
            # ``estimated_stepping_batches``, they are made before the checkpoint is restored (Lightning #20550).
            fit_loop._load_combined_loader_states()
            iter(data_fetcher)
        loader: Any = self.trainer.train_dataloader
        counted = progress.current.ready
        # After an epoch's last batch a loader is at the start of the next epoch, where the counters are not yet.
        if self.division is None or len(self.members) > 1 or progress.is_last_batch or loader.updates_done == counted:
            return
        raise UserError(
            f"the run was saved within an epoch, after {counted:,} updates, and with the devices and batches of now"
            f" {loader.updates_done:,} have those samples: add GradientAccumulation, which keeps the size of an update,"
            " or resume with those of before"
        )

    def restart_iterators(self, data_fetcher: Any) -> None:
        """Make new iterators of the loaders if `restarts_iterators` is set.

        In the first epoch after a resume Lightning uses the iterators of its set-up, which have the order of epoch 0.
        """
        if self.restarts_iterators and self.trainer.current_epoch > 0:
            iter(data_fetcher)
        self.restarts_iterators = False

    def keep_position(self, data_fetcher: Any) -> None:
        """Copy the loaders' positions before the next item is prefetched, for the checkpoints of this update."""
        # Only of a loader without a length does Lightning fetch one item ahead, to find the epoch's last one.
        if data_fetcher.length is not None:
            return
        loaders = data_fetcher.combined_loader
        states = copy.deepcopy(type(loaders)._state_dicts(loaders))
        if states:
            loaders._state_dicts = lambda: states
