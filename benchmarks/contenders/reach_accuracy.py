"""Trains to an accuracy on MNIST's test set, in a process of its own, and prints the seconds as JSON.

``python -m benchmarks.contenders.reach_accuracy '["classic", FOLDER, SEED, ACCURACY, EPOCHS, BATCHES]'``
"""

import json
import sys
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from typing_extensions import override

from datamodules.images.mnist import MNISTDataModule
from datamodules.loading.loaders import EvaluationLoader
from recipes.mnist.network import ClassicNet
from recipes.mnist.recipe import MNISTClassifier
from recipes.runner.run import run

__all__: list[str] = []


class Finish:
    """Recorder of the test accuracy after each epoch, and of the seconds since the first step without testing."""

    def __init__(self, target_accuracy: float) -> None:
        self.target_accuracy = target_accuracy
        self.began = time.time()
        self.testing = 0.0
        self.accuracies: list[float] = []

    @torch.no_grad()
    def reached(self, model: nn.Module, batches: Any, autocast: Any) -> bool:
        """Test the network, and return whether it reaches the accuracy."""
        start = time.time()
        training = model.training
        model.eval()
        right = count = 0
        for images, labels in batches:
            with autocast():
                right += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
        model.train(training)
        self.accuracies.append(right / count)
        self.testing += time.time() - start
        return self.accuracies[-1] >= self.target_accuracy

    def answer(self) -> dict[str, Any]:
        """Return the start, the seconds, the accuracies and whether the accuracy was reached."""
        return {
            "began": self.began,
            "seconds": time.time() - self.began - self.testing,
            "accuracies": self.accuracies,
            "reached": self.accuracies[-1] >= self.target_accuracy,
        }


def classic(folder: str, seed: int, target_accuracy: float, epochs: int, batches: int) -> dict[str, Any]:
    """Train as PyTorch's MNIST example: Adadelta with lr 1.0, times 0.7 after each epoch, and batches of 64."""
    torch.manual_seed(seed)
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_set, test_set = (datasets.MNIST(folder, train=part, transform=steps) for part in (True, False))
    train_loader = DataLoader(train_set, 64, shuffle=True)
    test_loader = DataLoader(test_set, 1000)
    model = ClassicNet()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    finish = Finish(target_accuracy)
    for _ in range(epochs):
        for number, (images, labels) in enumerate(train_loader):
            if number == batches:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if finish.reached(model, test_loader, _no_autocast):
            break
    return finish.answer()


def _no_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


class StopAt(pl.Callback):
    """Callback that tests after each epoch and ends the training when the accuracy is reached."""

    def __init__(self, target_accuracy: float) -> None:
        self.finish = Finish(target_accuracy)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        data.setup("test")
        self.test: EvaluationLoader = data.test_dataloader()
        self.finish.began = time.time()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.finish.reached(pl_module, self.test, trainer.precision_plugin.forward_context):
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.result = self.finish.answer()


def recipe(folder: str, seed: int, target_accuracy: float, epochs: int, batches: int) -> dict[str, Any]:
    """Train the recipe by its command line, with a schedule of `epochs` epochs."""
    stop = StopAt(target_accuracy)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as runs:
        flags = {
            "--data-dir": folder, "--dataset": "mnist", "--seed": seed, "--max-epochs": epochs, "--run-dir": runs,
            "--accelerator": "cpu", "--limit-test-batches": 1,
        } | ({"--limit-train-batches": batches} if batches >= 0 else {})  # fmt: skip
        args = [str(part) for pair in flags.items() for part in pair]
        run(MNISTClassifier, MNISTDataModule, lambda: [stop], args)
    return stop.result


if __name__ == "__main__":
    kind, *arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps({"classic": classic, "recipe": recipe}[kind](*arguments)))
