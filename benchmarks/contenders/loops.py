"""The same training in a plain PyTorch loop, in Fabric and in a bare Trainer; see also `peers` and `recipe_loops`.

All train one network with AdamW on the same uint8 images, and note when each step ends. None validates.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.harness.bare_trainer import bare_trainer
from benchmarks.harness.laps import Laps, PartsProfiler
from datamodules.mnist.data_module import DATASETS
from recipes.optim import build_optimizer
from recipes.parameter_groups import parameter_groups

__all__ = ["Job", "LapClock", "bare_loop", "fabric_loop", "gpu_search", "loop_with", "plain_loop"]

LR, WEIGHT_DECAY = 0.01, 0.05


@dataclass(frozen=True)
class Job:
    """What is trained.

    Args:
        images: uint8 of shape (n, 1, 28, 28).
        labels: int64 of shape (n,).
        steps: batches to train on, the settling included.
        precision: Lightning's name for it.
    """

    network: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    batch_size: int
    steps: int
    settling: int
    precision: str

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled, normalised batches, made from memory at once."""
        mean, std = DATASETS["mnist"].mean, DATASETS["mnist"].std
        order = torch.randperm(len(self.images))
        offset = torch.tensor(-mean / std)
        for step in range(self.steps):
            start = step * self.batch_size % (len(order) - self.batch_size + 1)
            rows = order[start : start + self.batch_size]
            images = torch.add(offset, self.images.index_select(0, rows), alpha=1 / (255 * std))
            yield images, self.labels.index_select(0, rows)

    def build(self) -> nn.Module:
        """A new network, the same each time, in the layout of the recipe."""
        torch.manual_seed(1)
        return self.network().to(memory_format=torch.channels_last)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The recipe's: AdamW in one kernel."""
        return build_optimizer("adamw", parameter_groups(module, WEIGHT_DECAY), LR)

    def autocast(self) -> Any:
        """What a plain loop does for the precision."""
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()


@contextmanager
def gpu_search(as_lightning: bool) -> Iterator[None]:
    """What importing Lightning does to Adam's every step, or what a program without Lightning has (see launch.py)."""
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
    """The limit: nothing but the training."""
    model, laps = job.build(), Laps(job.settling, job.steps)
    optimizer = job.optimizer(model)
    with gpu_search(as_lightning=False):
        laps.start()
        for images, labels in job:
            laps.lap("data")
            with job.autocast():
                loss = F.cross_entropy(model(images), labels)
            laps.lap("compute")
            optimizer.zero_grad()
            laps.lap("optimiser")
            loss.backward()
            laps.lap("compute")
            optimizer.step()
            laps.lap("optimiser")
            laps.end_step()
    return laps


def fabric_loop(job: Job) -> Laps:
    """The same with Fabric's module and optimiser."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=job.precision)  # type: ignore[arg-type]
    model = job.build()
    model, optimizer = fabric.setup(model, job.optimizer(model))
    return loop_with(fabric.backward, model, optimizer, job, as_lightning=True)


def loop_with(backward: Callable[[Tensor], Any], model: Any, optimizer: Any, job: Job, as_lightning: bool) -> Laps:
    """A plain loop over what a library has wrapped."""
    laps = Laps(job.settling, job.steps)
    with gpu_search(as_lightning):
        laps.start()
        for images, labels in job:
            laps.lap("data")
            loss = F.cross_entropy(model(images), labels)
            laps.lap("compute")
            optimizer.zero_grad()
            laps.lap("optimiser")
            backward(loss)
            laps.lap("compute")
            optimizer.step()
            laps.lap("optimiser")
            laps.end_step()
    return laps


class LapClock(pl.Callback):
    """Notes when each step of a Trainer ends, and has a `PartsProfiler` take over from the Trainer's own profiler."""

    def __init__(self, laps: Laps, profiler: PartsProfiler | None = None) -> None:
        self.laps, self.profiler = laps, profiler

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.profiler is not None:
            trainer.profiler = self.profiler  # type: ignore[attr-defined]
            self.profiler.watch(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.laps.end_step()


class Plain(pl.LightningModule):
    """The network in a LightningModule that logs nothing."""

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


def bare_loop(job: Job, profile: bool = False) -> Laps:
    """A Trainer with no logger, bar, checkpoint or callback."""
    laps = Laps(job.settling, job.steps)
    profiler = PartsProfiler(laps) if profile else None
    with gpu_search(as_lightning=True):
        trainer = bare_trainer([LapClock(laps, profiler)], precision=job.precision)
        trainer.fit(Plain(job), job)
    return laps
