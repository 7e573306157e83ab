"""What the data modules of this package share: the contract, and what they ask of their Trainer."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from datamodules.contract import DataContract

__all__ = ["BaseDataModule"]

_inform = rank_zero_only(logging.getLogger("lightning_recipes").info)


class BaseDataModule(pl.LightningDataModule, DataContract):
    """Without a Trainer it serves a plain PyTorch loop on one CPU."""

    hparams: Any  # Lightning declares a mapping without attributes, and makes one with them.

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

    def _note_share(self) -> None:
        """Log how many samples are trained on, where that is a share of them."""
        if self.hparams.train_share < 1:
            _inform(f"train_share={self.hparams.train_share}: training on {self.sizes['train']:,} samples")

    def _micro_batches(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1
