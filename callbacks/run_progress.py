"""A progress bar for the whole run that costs microseconds per step.

Lightning's bars redraw every step and read each displayed metric from the device, which makes it wait. This one looks
at the clock, draws a few times per second, and shows what was logged last.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn
from typing_extensions import override

from callbacks.lib.part_timer import training_seconds
from callbacks.lib.terminal import terminal_width, wrap_pieces
from datamodules.ranges import NOT_NEGATIVE, check_ranges

__all__ = ["RunProgress", "format_metrics"]

_SHORTEST_BAR = 6
"""Columns, with a space before and after it."""


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Scalars on one line, without learning rates, single classes and the means of epochs.

    Example:
        >>> format_metrics({"val/accuracy": 0.99, "lr": 0.1, "val/accuracy_class_3": 0.98, "train/loss": 0.0312})
        'train/loss 0.0312  val/accuracy 0.9900'
    """
    shown = {
        name: value
        for name, value in metrics.items()
        if "_class_" not in name and name.split("/")[0] != "lr" and not name.endswith("_epoch")
    }
    return "  ".join(f"{name} {_number(float(value))}" for name, value in sorted(shown.items()))


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _epoch(trainer: pl.Trainer) -> str:
    of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{of}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _rate(speed: float) -> str:
    """Batches per second, or seconds per batch.

    Example:
        >>> _rate(2350.0), _rate(12.34), _rate(0.4)
        ('2,350 it/s', '12.3 it/s', '2.5 s/it')
    """
    return f"{speed:,.{1 if speed < 100 else 0}f} it/s" if speed >= 1 else f"{1 / speed:.1f} s/it"


def _figures(task: Task, metrics: str, room: int) -> str:
    """Of batches, rate, elapsed time, time left and metrics those that fit, the most important first.

    Args:
        room: columns beside the description.
    """
    speed, left = task.speed, task.time_remaining
    count = f"{task.completed:.0f}" + (f"/{task.total:.0f}" if task.total else "")
    figures = {
        "count": count,
        "rate": _rate(speed) if speed else "",
        "elapsed": _clock(task.elapsed or 0),
        "left": f"{_clock(left)} left" if left is not None else "",
        "metrics": metrics,
    }
    taken: set[str] = set()
    for name in ("rate", "elapsed", "count", "left", "metrics"):
        if figures[name] and len(figures[name]) + 1 <= room:
            taken.add(name)
            room -= len(figures[name]) + 1
    return " ".join(text for name, text in figures.items() if name in taken)


class RunProgress(ProgressBar):
    """Shows one bar for all epochs on a terminal, and one line per epoch elsewhere.

    Runs on: the start and end of training, evaluation and prediction, and every batch.

    Args:
        interval: seconds between two drawings.

    Example:
        >>> trainer = pl.Trainer(callbacks=[RunProgress()], logger=False, accelerator="cpu")
        >>> type(trainer.progress_bar_callback).__name__
        'RunProgress'
    """

    def __init__(self, interval: float = 0.5) -> None:
        super().__init__()
        check_ranges(interval=(interval, NOT_NEGATIVE))
        self.interval = interval
        self._enabled = True
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._next_drawing = 0.0
        self._metrics = ""
        self._epoch_began = 0.0
        self._validated = False
        self._batches = 0

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress.console.print(*args, **kwargs)
        elif self._enabled:
            print(*args, **kwargs)  # noqa: T201

    def _start(self, description: str, total: float | None) -> None:
        self._metrics = ""
        if self._enabled and sys.stderr is not None and sys.stderr.isatty():
            # Refreshed here: a thread that draws would interrupt the training loop at any moment.
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
                expand=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(description, total=total, figures="")

    def _draw(self, **changes: Any) -> None:
        """Draw now; callers on a hot path ask the clock first."""
        self._next_drawing = time.monotonic() + self.interval
        if self._progress is not None:
            self._progress.update(self._task, **changes)
            task = self._progress.tasks[0]
            room = self._progress.console.width - len(task.description) - _SHORTEST_BAR
            self._progress.update(self._task, figures=_figures(task, self._metrics, room), refresh=True)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @property
    def _is_due(self) -> bool:
        return self._progress is not None and time.monotonic() >= self._next_drawing

    # Training

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A resume in mid-epoch begins no epoch.
        self._epoch_began = training_seconds(trainer)
        epochs, batches = trainer.max_epochs or -1, trainer.num_training_batches
        total = epochs * batches if epochs > 0 else float("inf")
        if trainer.max_steps > 0:
            total = min(total, trainer.max_steps * trainer.accumulate_grad_batches)
        self._start("training", None if total == float("inf") else total)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_began, self._validated = training_seconds(trainer), False
        self._draw(description=_epoch(trainer))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due:
            self._metrics = format_metrics(trainer.callback_metrics)
            self._draw(completed=trainer.fit_loop.total_batch_idx + 1)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics
        # Lightning keeps the scores of an earlier epoch's validation.
        known = {name: value for name, value in metrics.items() if self._validated or not name.startswith("val")}
        means = {name.removesuffix("_epoch"): value for name, value in known.items() if name.endswith("_epoch")}
        self._metrics = format_metrics(known | means)
        seconds = training_seconds(trainer) - self._epoch_began
        pieces = [_epoch(trainer), *self._metrics.split("  "), f"{seconds:.1f} s"]
        if self._progress is not None:
            # Above the bar, where it stays.
            lines = wrap_pieces(pieces, self._progress.console.width)
            self._progress.console.print("\n".join(lines), highlight=False, soft_wrap=True)
            self._draw(completed=trainer.fit_loop.total_batch_idx + 1, description=_epoch(trainer))
        elif self._enabled:
            lines = wrap_pieces(pieces, terminal_width(sys.stdout) or sys.maxsize)
            print("\n".join(lines), flush=True)  # noqa: T201

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    # Evaluation and prediction: a bar of its own, or a word in the training's bar

    def _on_evaluation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = 0
        names = {"validate": "val", "test": "test", "predict": "predict"}
        if (command := trainer.state.fn.value if trainer.state.fn else "") in names:
            self._start(command, sum(getattr(trainer, f"num_{names[command]}_batches")))

    def _on_evaluation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batches += 1
        if not self._is_due:
            return
        if trainer.state.fn == "fit":
            self._draw(description=f"{_epoch(trainer)}, validating")
        else:
            self._draw(completed=self._batches)

    def _on_evaluation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True
        if trainer.state.fn != "fit":
            self._stop()

    on_validation_start = on_test_start = on_predict_start = _on_evaluation_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_evaluation_batch_end
    on_validation_end = on_test_end = on_predict_end = _on_evaluation_end
