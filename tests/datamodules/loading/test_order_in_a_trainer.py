"""Lightning shuffles a stock DataLoader again under DDP, and leaves our loaders as they are."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from datamodules import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, silence

SAMPLES = torch.arange(16.0).unsqueeze(1)


class Notes(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[list[float]]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(pl.LightningDataModule):
    """As on the page of the callbacks."""

    def train_dataloader(self) -> TrainLoader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size  # type: ignore[union-attr]
        return TrainLoader(SAMPLES, SAMPLES, torch.arange(16), 4, 1, rank, world_size, shuffle=False)


def _seen() -> list[list[float]]:
    silence()
    module = Notes()
    options = QUIET | {"enable_checkpointing": False, "enable_progress_bar": False, "use_distributed_sampler": True}
    trainer = pl.Trainer(strategy="ddp", devices=2, max_epochs=1, **options)
    trainer.fit(module, MyData())
    return module.seen


def test_two_ranks_take_the_parts_of_each_update_in_the_given_order():
    first, second = run_ranks(_seen, 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == SAMPLES.flatten().view(2, 8).tolist()
