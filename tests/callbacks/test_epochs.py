"""Which batches an epoch has: those of over-fitting, and of one that a hook ends early."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl
from datamodules.loading.loaders import TrainLoader
from tests.callbacks.test_update_positions import BATCHES, Model, samples
from tests.support.ranks import run_ranks
from tests.support.tables import equal, quiet_trainer


@pytest.mark.parametrize("share", [2, 0.5])
def test_over_fitting_a_train_loader_keeps_its_order(share: float) -> None:
    model = Model()
    loader = TrainLoader(*samples(), torch.arange(2 * BATCHES), 2, 1)
    trainer: Any = quiet_trainer(GradientAccumulation(2), overfit_batches=share, max_epochs=2)
    trainer.fit(model, loader)
    batches = [batch.flatten().tolist() for batch in samples()[1].split(2)]
    assert model.seen == batches[:4] * 2
    other = Model()
    quiet_trainer().fit(other, loader)
    assert other.seen != batches, "another Trainer shuffles again"


def _ended_early(world_size: int, folder: str, resume: str | None = None) -> dict[str, Tensor]:
    """Each epoch ends before its third update, by the module's answer."""

    class Ends(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    seeds = SeedControl(1)
    model = Ends()
    saves = ExactCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"use_distributed_sampler": True, "max_epochs": 3, "world_size": world_size}
    trainer = quiet_trainer(seeds, GradientAccumulation(global_batch_size=4), saves, **options)
    trainer.fit(model, DataLoader(TensorDataset(*samples()), 2, shuffle=True), ckpt_path=resume, weights_only=True)
    assert trainer.global_step == 6
    return model.state_dict()


def test_an_epoch_that_a_hook_ends_early_leaves_no_update_open(tmp_path: Path) -> None:
    whole = _ended_early(1, str(tmp_path / "a"))
    for states in run_ranks(_ended_early, 2, 2, str(tmp_path / "b")):
        assert equal(states, whole)
    for step in (1, 2, 3, 4):
        assert equal(_ended_early(1, str(tmp_path / "c"), str(tmp_path / f"a/step={step}.ckpt")), whole), step
