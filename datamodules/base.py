"""What the data modules of this package share: the contract, and what they ask of their Trainer."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from datamodules.contract import DataContract
from datamodules.loading.labels import balanced_class_weights

__all__ = ["BaseDataModule", "ClassificationDataModule"]

_inform = rank_zero_only(logging.getLogger("lightning_recipes").info)


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

    def _note(self, text: str) -> None:
        """Log a text once: callbacks may make further loaders."""
        if text not in self._noted:
            self._noted.add(text)
            _inform(text)


class ClassificationDataModule(BaseDataModule):
    """What ``balance`` does about classes of unequal size."""

    def _training_labels(self) -> Tensor | None:
        """The labels of the samples that are trained on, on the CPU; None before `setup`."""
        raise NotImplementedError

    @property
    @override
    def class_weights(self) -> Tensor | None:
        """Those of ``balance="loss"``, by the samples that are trained on; None otherwise, and before `setup`."""
        labels = self._training_labels()
        if self.hparams.balance != "loss" or labels is None:
            return None
        return balanced_class_weights(labels, self.num_classes or 0)

    def _sampling_weights(self, labels: Tensor) -> Tensor | None:
        """Those of ``balance="sampling"`` for all samples, of which some are trained on, by their labels."""
        mine = self._training_labels()
        if self.hparams.balance != "sampling" or mine is None:
            return None
        return balanced_class_weights(mine, self.num_classes or 0)[labels.cpu()]

    def _note_balance(self) -> None:
        """Log the sizes of the classes and what ``balance`` does about them, where it does something."""
        labels = self._training_labels()
        if self.hparams.balance == "none" or labels is None:
            return
        counts = labels.bincount()
        sizes = counts[counts > 0]
        share = f"{len(labels) / len(sizes):,.0f}"
        sampled = self.hparams.balance == "sampling"
        how = f"each drawn {share} times an epoch" if sampled else f"weighted in the training loss by {share} / size"
        classes = f"{len(sizes)} classes of {int(sizes.min()):,} to {int(sizes.max()):,} samples"
        self._note(f"balance={self.hparams.balance!r}: {classes}, {how}")
