"""A user's own recipe: a subclass in a file, with the command line in one line."""

import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from datamodules import MNISTDataModule
from recipes import MNISTClassifier, run


class Plain(MNISTClassifier):
    """A small network without BatchNorm or dropout; it learns slowly while there is a file ``slow`` in its folder.

    Args:
        hidden: width of the hidden layer.
    """

    title = "plain"

    def __init__(self, hidden: int = 24, **kwargs) -> None:
        super().__init__(**kwargs)

    def build_network(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 12 * 12, self.hparams.hidden),
            nn.ReLU(),
            nn.Linear(self.hparams.hidden, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if Path("slow").exists():
            time.sleep(0.4)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    run(Plain, MNISTDataModule)
