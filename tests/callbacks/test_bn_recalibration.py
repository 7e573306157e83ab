"""The statistics of BatchNorm are those that torch's `update_bn` computes for the weights with which a run ends."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import BNRecalibration, ExactCheckpoint, FreezeLayers, GradientAccumulation, SeedControl, WeightAveraging
from datamodules import UserError
from datamodules.loading.loaders import TrainLoader
from tests.callbacks.test_updates import Line, samples
from tests.support.ranks import run_ranks
from tests.support.tables import equal, quiet_trainer

SAMPLES = 22


class Model(Line):
    """Two BatchNorm layers, with dropout between them where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(5)
        first = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU())
        super().__init__(nn.Sequential(first, nn.Dropout(dropout), nn.BatchNorm1d(6), nn.Linear(6, 1)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


def loader(kind: str, rank: int = 0, world_size: int = 1) -> Any:
    inputs, targets = samples(SAMPLES, torch.float32)
    if kind == "ours":
        return TrainLoader(inputs, targets, torch.arange(SAMPLES), 4, 1, rank, world_size)
    return DataLoader(TensorDataset(inputs, targets), 4, shuffle=True)


def fit(
    folder: Path | str,
    *callbacks: Any,
    kind: str = "ours",
    resume: Path | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    model = Model(dropout)
    saves = ExactCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last=True)
    all_callbacks = [SeedControl(1), GradientAccumulation(global_batch_size=8), WeightAveraging(0.9), *callbacks, saves]
    trainer = quiet_trainer(*all_callbacks, **{"max_epochs": 2, "use_distributed_sampler": True} | options)
    data = loader(kind, trainer.global_rank, trainer.world_size)
    trainer.fit(model, data, ckpt_path=resume, weights_only=True)
    return trainer, {name: value.clone() for name, value in model.state_dict().items()}


def test_they_are_those_of_update_bn_over_the_average(tmp_path: Path) -> None:
    _, averaged = fit(tmp_path)
    trainer, found = fit(tmp_path, BNRecalibration())
    model = Model()
    model.load_state_dict(averaged)
    update_bn(loader("ours"), model)
    assert equal(found, model.state_dict())
    assert not torch.equal(found["network.2.running_var"], averaged["network.2.running_var"])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert equal(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"], found)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_devices_or_resumes_change_no_bit_of_the_statistics(kind: str, tmp_path: Path) -> None:
    _, whole = fit(tmp_path / "whole", BNRecalibration(), kind=kind, dropout=0.3)
    for found in run_ranks(_on_ranks, 2, str(tmp_path / "ranks"), kind):
        assert equal(found, whole)
    for name in ("step=2", "step=4", "last"):
        _, resumed = fit(
            tmp_path / "again", BNRecalibration(), kind=kind, resume=tmp_path / f"whole/{name}.ckpt", dropout=0.3
        )
        assert equal(resumed, whole), name


class Draws(pl.Callback):
    """Leaves another state of the generators behind on each rank."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.rand(1 + trainer.global_rank)


def _on_ranks(folder: str, kind: str) -> dict[str, Tensor]:
    return fit(folder, Draws(), BNRecalibration(), kind=kind, dropout=0.3, world_size=2)[1]


def test_frozen_layers_keep_their_statistics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    freeze = FreezeLayers(until="network.1")
    _, found = fit(tmp_path, freeze, BNRecalibration())
    _, without = fit(tmp_path, FreezeLayers(until="network.1"))
    assert equal(found, without)
    assert "BNRecalibration leaves the statistics as they are, since network.0.1 is frozen" in caplog.text


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*samples(SAMPLES, torch.float32), strict=True)


def _stream() -> None:
    trainer = quiet_trainer(BNRecalibration(), world_size=2)
    with pytest.raises(UserError, match="reads all micro-batches of one training loader"):
        trainer.fit(Model(), DataLoader(Stream(), 4))


def test_what_cannot_be_computed_is_rejected_before_it_trains() -> None:
    with pytest.raises(UserError, match="no layer is BatchNorm"):
        quiet_trainer(BNRecalibration()).fit(Line(), DataLoader(TensorDataset(*samples(8)), 2))
    run_ranks(_stream, 2)
