"""A user's own recipe on a data module as Lightning's documentation writes it, which knows nothing of this package."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recipes import run
from tests.support.own_training import TrainedClassifier


class Quadrants(TrainedClassifier):
    """Tells in which of two pairs of quadrants a point lies."""

    title = "quadrants"

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, self.hparams.num_classes))


class Points(pl.LightningDataModule):
    """Points and their classes.

    Args:
        batch_size: samples in a batch.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        points = torch.randn(101, 2, generator=torch.Generator().manual_seed(1))
        self.points = TensorDataset(points, (points.prod(1) > 0).long())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.points, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.utils.data.Subset(self.points, range(40)), self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.points, self.batch_size)


if __name__ == "__main__":
    run(Quadrants, Points)
