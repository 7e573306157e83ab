"""Minimal Trainer for measurements, a loader that repeats one batch, and a context that suppresses messages."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

__all__ = ["Again", "bare_trainer", "suppress_output"]


class Again:
    """Loader that repeats one batch. It is not a `DataLoader`, so Lightning does not change it."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch = batch
        self.count = count
        self.batch_size = len(batch[0])

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.count))


def bare_trainer(callbacks: Sequence[pl.Callback], **options: Any) -> pl.Trainer:
    """Make a Trainer on one CPU without logger, checkpoints and progress bar."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        # Otherwise Lightning logs a note if variables of a launcher are set, and output would depend on the machine.
        "use_distributed_sampler": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | options))


@contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress warnings, Lightning's tips and our log messages."""
    logs = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_recipes")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)
