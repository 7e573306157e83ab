"""Runs the recipe's command line up to its first step: ``python -m benchmarks.contenders.first_step FLAGS``.

The last line of the output is JSON with the time at which each phase ended.
"""

import time

MARKS = {"Python": time.time()}

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

from recipes.runner.start import quick_imports  # noqa: E402

with quick_imports():
    import torch  # noqa: F401

    MARKS["torch"] = time.time()
    import torchvision  # noqa: F401

    MARKS["torchvision"] = time.time()
    import lightning.pytorch as pl

    MARKS["lightning"] = time.time()
    from datamodules import MNISTDataModule
    from recipes import MNISTClassifier, run

    MARKS["recipes"] = time.time()


class Marks(pl.Callback):
    """Callback that prints the time of each phase after the first step, and ends the process."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        MARKS["command line"] = time.time()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        MARKS["data and set-up"] = time.time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        MARKS["first step"] = time.time()
        print("\n" + json.dumps(MARKS), flush=True)
        os._exit(0)


if __name__ == "__main__":
    run(MNISTClassifier, MNISTDataModule, lambda: [Marks()], sys.argv[1:])
