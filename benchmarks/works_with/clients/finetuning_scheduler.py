"""finetuning-scheduler: a callback that unfreezes by a schedule, and replaces callbacks for checkpoints."""

from typing import Any

import lightning.pytorch as pl
import torch
from finetuning_scheduler import FinetuningScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..rows import SAMPLES, Row, Run

LIBRARY = "finetuning-scheduler"
PACKAGE = "lightning.pytorch"
SCHEDULE = """
0: {params: [d.weight, d.bias], max_transition_epoch: 1}
1: {params: [c.weight, c.bias], max_transition_epoch: 2}
2: {params: [b.0.weight, b.0.bias, a.weight, a.bias], max_transition_epoch: 4}
"""


class Network(pl.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout))
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 1)

    def forward(self, inputs: Any) -> Any:
        return self.d(self.c(self.b(self.a(inputs))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def scheduled(run: Run) -> None:
    callbacks = run.callbacks()
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    schedule = run.folder / "schedule.yaml"
    schedule.write_text(SCHEDULE)
    callbacks.append(FinetuningScheduler(ft_schedule=str(schedule), epoch_transitions_only=True))
    loader = DataLoader(samples, run.batch_size, shuffle=True)
    run.fit(Network(0.1), loader, DataLoader(samples, 4), callbacks=callbacks, max_epochs=4)


ROWS = {
    "schedule": Row(
        scheduled, "unfreezes three groups, by epoch, 4 epochs", unused=True, whole="BatchNorm", stops=(6, 6)
    ),
}
