"""The loaders in a Trainer with a schedule of updates."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from callbacks import GradientAccumulation
from datamodules import TrainLoader, UserError
from tests.support.tables import QUIET, silence

SAMPLES = torch.arange(16.0).unsqueeze(1)


class Linear(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


OPTIONS: dict[str, Any] = QUIET | {"enable_checkpointing": False, "enable_progress_bar": False}


def test_a_schedule_of_updates_keeps_them_in_a_resume_and_is_refused_where_epochs_would_have_unequal_steps(
    tmp_path: Path,
) -> None:
    silence()

    def fit(batch_size: int, epochs: int, ckpt_path: Path | None = None) -> pl.Trainer:
        loader = TrainLoader(SAMPLES, SAMPLES, torch.arange(16), batch_size, 1)
        schedule = GradientAccumulation({0: 4, "1 epochs": 2})
        trainer = pl.Trainer(max_epochs=epochs, callbacks=[schedule], devices=1, **OPTIONS)
        trainer.fit(Linear(), loader, ckpt_path=ckpt_path, weights_only=True)
        return trainer

    path = tmp_path / "first.ckpt"
    fit(2, 1).save_checkpoint(path)
    assert fit(4, 2, path).global_step == 16 // 8 + 16 // 4
    with pytest.raises(UserError, match="have 4 or 8 samples .*, of which 1 devices take 3 at once: pass a number"):
        fit(3, 2, path)
