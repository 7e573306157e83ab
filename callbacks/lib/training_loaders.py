"""The training loaders of a Trainer before Lightning asks for their length."""

import os
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DistributedSampler

from callbacks.lib.lightning_internals import uses_distributed_sampler
from datamodules.errors import UserError
from datamodules.loading.numbered import NumberedDataLoader, can_be_numbered


def number_micro_batches(loader: Any, trainer: Any, seeds: Any) -> Any:
    """A stock `DataLoader` as one whose micro-batches are dealt by their numbers; another loader as it is.

    Args:
        seeds: the `SeedControl` of the run. Without one the order follows from ``PL_GLOBAL_SEED`` or from the seed of
            torch's generator on rank 0, and the noise of the samples is left to the generators.
    """
    if not can_be_numbered(loader):
        return loader
    is_shared_out = trainer.world_size == 1 or isinstance(loader.sampler, DistributedSampler)
    if not (is_shared_out or uses_distributed_sampler(trainer)):
        return loader  # Each device has samples of its own.
    if seeds is not None:
        noise_seed = seed = seeds.seed
    else:
        noise_seed = None
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() >> 1))
        seed = trainer.strategy.broadcast(seed)
    keeps_order = trainer.overfit_batches > 0
    return NumberedDataLoader(loader, seed, trainer.global_rank, trainer.world_size, noise_seed, keeps_order)


def check_interval(loader: Any, trainer: Any) -> None:
    """Refuse an interval of validations that no epoch is long enough for; Lightning speaks of batches.

    Raises:
        UserError: it is longer than an epoch.
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
            f"val_check_interval={interval} is more than the {updates} updates of an epoch; pass"
            f" val_check_interval={updates} or less"
        )
