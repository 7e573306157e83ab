"""Batch normalisation over all devices of a run, on any device.

`Trainer(sync_batchnorm=True)` refuses to run on CPUs and, after the fit, forgets the class of each layer and whether
it was frozen. Without it each rank normalises alone and the statistics that are saved are those of rank 0 only.
"""

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.batch_norm import (
    average_statistics,
    check_batchnorm,
    exempt_from_broadcast,
    restore_batchnorm,
    sync_batchnorm,
)
from callbacks.lib.idle_hooks import drop_idle_hooks, restore_hooks
from datamodules.errors import UserError
from datamodules.ranges import COUNT, check_ranges

__all__ = ["SyncBN", "check_group_size"]


def check_group_size(group_size: int, world_size: int) -> None:
    """Refuses a group size that does not divide the number of processes.

    Raises:
        UserError: naming the nearest sizes that do.

    Example:
        >>> check_group_size(3, 8)
        Traceback (most recent call last):
        datamodules.errors.UserError: SyncBN(group_size=3) does not divide the 8 processes of this run: pass
        group_size=2 or group_size=4
    """
    if group_size >= 1 and world_size % group_size == 0:
        return
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    nearest = {
        max((d for d in divisors if d < group_size), default=1),
        min((d for d in divisors if d > group_size), default=world_size),
    }
    raise UserError(
        f"SyncBN(group_size={group_size}) does not divide the {world_size} processes of this run: "
        f"pass {' or '.join(f'group_size={size}' for size in sorted(nearest))}"
    )


class SyncBN(pl.Callback):
    """Normalises batches over the processes of a run, so that splitting a batch over devices changes nothing.

    Every BatchNorm1d, 2d and 3d computes mean and variance over the samples of all ranks (or of each group of ranks):
    torch's SyncBatchNorm on accelerators, our own on CPUs. So does timm's BatchNormAct2d. Ranks may hold different
    numbers of samples, and none. Frozen layers (in evaluation mode) stay frozen. State-dict keys do not change, and
    after the fit, or an exception in it, each layer has its class back, so the weights load into plain batch
    normalisation. Alone on one process it does nothing.

    With groups smaller than the run each group has running statistics of its own. They are averaged over the ranks
    before every validation, at every epoch's end and before saving. ``SyncBN(group_size=1)`` is plain batch
    normalisation with statistics that represent all ranks instead of rank 0. A checkpoint in mid-epoch with
    ``save_weights_only=True`` calls no hook and so holds rank 0's.

    Runs on: `on_fit_start` (after ``configure_model``, loading and DDP), `on_train_batch_start`, `on_validation_start`,
    `on_train_epoch_end`, `on_train_end`, `on_save_checkpoint`; undone in `teardown` and `on_exception`.

    Args:
        group_size: how many consecutive ranks share statistics; all of them if None.

    Raises:
        UserError: at set-up, if `group_size` does not divide the number of processes, the strategy splits layers, or a
            subclass of BatchNorm normalises in a `forward` of its own.

    Example:
        >>> trainer = pl.Trainer(callbacks=[SyncBN(group_size=8)], logger=False, accelerator="cpu")
    """

    def __init__(self, group_size: int | None = None) -> None:
        check_ranges(group_size=(group_size, COUNT))
        self.group_size = group_size
        self._averages = False
        self._ddp: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.group_size is not None:
            check_group_size(self.group_size, trainer.world_size)
        if trainer.world_size > 1:
            check_batchnorm(pl_module)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        size = self.group_size or trainer.world_size
        self._averages = size < trainer.world_size
        alone = not isinstance(trainer.strategy.model, DistributedDataParallel)
        drop_idle_hooks(self, [SyncBN.on_train_batch_start] if alone else [])
        if size == 1:
            return
        if alone:
            raise UserError(
                f"{type(trainer.strategy).__name__} splits the layers that SyncBN would replace: pass"
                ' strategy="ddp", or remove SyncBN'
            )
        group = dist.new_subgroups(group_size=size)[0] if self._averages else None
        sync_batchnorm(pl_module, group)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Checked at every batch: a callback that unfreezes layers may have wrapped the module again.
        if trainer.strategy.model is not self._ddp:
            self._ddp = trainer.strategy.model
            if isinstance(self._ddp, DistributedDataParallel):
                exempt_from_broadcast(self._ddp)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._average(pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._average(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._average(pl_module)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The tensors in the checkpoint are the layers' own, so averaging in place reaches them. While an exception is
        # handled the other ranks may be gone: then a collective would wait for ever.
        if not trainer.interrupted:
            self._average(pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        restore_hooks(self)
        restore_batchnorm(pl_module)
        self._averages, self._ddp = False, None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _average(self, pl_module: pl.LightningModule) -> None:
        if self._averages:
            average_statistics(pl_module)
