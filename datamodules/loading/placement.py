"""What data modules ask their Trainer for."""

import lightning.pytorch as pl
import torch

__all__ = ["PlacedDataModule"]


class PlacedDataModule(pl.LightningDataModule):
    """A data module that knows where it is; without a Trainer it serves a plain loop on one CPU."""

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def _micro_batches(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1
