"""What `TrainingMonitor` logs are the norms of a plain computation, however the run is split, scaled or clipped."""

import csv
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.training_monitor import TrainingMonitor
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, QUIET, Tiny, loss_of, noisy_images, on_ranks, silence

SETTINGS = QUIET | {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False}
IMAGES, TARGETS = noisy_images(16)


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    layers[2].requires_grad_(False)
    return layers.double()


def sgd(parameters: Any, lr: float = 0.5, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr, **settings)


class Records(pl.Callback):
    """What the monitor has logged after each batch."""

    def __init__(self, monitor: TrainingMonitor) -> None:
        self.monitor, self.rows = monitor, []

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        norm = self.monitor.values.get("monitor/gradient_norm")
        if norm is not None and norm not in self.rows:
            self.rows.append(norm)


def fit(
    module: pl.LightningModule, loader: Any, *callbacks: pl.Callback, every: int = 1, **options: Any
) -> list[float]:
    """What is logged."""
    silence()
    monitor = TrainingMonitor()
    records = Records(monitor)
    settings = SETTINGS | {"log_every_n_steps": every} | options
    pl.Trainer(callbacks=[*callbacks, monitor, records], **settings).fit(module, loader)
    return records.rows


def batches(size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, TARGETS), size)


def plain_norms(size: int = 8) -> list[float]:
    """The norm of the gradients of each update of a plain PyTorch loop."""
    layers, rows = network(), []
    optimizer = sgd(layers.parameters())
    for images, targets in zip(IMAGES.split(size), TARGETS.split(size), strict=True):
        optimizer.zero_grad()
        loss_of(layers(images), targets).backward()
        rows.append(norm([parameter.grad for parameter in layers.parameters() if parameter.grad is not None]))
        optimizer.step()
    return rows


def norm(tensors: list[Any]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_norms_are_those_of_a_plain_loop(micro_batches: int) -> None:
    rows = fit(Tiny(network(), sgd), batches(8 // micro_batches), GradientAccumulation(micro_batches))
    assert rows == pytest.approx(plain_norms(), rel=1e-5)


def test_norms_are_those_before_clipping() -> None:
    assert fit(Tiny(network(), sgd), batches(8), gradient_clip_val=0.05)[0] == pytest.approx(plain_norms()[0], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_float16_are_logged_unscaled(fused: bool) -> None:
    def rows(plugins: list[Any]) -> list[float]:
        module = Tiny(network().float(), sgd, fused=fused)
        loader = DataLoader(TensorDataset(IMAGES.float(), TARGETS), 8)
        return fit(module, loader, plugins=plugins)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert rows([MixedPrecision("16-mixed", "cpu", scaler)]) == pytest.approx(rows([]), rel=0.01)


@pytest.mark.parametrize(("every", "logged_after"), [(3, [3, 6, 9, 12, 15]), (10, [8, 10]), (20, [8, 16])])
def test_the_end_of_an_interval_or_of_an_epoch_without_one_is_logged(
    every: int, logged_after: list[int], tmp_path: Path
) -> None:
    silence()
    logger = CSVLogger(tmp_path, name=None, version="")
    callbacks = [GradientAccumulation(2), TrainingMonitor()]
    settings = SETTINGS | {"max_epochs": 2, "logger": logger, "log_every_n_steps": every}
    pl.Trainer(callbacks=callbacks, **settings).fit(Tiny(network(), sgd), batches(1))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [1 + int(row["step"]) for row in csv.DictReader(file)] == logged_after


def on_rank(world_size: int) -> list[float]:
    rank = int(os.environ.get("RANK", "0"))
    loader = TrainLoader(IMAGES, TARGETS, torch.arange(16), 8 // world_size, 1, rank, world_size, shuffle=False)
    return fit(Tiny(network(), sgd), loader, **on_ranks(world_size))


def test_every_rank_logs_the_norms_of_the_whole_update() -> None:
    first, second = run_ranks(on_rank, 2, 2)
    assert first == second == pytest.approx(plain_norms(), rel=1e-4)
