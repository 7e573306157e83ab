"""A callback that looks at the start of each batch."""

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

__all__ = ["BatchWatcher", "Moment"]

Moment = tuple[str, int, int]
"""A hook ("train", "validation" or "test"), the epoch and the batch."""


class BatchWatcher(pl.Callback):
    """Hands each batch to `_look` before it is used: the hook, and the batch's number."""

    @abstractmethod
    def _look(self, trainer: pl.Trainer, hook: str, batch: int) -> None: ...

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, "train", batch_idx)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look(trainer, "validation", batch_idx)

    @override
    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look(trainer, "test", batch_idx)
