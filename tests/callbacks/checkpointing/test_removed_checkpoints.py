"""The best checkpoint is removed by somebody while the run trains."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, on_ranks

SCORES = (0.5, 0.9, 0.7, 0.6)


class Scored(pl.LightningModule):
    """Has the scores of a list; its best checkpoint is removed after the second one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.layer = path, nn.Linear(1, 1)

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    @override
    def on_train_epoch_end(self) -> None:
        self.log("score", SCORES[self.current_epoch], sync_dist=True)

    @override
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2 and self.trainer.is_global_zero:
            self.path.unlink()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(folder: Path, world_size: int) -> dict[str, Any]:
    best = ExactCheckpoint(folder, filename="best", monitor="score", mode="max", enable_version_counter=False)
    trainer = pl.Trainer(
        **QUIET | on_ranks(world_size) | {"enable_progress_bar": False},
        callbacks=[best],
        plugins=[VerifiedCheckpointIO()],
        max_epochs=len(SCORES),
    )
    trainer.fit(Scored(folder / "best.ckpt"), DataLoader(torch.ones(2, 1)))
    return {Path(path).name: round(float(score), 2) for path, score in best.best_k_models.items()}


def test_the_next_one_takes_its_place_and_on_all_ranks_alike(tmp_path: Path) -> None:
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        assert run_ranks(_train, world_size, folder, world_size) == [{"best.ckpt": 0.7}] * world_size
        assert torch.load(folder / "best.ckpt", weights_only=True)["epoch"] == 2
