"""Tiny networks, data and the one table of all callbacks, for the tests that hold for each of them."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from torch import Tensor, nn

from callbacks.bn_recalibration import BNRecalibration
from callbacks.checkpointing.verified_io import CheckpointGuard
from callbacks.freezing import FreezeLayers
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.preemption import Preemption
from callbacks.rank_consistency import RankConsistency
from callbacks.run_progress import RunProgress
from callbacks.seed_control import SeedControl
from callbacks.step_metrics import FiniteWeights, StepMetrics, TrainingMonitor, TrainLoss
from callbacks.sync_bn import SyncBN
from callbacks.warmup_lr import WarmupLR
from callbacks.weight_averaging import WeightAveraging

PADDING = -100
CLASSES = 5

CALLBACKS: dict[str, Callable[[], pl.Callback]] = {
    "SeedControl": lambda: SeedControl(seed=1),
    "GradientAccumulation": lambda: GradientAccumulation(2),
    "GradientAccumulation, global batch": lambda: GradientAccumulation(global_batch_size=16),
    "WarmupLR": lambda: WarmupLR("60%", scale="linear", base_batch_size=8),
    "SyncBN": lambda: SyncBN(),
    "FreezeLayers": lambda: FreezeLayers(until="1", unfreeze={"0.0": "1 epochs", "0": "60%"}),
    "FiniteWeights": lambda: FiniteWeights(),
    "RankConsistency": lambda: RankConsistency(),
    "RunProgress": lambda: RunProgress(),
    "StepMetrics": lambda: StepMetrics(),
    "TrainLoss": lambda: TrainLoss(),
    "TrainingMonitor": lambda: TrainingMonitor(),
    "Preemption": lambda: Preemption(),
    "CheckpointGuard": lambda: CheckpointGuard(),
    "WeightAveraging": lambda: WeightAveraging(ema=0.9),
    "BNRecalibration": lambda: BNRecalibration(),
}
"""Every callback of the package with tiny settings. Build SeedControl before the module, as its docstring says."""

TOGETHER = tuple(name for name in CALLBACKS if "global batch" not in name)
"""One row of each class: what a run with everything uses."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


def silence() -> None:
    """Leave Lightning's greetings out of this process's output."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def on_ranks(world_size: int) -> dict[str, Any]:
    """The Trainer's arguments for processes that `run_ranks` started."""
    return {"strategy": "ddp", "devices": world_size} if world_size > 1 else {"devices": 1}


def quiet_trainer(*callbacks: pl.Callback, world_size: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer of one epoch on the ranks of `run_ranks`, silent, which saves what a callback saves."""
    silence()
    defaults: dict[str, Any] = {"max_epochs": 1, "callbacks": list(callbacks)}
    defaults["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    return pl.Trainer(**QUIET | defaults | on_ranks(world_size) | options)


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states of a module hold the same bits."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def noisy_images(n: int) -> tuple[Tensor, Tensor]:
    """Images of noise, with a mark of their class: float64 (n, 1, 5, 5) and int64 (n,)."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(CLASSES, (n,), generator=generator)
    inputs = torch.randn(n, 1, 5, 5, dtype=torch.float64, generator=generator)
    inputs[torch.arange(n), 0, targets] += 1
    return inputs, targets


def sentences(n: int, longest: int = 20) -> tuple[Tensor, Tensor]:
    """Sentences of 1 to `longest` tokens and a class for each token: int64 (n, longest), twice; the rest is padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(11, (n, longest), generator=generator)
    lengths = 1 + torch.randperm(n, generator=generator) % longest
    return tokens, (tokens * 3 % CLASSES).masked_fill(torch.arange(longest) >= lengths[:, None], PADDING)


def image_network(dropout: float = 0.0) -> nn.Module:
    """Convolution, batch normalization, dropout, linear: what splitting and interrupting a run can change."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(dropout), nn.Flatten())
    return nn.Sequential(body, nn.Linear(4 * 3 * 3, CLASSES))


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy over all targets that are no padding."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=PADDING, reduction=reduction)


class Tiny(pl.LightningModule):
    """An ordinary module: the mean loss over its batch, and the number of targets where samples hold several."""

    def __init__(self, network: nn.Module, optimizer: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = lambda: optimizer(network.parameters(), **settings)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        inputs, targets = batch
        loss = loss_of(self.network(inputs), targets)
        return {"loss": loss, "count": (targets != PADDING).sum()} if targets.dim() > 1 else loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = self.network(inputs)
        self.log("val_loss", loss_of(logits, targets))
        return {"logits": logits}

    def configure_optimizers(self) -> Any:
        return self.make_optimizer()
