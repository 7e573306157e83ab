"""The smallest recipe: network, step and optimizer, without validation, test or example input."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from datamodules import UserError
from recipes import Recipe, build_optimizer, build_schedule, run


class Line(Recipe):
    """A straight line."""

    title = "line"

    def build_network(self) -> nn.Module:
        return nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.parameters(), self)
        return build_schedule(optimizer, self)


class Points(pl.LightningDataModule):
    """Points of y = 2x.

    Args:
        broken_rank: the rank that finds nothing.
    """

    def __init__(self, broken_rank: int | None = None) -> None:
        super().__init__()
        self.broken_rank = broken_rank

    def setup(self, stage: str) -> None:
        if self.broken_rank is not None and self.trainer.global_rank == self.broken_rank:
            raise UserError(f"rank {self.broken_rank} found nothing")

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=8)


if __name__ == "__main__":
    run(Line, Points)
