"""Preparation and checks of the training loaders, before Lightning asks for their length."""

import os
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from callbacks.lib.lightning_internals import uses_distributed_sampler
from datamodules.errors import UserError
from datamodules.lightning import sized_len
from datamodules.loading.numbered import NumberedDataLoader, can_be_numbered


def number_micro_batches(loader: Any, trainer: Any, seeds: Any) -> Any:
    """Wrap a stock `DataLoader` so that its micro-batches have numbers; return any other loader unchanged.

    Args:
        seeds: the `SeedControl` of the run. Without it the order follows from ``PL_GLOBAL_SEED`` or from the seed of
            torch's generator on rank 0, and the noise of the samples from torch's generators.
    """
    if not can_be_numbered(loader):
        return loader
    is_distributed = trainer.world_size == 1 or isinstance(loader.sampler, DistributedSampler)
    if not (is_distributed or uses_distributed_sampler(trainer)):
        return loader  # With use_distributed_sampler=False each device reads its own samples, which is left as it is.
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
            f"val_check_interval={interval} is more than the {updates} updates of an epoch; pass"
            f" val_check_interval={updates} or less"
        )
