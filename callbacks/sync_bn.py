"""Batch normalisation over all devices of a run, on any device.

`Trainer(sync_batchnorm=True)` refuses to run on CPUs and, after the fit, forgets the class of each layer and whether
it was frozen. Without it each rank normalises alone and the statistics that are saved are those of rank 0 only.
"""

from typing import Any

import lightning.pytorch as pl
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.batch_norm import check_batchnorm, exempt_from_broadcast, restore_batchnorm, sync_batchnorm
from callbacks.lib.idle_hooks import drop_idle_hooks, restore_hooks
from datamodules.errors import UserError

__all__ = ["SyncBN"]


class SyncBN(pl.Callback):
    """Normalises batches over the processes of a run, so that splitting a batch over devices changes nothing.

    Every BatchNorm1d, 2d and 3d computes mean and variance over the samples of all ranks: torch's
    SyncBatchNorm on accelerators, our own on CPUs. So does timm's BatchNormAct2d. Ranks may hold different
    numbers of samples, and none. Frozen layers (in evaluation mode) stay frozen. State-dict keys do not change, and
    after the fit, or an exception in it, each layer has its class back, so the weights load into plain batch
    normalisation. Alone on one process it does nothing.

    Runs on: `on_fit_start`, after ``configure_model``, loading and DDP, and `on_train_batch_start`; undone in
    `teardown` and `on_exception`.

    Raises:
        UserError: at set-up, if the strategy splits layers, or a subclass of BatchNorm normalises in a `forward` of its
            own.

    Example:
        >>> trainer = pl.Trainer(callbacks=[SyncBN()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._ddp: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            check_batchnorm(pl_module)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        alone = not isinstance(trainer.strategy.model, DistributedDataParallel)
        drop_idle_hooks(self, [SyncBN.on_train_batch_start] if alone else [])
        if trainer.world_size == 1:
            return
        if alone:
            raise UserError(
                f"{type(trainer.strategy).__name__} splits the layers that SyncBN would replace: pass"
                ' strategy="ddp", or remove SyncBN'
            )
        sync_batchnorm(pl_module)

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
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        restore_hooks(self)
        restore_batchnorm(pl_module)
        self._ddp = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
