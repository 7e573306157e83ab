"""Base class of all data modules: the data contract, and access to rank, world size and device of the Trainer."""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from datamodules.contract import DataContract
from datamodules.lightning import pl
from datamodules.lightning_package import OneLightning
from datamodules.notes import inform


class BaseDataModule(OneLightning, pl.LightningDataModule, DataContract):
    """Base class of the data modules. Without a Trainer it acts as rank 0 of 1 on the CPU, for a plain PyTorch loop."""

    hparams: Any  # Lightning's annotation has no attribute access, its object does.

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
        """Whether training batches are shuffled. ``overfit_batches`` turns shuffling off to repeat the same batches."""
        # Trainer sets this attribute in a helper, where mypy does not see it.
        return not getattr(self.trainer, "overfit_batches", 0)

    def _note(self, text: str, log: Callable[[str], None] = inform) -> None:
        """Log a text the first time only, since callbacks may build the same loader again."""
        if text not in self._noted:
            self._noted.add(text)
            log(text)
