"""Runs the same training by the recipe's command line, and in a Trainer as Lightning's introductions show it."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from benchmarks.contenders.loops import LR, WEIGHT_DECAY, Job, LapClock, Laps, gpu_search
from benchmarks.harness.terminal import interruptible, unread_terminal
from benchmarks.sections.input_pipeline import stock_loader
from datamodules.images.mnist import MNISTDataModule
from recipes.mnist.recipe import MNISTClassifier
from recipes.runner.run import run

__all__ = ["recipe_loop", "stock_loop"]

_PLAIN = ("--shift", "0", "--rotation", "0", "--scale", "0")


def recipe_class(network: Callable[[], nn.Module]) -> type[MNISTClassifier]:
    """Return the class of the MNIST recipe with another network."""

    class Benchmarked(MNISTClassifier):
        """MNIST recipe with the network of the benchmark."""

        title = "benchmark"

        @override
        def build_network(self) -> nn.Module:
            return network()

    return Benchmarked


def recipe_loop(job: Job, root: Path, augment: bool, flags: Sequence[str] = ()) -> Laps:
    """Train by the command line at its defaults, with logging, scores, progress bar, checkpoints and exactness.

    Args:
        job: network, data and settings.
        root: folder of MNIST's files.
        augment: whether images are augmented, as is the recipe's default.
        flags: further flags of the command.
    """
    laps = job.laps(job.settling)
    with ExitStack() as stack:
        runs = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-"))
        stack.enter_context(gpu_search(as_lightning=True))
        stack.enter_context(interruptible())
        stack.enter_context(unread_terminal())
        settings = {
            "--data-dir": root, "--dataset": "mnist", "--run-dir": runs, "--precision": job.precision,
            "--batch-size": job.batch_size, "--max-epochs": 1, "--limit-train-batches": job.steps,
            "--limit-val-batches": 1, "--limit-test-batches": 1, "--lr": LR, "--weight-decay": WEIGHT_DECAY,
            "--accelerator": "cpu", "--val-fraction": 0.01,
        }  # fmt: skip
        args = [str(part) for pair in settings.items() for part in pair]
        run(
            recipe_class(job.network),
            MNISTDataModule,
            lambda: [LapClock(laps)],
            [*args, *(() if augment else _PLAIN), *flags],
        )
    return laps


class StockClassifier(pl.LightningModule):
    """LightningModule as in introductions to Lightning, which logs loss and accuracy in every step."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.accuracy = MulticlassAccuracy(10)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.accuracy, prog_bar=True)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)


def stock_loop(job: Job, root: Path) -> Laps:
    """Train on torchvision's MNIST with a DataLoader and a Trainer, all at their defaults: float32, contiguous."""
    laps = job.laps(job.settling)
    torch.manual_seed(1)
    with (
        tempfile.TemporaryDirectory(prefix="benchmarks-") as runs,
        gpu_search(as_lightning=True),
        interruptible(),
        unread_terminal(),
    ):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            limit_train_batches=job.steps,
            default_root_dir=runs,
            callbacks=[LapClock(laps)],
        )
        trainer.fit(StockClassifier(job.network()), stock_loader(root))
    return laps
