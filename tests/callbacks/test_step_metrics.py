"""What `TrainingMonitor` logs are the norms of a plain computation, however the run is split, scaled or clipped."""

import csv
import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.step_metrics import TrainingMonitor
from datamodules.loading.loaders import TrainLoader
from tests.support.devices import precision_on
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, Tiny, loss_of, noisy_images, quiet_trainer

IMAGES, TARGETS = noisy_images(16)


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    layers[2].requires_grad_(False)
    return layers.double()


def sgd(parameters: Any, lr: float = 0.5, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr, **settings)


def fit(module: pl.LightningModule, loader: Any, *callbacks: pl.Callback, **options: Any) -> list[float]:
    """What is logged."""
    monitor, rows, record = TrainingMonitor(), [], pl.Callback()
    record.on_train_batch_end = lambda *_: rows.append(monitor.values.get("monitor/gradient_norm"))
    quiet_trainer(*callbacks, monitor, record, log_every_n_steps=1, **options).fit(module, loader)
    return [*dict.fromkeys(norm for norm in rows if norm is not None)]


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
    loader = DataLoader(TensorDataset(IMAGES.float(), TARGETS), 8)
    whole, half = (
        fit(Tiny(network().float(), sgd, fused=fused), loader, **precision_on("cpu", precision))
        for precision in ("32-true", "16-mixed")
    )
    assert half == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(("every", "logged_after"), [(3, [3, 6, 9, 12, 15]), (10, [8, 10]), (20, [8, 16])])
def test_the_end_of_an_interval_or_epoch_is_logged(every, logged_after, tmp_path) -> None:
    settings = {"max_epochs": 2, "logger": CSVLogger(tmp_path, name=None, version=""), "log_every_n_steps": every}
    quiet_trainer(GradientAccumulation(2), TrainingMonitor(), **settings).fit(Tiny(network(), sgd), batches(1))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [1 + int(row["step"]) for row in csv.DictReader(file)] == logged_after


def on_rank(world_size: int) -> list[float]:
    rank = int(os.environ.get("RANK", "0"))
    loader = TrainLoader(IMAGES, TARGETS, torch.arange(16), 8 // world_size, 1, rank, world_size, shuffle=False)
    return fit(Tiny(network(), sgd), loader, world_size=world_size)


def test_every_rank_logs_the_norms_of_the_whole_update() -> None:
    first, second = run_ranks(on_rank, 2, 2)
    assert first == second == pytest.approx(plain_norms(), rel=1e-4)
