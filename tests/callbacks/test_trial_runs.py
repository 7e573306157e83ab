"""What a trial run of Lightning's finders changes is gone before the run, which equals one without a finder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ExactCheckpoint
from datamodules.loading.loaders import TrainLoader
from tests.support.tables import CALLBACKS, TOGETHER, equal, quiet_trainer


class Model(pl.LightningModule):
    """Has what finders set, a schedule, BatchNorm, dropout and a layer that is frozen at first."""

    def __init__(self, kind: str, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.network = nn.Sequential(body, nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 1)))
        self.kind, self.lr, self.batch_size = kind, lr, batch_size

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 5), "interval": "step"}}

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        inputs, targets = torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator)
        if self.kind == "ours":
            return TrainLoader(inputs, targets, torch.arange(64), self.batch_size, 1)
        return DataLoader(TensorDataset(inputs, targets), self.batch_size, shuffle=True)


def fit(model: Model, folder: Path, finder: pl.Callback | None = None, first: bool = True) -> tuple[Any, ...]:
    names = [name for name in TOGETHER if name != "RunProgress"]
    callbacks = [*(CALLBACKS[name]() for name in names), ExactCheckpoint(folder, every_n_train_steps=3)]
    found = [] if finder is None else [finder]
    callbacks = [*found, *callbacks] if first else [*callbacks, *found]
    trainer = quiet_trainer(*callbacks, max_epochs=2, default_root_dir=folder)
    trainer.fit(model)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "per_second" not in name}
    return model.state_dict(), trainer.global_step, metrics


FINDERS: dict[str, Callable[[], pl.Callback]] = {
    "batch size": lambda: BatchSizeFinder("power", steps_per_trial=2, init_val=4, max_trials=2),
    "learning rate": lambda: LearningRateFinder(num_training_steps=16, max_lr=0.5),
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("name", FINDERS)
def test_a_run_after_a_trial_equals_one_without(
    name: str, kind: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The finder would collect the garbage of all imports, eight times.
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)
    model = Model(kind)
    weights, steps, metrics = fit(model, tmp_path / "a", FINDERS[name](), first)
    assert (model.lr, model.batch_size) != (0.05, 4), "the finder has found something"
    expected, expected_steps, expected_metrics = fit(Model(kind, model.lr, model.batch_size), tmp_path / "b")
    assert equal(weights, expected)
    assert (steps, metrics) == (expected_steps, expected_metrics)
