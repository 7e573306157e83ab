"""Runs the same training in a plain PyTorch loop, in Fabric and in a bare Trainer; see `peers` and `recipe_loops`.

All loops train one network with AdamW on the same uint8 images, and record when each step ends. None validates.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.harness.bare_trainer import bare_trainer
from datamodules.images.builtin_datasets import DATASETS
from recipes.optim import optimizer_by_name, parameter_groups

__all__ = ["Job", "LapClock", "Laps", "bare_loop", "fabric_loop", "gpu_search", "loop_with", "plain_loop"]

LR = 0.01
WEIGHT_DECAY = 0.05


class Laps:
    """Recorder of the end of each step. The first `settling` steps are slower and do not count."""

    def __init__(self, settling: int) -> None:
        self.settling = settling
        self.ends: list[float] = []

    def end_step(self) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())

    @property
    def steps(self) -> int:
        """Number of steps after the settling."""
        return len(self.ends) - self.settling

    @property
    def seconds(self) -> float:
        """Mean seconds of a step after the settling."""
        return (self.ends[-1] - self.ends[self.settling - 1]) / self.steps

    @property
    def lower_quartile(self) -> float:
        """Lower quartile of the seconds of a step, which other programs disturb less than the mean."""
        durations = sorted(b - a for a, b in pairwise(self.ends[self.settling - 1 :]))
        return durations[len(durations) // 4]


@dataclass(frozen=True)
class Job:
    """Network, data and settings of a training.

    Args:
        network: function that builds the network.
        images: uint8 of shape (n, 1, 28, 28).
        labels: int64 of shape (n,).
        batch_size: images of a batch.
        steps: number of batches to train on, including the settling.
        settling: number of first steps that do not count.
        precision: precision in Lightning's notation.
        laps: class of the recorder of steps.
    """

    network: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    batch_size: int
    steps: int
    settling: int
    precision: str
    laps: type[Laps] = Laps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled, normalized batches from memory."""
        (mean,), (std,) = DATASETS["mnist"].mean, DATASETS["mnist"].std
        order = torch.randperm(len(self.images))
        offset = torch.tensor(-mean / std)
        for step in range(self.steps):
            start = step * self.batch_size % (len(order) - self.batch_size + 1)
            rows = order[start : start + self.batch_size]
            images = torch.add(offset, self.images.index_select(0, rows), alpha=1 / (255 * std))
            yield images, self.labels.index_select(0, rows)

    def build(self) -> nn.Module:
        """Build a network with the same weights each time, in the memory format of the recipe."""
        torch.manual_seed(1)
        return self.network().to(memory_format=torch.channels_last)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the recipe: fused AdamW."""
        return optimizer_by_name("adamw", parameter_groups(module.parameters(), WEIGHT_DECAY), LR)

    def autocast(self) -> Any:
        """Return the autocast context of a plain loop."""
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()


@contextmanager
def gpu_search(as_lightning: bool) -> Iterator[None]:
    """Set how torch looks for GPUs in each step of Adam: as after an import of Lightning, or as without (launch.py)."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1" if as_lightning else "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def plain_loop(job: Job) -> Laps:
    """Train in a plain PyTorch loop, the lower limit of the time."""
    model = job.build()
    laps = job.laps(job.settling)
    optimizer = job.optimizer(model)
    with gpu_search(as_lightning=False):
        for images, labels in job:
            with job.autocast():
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            laps.end_step()
    return laps


def fabric_loop(job: Job) -> Laps:
    """Train with Fabric's module and optimizer."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=job.precision)  # type: ignore[arg-type]
    model = job.build()
    model, optimizer = fabric.setup(model, job.optimizer(model))
    return loop_with(fabric.backward, model, optimizer, job, as_lightning=True)


def loop_with(backward: Callable[[Tensor], Any], model: Any, optimizer: Any, job: Job, as_lightning: bool) -> Laps:
    """Train in a plain loop with a model and an optimizer that a library has wrapped."""
    laps = job.laps(job.settling)
    with gpu_search(as_lightning):
        for images, labels in job:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            laps.end_step()
    return laps


class LapClock(pl.Callback):
    """Callback that records each step of a Trainer's optimizer.

    By a hook of the optimizer, since foreign code in a hook of the Trainer would be seeded in each update.
    """

    def __init__(self, laps: Laps) -> None:
        self.laps = laps

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.laps.end_step())


class Plain(pl.LightningModule):
    """LightningModule of the network that logs nothing."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.network = job.build()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self)


def bare_loop(job: Job) -> Laps:
    """Train with a Trainer without logger, progress bar and checkpoints."""
    laps = job.laps(job.settling)
    with gpu_search(as_lightning=True):
        bare_trainer([LapClock(laps)], precision=job.precision).fit(Plain(job), job)
    return laps
