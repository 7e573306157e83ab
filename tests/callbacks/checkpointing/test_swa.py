"""A run with Lightning's `StochasticWeightAveraging` resumes exactly from each of its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl
from tests.callbacks.test_updates import Line, samples
from tests.support.tables import equal, quiet_trainer

EPOCHS = 4


class Model(Line):
    """Dropout, BatchNorm where it is asked for, momentum and a schedule of epochs."""

    def __init__(self, norm: bool) -> None:
        torch.manual_seed(5)
        norms = [nn.BatchNorm1d(6)] if norm else []
        super().__init__(nn.Sequential(nn.Linear(3, 6), *norms, nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1)).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [StepLR(optimizer, 1, 0.8)]


SETTINGS: dict[str, dict[str, Any]] = {
    "cosine": {"swa_epoch_start": 2, "annealing_epochs": 2},
    "linear, from a share": {"swa_epoch_start": 0.6, "annealing_epochs": 2, "annealing_strategy": "linear"},
}


def fit(norm: bool, settings: dict[str, Any], folder: Path, resume: Path | None = None) -> dict[str, Tensor]:
    model = Model(norm)
    every = ExactCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{epoch}-{step}", save_last=True)
    averaging = StochasticWeightAveraging(0.02, **settings)
    trainer = quiet_trainer(SeedControl(1), GradientAccumulation(2), averaging, every, max_epochs=EPOCHS)
    loader = DataLoader(TensorDataset(*samples(12)), 2, shuffle=True)
    trainer.fit(model, loader, ckpt_path=resume, weights_only=True)
    return model.state_dict()


# torch 2.9 keeps a function in the schedule's state, which no checkpoint of plain data holds.
@pytest.mark.skipif(not hasattr(SWALR, "_set_anneal_func"), reason="SWALR of this torch does not resume")
@pytest.mark.parametrize("norm", [False, True], ids=["without BatchNorm", "with BatchNorm"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_from_any_checkpoint_ends_with_the_same_mean(name: str, norm: bool, tmp_path: Path) -> None:
    whole = fit(norm, SETTINGS[name], tmp_path / "whole")
    files = sorted((tmp_path / "whole").iterdir())
    assert len(files) == 3 * EPOCHS + 1
    for path in files:
        assert equal(fit(norm, SETTINGS[name], tmp_path / "again", path), whole), path.name
    last = torch.load(tmp_path / "whole/last.ckpt", weights_only=True)["state_dict"]
    assert not equal(last, whole), "it holds what trains, and a resume makes the mean"
