"""Progress of a run and the time left: one line on a terminal, a line every minute in a log file.

Lightning's bars read each displayed metric from the device at every step. `RunProgress` looks at the clock.
"""

import math
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from callbacks.lib.hooks import callbacks_of
from callbacks.lib.pace import Pace, batches_left, format_seconds, limited_by_time, unit_of_batches
from callbacks.lib.status_line import StatusLine, columns
from callbacks.lib.targets import micro_batch_outputs
from callbacks.preemption import evaluation_batches
from callbacks.train_loss import TrainLoss
from datamodules.ranges import NOT_NEGATIVE, check_ranges

_FIRST_LINE = 5.0
"""Seconds after which a log file has the first line of a run."""

_STAGES = {"validate": "validating", "test": "testing", "predict": "predicting", "sanity_check": "sanity check"}


def shown_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Scalars by name, without learning rates, single classes and the means of epochs."""
    shown = [n for n in sorted(metrics) if "_class_" not in n and n.split("/")[0] != "lr" and not n.endswith("_epoch")]
    return {name: float(metrics[name]) for name in shown}


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """The `shown_scores` on one line.

    Example:
        >>> format_metrics({"val/accuracy": 0.99, "lr": 0.1, "val/accuracy_class_3": 0.98, "train/loss": 0.0312})
        'train/loss 0.0312  val/accuracy 0.9900'
    """
    values = shown_scores(metrics).items()
    return "  ".join(f"{name} {value:.4f}" if abs(value) < 1e6 else f"{name} {value:.4g}" for name, value in values)


def _epoch(trainer: pl.Trainer) -> str:
    of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{of}"


def _wrapped(line: str) -> str:
    """A line as those of a terminal, with each name beside its value."""
    glued = "  ".join(part.replace(" ", "\xa0") for part in line.split("  "))
    wrapped = textwrap.fill(glued, columns(), subsequent_indent="    ")
    return wrapped.replace("\xa0", " ")


def fitting(parts: Sequence[tuple[int, str]], width: int) -> str:
    """The most important parts of a line that fit into a width, in their order.

    Args:
        parts: importance, 0 is the highest, and text.

    Example:
        >>> fitting([(0, "epoch 1"), (2, "a long remark"), (1, "loss 0.5")], width=20)
        'epoch 1  loss 0.5'
    """
    kept = [part for part in parts if part[1]]
    while len(kept) > 1 and len("  ".join(text for _, text in kept)) > width:
        kept.remove(max(kept))
    return "  ".join(text for _, text in kept)


class RunProgress(ProgressBar):
    """Keeps one line up to date on a terminal, or prints lines into a log file, and prints one after each epoch.

    The line shows the epoch, its updates, the time left of the epoch and of the run, and, with a `TrainLoss`, the mean
    loss of the epoch so far on this rank and the targets per second. On a narrow terminal the less important parts are
    omitted. A message that is printed meanwhile appears above the line.

    Runs on: the start and end of training and of evaluation, and every batch.

    Args:
        interval: seconds between two drawings on a terminal.
        log_interval: seconds between two lines where the output is no terminal; the first comes after 5 seconds.
    """

    def __init__(self, interval: float = 0.5, log_interval: float = 60.0) -> None:
        super().__init__()
        check_ranges(interval=(interval, NOT_NEGATIVE), log_interval=(log_interval, NOT_NEGATIVE))
        self.interval = interval
        self.log_interval = log_interval
        self.line = StatusLine()
        self._enabled, self._validated = True, False
        self._next_drawing, self._next_log, self._evaluated = 0.0, math.inf, 0
        self._pace = Pace()
        self._train_loss: TrainLoss | None = None
        self._first_batch = 0
        self._epoch_began = 0.0
        self._targets: tuple[float, float] | None = None
        """Targets of this rank in the epoch, and the time, when its first line was drawn."""

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def disable(self) -> None:
        self._enabled = False

    def _prints_lines(self) -> bool:
        """Whether lines are to be printed: no terminal shows how far the run is, or the lines are kept in a file."""
        return not self.line.is_possible() or not sys.stdout.isatty()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._next_drawing

    def _draws(self) -> bool:
        """Whether there is something to draw on."""
        return self.line.is_possible()

    def _show(self, trainer: pl.Trainer, parts: Sequence[tuple[int, str]]) -> None:
        """Draw a line, and print it where it is time for one in a file."""
        now = time.monotonic()
        if self._enabled:
            self._draw(trainer, parts)
        draws = self._enabled and self._draws()
        self._next_drawing = now + self.interval if draws else self._next_log

    def _draw(self, trainer: pl.Trainer, parts: Sequence[tuple[int, str]]) -> None:
        self.line.show(fitting(parts, columns() - 1))
        if time.monotonic() >= self._next_log and self._prints_lines():
            self._print(fitting(parts, 1_000))

    def _print(self, line: str) -> None:
        """Print a line that stays."""
        self._next_log = time.monotonic() + self.log_interval
        print(_wrapped(line) if sys.stdout.isatty() else line, flush=True)  # noqa: T201

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses = [callback for callback in callbacks_of(trainer) if isinstance(callback, TrainLoss)]
        self._train_loss = losses[0] if losses else None
        self._pace, self._targets = Pace(), None
        self._first_batch = trainer.fit_loop.total_batch_idx + 1
        # A resume in mid-epoch begins no epoch.
        self._epoch_began = time.monotonic()
        self._next_drawing, self._next_log = 0.0, self._epoch_began + min(_FIRST_LINE, self.log_interval)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_began, self._validated, self._targets = time.monotonic(), False, None

    def _batches(self, trainer: pl.Trainer) -> int:
        """Batches that were made since the run was started or resumed."""
        return trainer.fit_loop.total_batch_idx + 1 - self._first_batch

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due():
            self._pace.end_batch(self._batches(trainer))
            self._show(trainer, self._training_line(trainer, batch_idx + 1, outputs))

    def _training_line(self, trainer: pl.Trainer, done: int, outputs: Any) -> list[tuple[int, str]]:
        of_run = batches_left(trainer)
        total = min(float(trainer.num_training_batches), done + of_run)
        unit = unit_of_batches(trainer)
        of_epoch = limited_by_time(trainer, self._pace.left(total - done, with_evaluations=False))
        run_left = limited_by_time(trainer, self._pace.left(of_run, with_evaluations=True))
        loss, rate = self._loss_and_rate(trainer, unit, outputs)
        return [
            (0, _epoch(trainer)),
            (1, f"{unit} {done:,}/{total:,.0f}" if math.isfinite(total) else f"{unit} {done:,}"),
            (2, loss),
            (4, rate),
            (5, f"epoch {format_seconds(of_epoch)} left" if math.isfinite(of_epoch) else ""),
            (3, f"run {format_seconds(run_left)} left" if math.isfinite(run_left) else ""),
        ]

    def _loss_and_rate(self, trainer: pl.Trainer, unit: str, outputs: Any) -> tuple[str, str]:
        """The mean loss of the epoch so far, and targets or updates per second."""
        seconds = self._pace.per_batch()
        rate = f"{1 / seconds:,.1f} {unit}{'es' if unit == 'batch' else 's'}/s" if seconds > 0 else ""
        if self._train_loss is None:
            return format_metrics(trainer.callback_metrics), rate
        loss, targets = self._train_loss.running()
        if not targets:  # It is called after this callback, so that the first batch of an epoch is not in it yet.
            outputs_of_batches = micro_batch_outputs(trainer, outputs)
            losses = [float(each["loss"]) for each in outputs_of_batches if each.get("loss") is not None]
            loss = sum(losses) / len(losses) if losses else math.nan
        now = time.monotonic()
        if self._targets is None:
            self._targets = targets, now
        elif (more := targets - self._targets[0]) > 0:
            rate = f"{trainer.world_size * more / (now - self._targets[1]):,.0f} {self._train_loss.targets}/s"
        return f"loss {loss:.4f}" if math.isfinite(loss) else "", rate

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning keeps the scores of an earlier epoch's validation.
        known = {n: v for n, v in trainer.callback_metrics.items() if self._validated or not n.startswith("val")}
        ended = {name: value for name, value in known.items() if name.endswith("_epoch")}
        means: dict[str, Any] = {name.removesuffix("_epoch"): value for name, value in ended.items()}
        if self._train_loss is not None and not any(name.startswith("train/loss") for name in known):
            loss, targets = self._train_loss.running()  # An epoch that max_steps has ended has no mean of its own.
            means |= {"train/loss": loss} if targets else {}
        self.line.clear()
        if self._enabled:
            scores = shown_scores(known | means)
            self._end_epoch(trainer, scores, time.monotonic() - self._epoch_began)

    def _end_epoch(self, trainer: pl.Trainer, scores: Mapping[str, float], seconds: float) -> None:
        """Print what an epoch has ended with."""
        self._print("  ".join(filter(None, (_epoch(trainer), format_metrics(scores), f"{seconds:.1f} s"))))

    def _close(self, *args: Any, **kwargs: Any) -> None:
        self.line.close()

    on_exception = teardown = on_train_end = _close

    def _on_evaluation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluated = 0
        if trainer.state.fn != "fit":
            self._next_log = time.monotonic() + min(_FIRST_LINE, self.log_interval)
        elif not trainer.sanity_checking:
            self._pace.end_batch(self._batches(trainer))

    on_validation_start = on_test_start = on_predict_start = _on_evaluation_start

    def _on_evaluation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._evaluated += 1
        if not self._is_due() or trainer.state.stage is None:
            return
        name = _STAGES.get(trainer.state.stage.value, trainer.state.stage.value)
        total = evaluation_batches(trainer)
        of = f"/{total:,.0f}" if total else ""
        parts = [(2, f"{name} {self._evaluated:,}{of}")]
        self._show(trainer, [(0, _epoch(trainer)), *parts] if trainer.state.fn == "fit" else parts)

    def _on_evaluation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True
        self.line.clear()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pace.end_evaluation(self._batches(trainer))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_evaluation_batch_end
    on_validation_end = on_test_end = on_predict_end = _on_evaluation_end
