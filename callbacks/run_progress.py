"""A progress line for the whole run that costs microseconds per step.

Lightning's bars read each displayed metric from the device at every step. This one draws a few times per second.
"""

import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from datamodules.ranges import NOT_NEGATIVE, check_ranges


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Scalars on one line, without learning rates, single classes and the means of epochs.

    Example:
        >>> format_metrics({"val/accuracy": 0.99, "lr": 0.1, "val/accuracy_class_3": 0.98, "train/loss": 0.0312})
        'train/loss 0.0312  val/accuracy 0.9900'
    """
    shown = [n for n in sorted(metrics) if "_class_" not in n and n.split("/")[0] != "lr" and not n.endswith("_epoch")]
    values = [(name, float(metrics[name])) for name in shown]
    return "  ".join(f"{name} {value:.4f}" if abs(value) < 1e6 else f"{name} {value:.4g}" for name, value in values)


def _epoch(trainer: pl.Trainer) -> str:
    of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{of}"


def _wrapped(line: str) -> str:
    """A line as those of a terminal, with each name beside its value."""
    glued = "  ".join(part.replace(" ", "\xa0") for part in line.split("  "))
    wrapped = textwrap.fill(glued, shutil.get_terminal_size().columns, subsequent_indent="    ")
    return wrapped.replace("\xa0", " ")


class RunProgress(ProgressBar):
    """Keeps one line up to date on a terminal, and prints one after each epoch.

    Runs on: the start and end of training and of evaluation, and every batch.

    Args:
        interval: seconds between two drawings.
    """

    def __init__(self, interval: float = 0.5) -> None:
        super().__init__()
        check_ranges(interval=(interval, NOT_NEGATIVE))
        self.interval = interval
        self._enabled, self._validated = True, False
        self._next_drawing, self._evaluated = 0.0, 0

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def disable(self) -> None:
        self._enabled = False

    def _on_terminal(self) -> bool:
        return self._enabled and sys.stderr is not None and sys.stderr.isatty()

    def _write(self, text: str) -> None:
        if self._on_terminal():
            # At the beginning of the line, which is cleared.
            sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def _is_due(self) -> bool:
        if time.monotonic() < self._next_drawing:
            return False
        self._next_drawing = time.monotonic() + self.interval
        return self._on_terminal()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A resume in mid-epoch begins no epoch.
        self._epoch_began, self._first = time.monotonic(), trainer.fit_loop.batch_idx + 1

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_began, self._first, self._validated = time.monotonic(), 0, False

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due():
            rate = (batch_idx + 1 - self._first) / max(1e-9, time.monotonic() - self._epoch_began)
            done = f"batch {batch_idx + 1}/{trainer.num_training_batches}"
            self._write(f"{_epoch(trainer)}  {done}  {rate:,.1f} it/s  {format_metrics(trainer.callback_metrics)}")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning keeps the scores of an earlier epoch's validation.
        known = {n: v for n, v in trainer.callback_metrics.items() if self._validated or not n.startswith("val")}
        means = {name.removesuffix("_epoch"): value for name, value in known.items() if name.endswith("_epoch")}
        self._write("")
        if self._enabled:
            parts = _epoch(trainer), format_metrics(known | means), f"{time.monotonic() - self._epoch_began:.1f} s"
            line = "  ".join(filter(None, parts))
            print(_wrapped(line) if sys.stdout.isatty() else line, flush=True)  # noqa: T201

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._write("")

    def _on_evaluation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._evaluated += 1
        if self._is_due() and trainer.state.stage is not None:
            self._write(f"{trainer.state.stage.value.replace('_', ' ')}: batch {self._evaluated}")

    def _on_evaluation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated, self._evaluated = True, 0
        self._write("")

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_evaluation_batch_end
    on_validation_end = on_test_end = on_predict_end = _on_evaluation_end
