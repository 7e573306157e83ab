"""What the data modules of this package share: the contract, and what they ask of their Trainer."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from datamodules.contract import DataContract
from datamodules.notes import inform


class BaseDataModule(pl.LightningDataModule, DataContract):
    """Without a Trainer it serves a plain PyTorch loop on one CPU."""

    hparams: Any  # Lightning declares a mapping without attributes, and makes one with them.

    def __init__(self) -> None:
        super().__init__()
        self._noted: set[str] = set()

    @property
    @override
    def seed(self) -> int:
        return int(self.hparams.seed)

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    @property
    def _shuffles(self) -> bool:
        """Over-fitting repeats the same few batches."""
        # Trainer sets this attribute where mypy does not see it.
        return not getattr(self.trainer, "overfit_batches", 0)

    def _note(self, text: str, log: Callable[[str], None] = inform) -> None:
        """Log a text once: callbacks may make further loaders."""
        if text not in self._noted:
            self._noted.add(text)
            log(text)
