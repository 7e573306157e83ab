"""Checkpoints at the moments from which Lightning resumes exactly.

Lightning's `ModelCheckpoint(every_n_train_steps=...)` saves at two others, too. After a resume it forgets which update
it has saved and saves again after the next micro-batch, in mid-window, and no checkpoint holds half-summed gradients.
And it saves on an epoch's last batch before the epoch has ended: the run resumed from there does not count the epoch
that it begins, and a second such resume trains one epoch too many.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

__all__ = ["ExactCheckpoint"]


class ExactCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which saves after whole updates, and after an epoch's last one when it has ended.

    Of equal scores the later is the best: it has learnt for longer, and small validation sets often give equal ones.

    Runs on: `on_train_batch_end` and `on_train_epoch_end`, as the stock one; takes the same arguments.

    Example:
        >>> checkpoint = ExactCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)
    """

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        batches = trainer.fit_loop.batch_idx + 1
        if batches % trainer.accumulate_grad_batches == 0 and not trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_batch_end(trainer, pl_module, None, None, trainer.fit_loop.batch_idx)
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        equal = current is not None and bool(self.best_k_models.get(self.kth_best_model_path) == current)
        # The score is the same on every rank, so all of them decide alike.
        return equal or super().check_monitor_top_k(trainer, current)
