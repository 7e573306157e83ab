"""Balanced classes in a run that is cut into processes and micro-batches, stopped within an epoch and resumed."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from callbacks import ExactCheckpoint, GradientAccumulation
from datamodules import MNISTDataModule
from recipes import MNISTClassifier
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

GLOBAL_BATCH = 12
COUNTS = (60, 25, 5)


class Linear(MNISTClassifier):
    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 3)).double()


def _data(batch_size: int) -> MNISTDataModule:
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    # On a dark border, so that they stay as they are.
    images = F.pad(torch.rand(90, 20, 20, generator=torch.Generator().manual_seed(3)), (4, 4, 4, 4))
    test = images[::9], labels[::9]
    options: dict[str, Any] = {"batch_size": batch_size, "val_fraction": 0.0, "balance": "loss"}
    data = MNISTDataModule(**options)
    data.take_samples({"train": (images, labels), "test": test})
    return data


def _train(world_size: int, micro_batches: int, folder: Path, resume: bool) -> dict[str, Any]:
    """Two epochs, saved after the fifth update, in the first epoch; or from there to the end."""
    torch.manual_seed(1)
    data = _data(GLOBAL_BATCH // world_size // micro_batches)
    recipe = Linear(num_classes=3, optimizer="sgd", lr=0.01, schedule="constant", label_smoothing=0.1)
    save = ExactCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    ours = GradientAccumulation(global_batch_size=GLOBAL_BATCH), save
    trainer = quiet_trainer(*ours, world_size=world_size, max_epochs=2, precision="64-true")
    trainer.fit(recipe, data, ckpt_path=str(folder / "step=5.ckpt") if resume else None, weights_only=True)
    return {"weight": recipe.network[1].weight.detach().clone(), "class_weights": recipe.class_weights}


def _two_ranks(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "2x2": _train(2, 2, folder / "2x2", resume=False),
        "2x1, resumed": _train(2, 1, folder / "whole", resume=True),
    }


def test_a_balanced_run_learns_the_same_on_any_split_and_after_a_resume_within_an_epoch(tmp_path: Path) -> None:
    whole = _train(1, 1, tmp_path / "whole", resume=False)
    found = {"1x4": _train(1, 4, tmp_path / "1x4", resume=False)}
    saved = torch.load(tmp_path / "whole" / "step=5.ckpt", weights_only=True)
    assert torch.equal(saved["class_weights"], torch.tensor([90 / 3 / count for count in COUNTS]).double())
    found |= run_ranks(_two_ranks, 2, tmp_path)[0]
    expected: Tensor = whole["weight"]
    for name, run in found.items():
        assert float((run["weight"] - expected).abs().max() / expected.abs().max()) < 1e-12, name
    # What was saved counts, not what the data have now.
    saved["class_weights"] *= 2
    torch.save(saved, tmp_path / "whole" / "step=5.ckpt")
    resumed = _train(1, 1, tmp_path / "whole", resume=True)
    assert torch.equal(resumed["class_weights"], saved["class_weights"])
    assert whole["class_weights"].unique().numel() == 3
