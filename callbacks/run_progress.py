"""Progress of a run and the time left: one status line on a terminal, one line per minute in a log file.

Lightning's bars read each displayed metric from the device at every step. `RunProgress` looks at the clock.
"""

import math
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from callbacks.lib.lightning_internals import OneLightningCallback, callbacks_of
from callbacks.lib.targets import micro_batch_outputs
from callbacks.lib.updates import total_updates, updates_made
from callbacks.preemption import evaluation_batches
from callbacks.step_metrics import StepMetrics
from datamodules.errors import UserError
from datamodules.lightning import ProgressBar, Timer, pl
from datamodules.ranges import NOT_NEGATIVE, check_ranges


def format_seconds(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> [format_seconds(seconds) for seconds in (4.6, 75, 3_700, 200_000)]
        ['0:05', '1:15', '1:01:40', '2 days 7:33:20']
    """
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, rest = divmod(rest, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} day{'s' if days > 1 else ''} {clock}" if days else clock


class Pace:
    """Pace of a run since it was started or resumed: seconds per training batch, and of evaluations between batches.

    The first batch is not measured, since it loads, compiles and tunes.
    """

    def __init__(self) -> None:
        self.batches = -1
        """Measured batches; -1 before the first, unmeasured one."""
        self._seconds = 0.0
        self._evaluating = 0.0
        self._batches_evaluated = 0
        self._since: float | None = None

    def end_batch(self, batches: int) -> None:
        """Measure the batches up to now; called as a line is drawn or an evaluation begins.

        Args:
            batches: number of batches since the run was started or resumed.
        """
        now = time.monotonic()
        if self._since is not None and self.batches >= 0:
            self._seconds += now - self._since
        self._since = now
        self.batches = batches - 1

    def end_evaluation(self, batches: int) -> None:
        """Count the time since `end_batch` as time of an evaluation.

        Args:
            batches: as in `end_batch`.
        """
        now = time.monotonic()
        if self._since is not None:
            self._evaluating += now - self._since
        self._since = now
        self._batches_evaluated = batches

    def per_batch(self) -> float:
        """Return the seconds per training batch; NaN before the second one."""
        return self._seconds / self.batches if self.batches > 0 else math.nan

    def left(self, batches: float, with_evaluations: bool) -> float:
        """Return the seconds for further batches; NaN or infinite if unknown.

        Args:
            batches: number of further batches.
            with_evaluations: whether to add the time of evaluations, at the rate per batch so far.
        """
        evaluation_per_batch = 0.0
        if with_evaluations and self._batches_evaluated:
            evaluation_per_batch = self._evaluating / self._batches_evaluated
        return batches * (self.per_batch() + evaluation_per_batch)


def batches_left(trainer: pl.Trainer) -> float:
    """Return the number of batches until the end of the run; infinite if it is unknown or nothing ends the run."""
    try:
        updates = total_updates(trainer) - updates_made(trainer)
    except UserError:  # Under `GradientAccumulationScheduler` the number is unknown.
        return math.inf
    return max(0.0, updates) * trainer.accumulate_grad_batches


def unit_of_batches(trainer: pl.Trainer) -> str:
    """Return the unit of `batches_left`: "update", or "batch" if the Trainer accumulates gradients itself."""
    return "update" if trainer.accumulate_grad_batches == 1 else "batch"


def limited_by_time(trainer: pl.Trainer, seconds: float) -> float:
    """Return the seconds left, at most those that ``max_time`` allows."""
    for callback in callbacks_of(trainer):
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None:
            seconds = remaining if math.isnan(seconds) else min(seconds, remaining)
    return seconds


def columns() -> int:
    """Return the width of the terminal; the variable COLUMNS overrides it."""
    return shutil.get_terminal_size().columns


class _ClearingStream:
    """Stream that clears the status line before each write."""

    def __init__(self, stream: Any, line: "StatusLine") -> None:
        self.stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.clear()
        written: int = self.stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StatusLine:
    """Status line on standard error, if that is a terminal.

    From the first `show` to `close`, each write to ``sys.stdout`` and ``sys.stderr`` clears the line first, so that no
    message is appended to it. The next `show` draws it again.
    """

    def __init__(self) -> None:
        self._shown = False
        self._replaced_streams: dict[str, _ClearingStream] = {}

    def is_possible(self) -> bool:
        """Whether standard error is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Draw the line with a new text, cut at the terminal's width; do nothing without a terminal."""
        if not self.is_possible():
            return
        self._replace_streams()
        stream = self._terminal()
        stream.write(f"\r\x1b[K{text[: columns() - 1]}")
        stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._shown = False
            stream = self._terminal()
            stream.write("\r\x1b[K")
            stream.flush()

    def close(self) -> None:
        """Remove the line, and restore ``sys.stdout`` and ``sys.stderr``."""
        self.clear()
        for name, replacement in self._replaced_streams.items():
            # Another program may have replaced the stream since: then it stays.
            if getattr(sys, name) is replacement:
                setattr(sys, name, replacement.stream)
        self._replaced_streams = {}

    def _terminal(self) -> Any:
        return self._replaced_streams["stderr"].stream if "stderr" in self._replaced_streams else sys.stderr

    def _replace_streams(self) -> None:
        if self._replaced_streams:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced_streams[name] = _ClearingStream(stream, self)
                setattr(sys, name, self._replaced_streams[name])


_FIRST_LINE = 5.0
"""Seconds until the first line of a run in a log file."""

_STAGES = {"validate": "validating", "test": "testing", "predict": "predicting", "sanity_check": "sanity check"}


def shown_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return scalars by name, without learning rates, scores of single classes and means of epochs."""
    scores = {}
    for name in sorted(metrics):
        if "_class_" not in name and name.split("/")[0] != "lr" and not name.endswith("_epoch"):
            scores[name] = float(metrics[name])
    return scores


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Format the `shown_scores` on one line.

    Example:
        >>> format_metrics({"val/accuracy": 0.99, "lr": 0.1, "val/accuracy_class_3": 0.98, "train/loss": 0.0312})
        'train/loss 0.0312  val/accuracy 0.9900'
    """
    values = shown_scores(metrics).items()
    return "  ".join(f"{name} {value:.4f}" if abs(value) < 1e6 else f"{name} {value:.4g}" for name, value in values)


def _epoch(trainer: pl.Trainer) -> str:
    total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"


def _wrapped(line: str) -> str:
    """Wrap a line at the width of the terminal, and keep each name on one line with its value."""
    # No-break spaces hold the words of a column together; two spaces separate columns.
    glued = "  ".join(column.replace(" ", "\xa0") for column in line.split("  "))
    wrapped = textwrap.fill(glued, columns(), subsequent_indent="    ")
    return wrapped.replace("\xa0", " ")


def fitting(parts: Sequence[tuple[int, str]], width: int) -> str:
    """Join the most important parts of a line that fit into a width, in their order.

    Args:
        parts: pairs of importance, 0 is the highest, and text.

    Example:
        >>> fitting([(0, "epoch 1"), (2, "a long remark"), (1, "loss 0.5")], width=20)
        'epoch 1  loss 0.5'
    """
    shown = [(importance, text) for importance, text in parts if text]
    while len(shown) > 1 and len("  ".join(text for _, text in shown)) > width:
        shown.remove(max(shown))
    return "  ".join(text for _, text in shown)


class RunProgress(OneLightningCallback, ProgressBar):
    """Callback that shows the progress of a run: one line on a terminal, or lines in a log file.

    It prints another line after each epoch. The line shows the epoch and its updates, the time left of the epoch, the
    time since the run was started or resumed, and the time left of the run. With a `TrainLoss` it shows the mean loss
    of this rank in the epoch so far and the targets per second. A narrow terminal omits the less important parts.
    Messages that are printed meanwhile appear above the line.

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
        self._enabled = True
        self._validated = False
        self._next_drawing = 0.0
        self._next_log = math.inf
        self._evaluated = 0
        self._pace = Pace()
        self._metrics: StepMetrics | None = None
        self._first_batch = 0
        self._began = 0.0
        self._epoch_began = 0.0
        self._targets: tuple[float, float] | None = None
        """Number of this rank's targets and the time as the first line of the epoch was drawn."""

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def disable(self) -> None:
        self._enabled = False

    def _prints_lines(self) -> bool:
        """Whether to print lines: there is no terminal for the status line, or the output is kept in a file."""
        return not self.line.is_possible() or not sys.stdout.isatty()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._next_drawing

    def _draws(self) -> bool:
        """Whether there is something to draw on."""
        return self.line.is_possible()

    def _show(self, trainer: pl.Trainer, parts: Sequence[tuple[int, str]]) -> None:
        """Draw a line, and print it if the next one in a log file is due."""
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
        """Print a permanent line."""
        self._next_log = time.monotonic() + self.log_interval
        print(_wrapped(line) if sys.stdout.isatty() else line, flush=True)  # noqa: T201

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = [callback for callback in callbacks_of(trainer) if isinstance(callback, StepMetrics)]
        self._metrics = next((callback for callback in metrics if callback.targets is not None), None)
        self._pace = Pace()
        self._targets = None
        self._first_batch = trainer.fit_loop.total_batch_idx + 1
        self._began = time.monotonic()
        # Also here: a run that resumes within an epoch does not call `on_train_epoch_start`.
        self._epoch_began = self._began
        self._next_drawing = 0.0
        self._next_log = self._epoch_began + min(_FIRST_LINE, self.log_interval)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_began = time.monotonic()
        self._validated = False
        self._targets = None

    def _batches(self, trainer: pl.Trainer) -> int:
        """Return the number of batches since the run was started or resumed."""
        return trainer.fit_loop.total_batch_idx + 1 - self._first_batch

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due():
            self._pace.end_batch(self._batches(trainer))
            self._show(trainer, self._training_line(trainer, batch_idx + 1, outputs))

    def _training_line(self, trainer: pl.Trainer, done: int, outputs: Any) -> list[tuple[int, str]]:
        batches_of_run = batches_left(trainer)
        total = min(float(trainer.num_training_batches), done + batches_of_run)
        unit = unit_of_batches(trainer)
        epoch_left = limited_by_time(trainer, self._pace.left(total - done, with_evaluations=False))
        run_left = limited_by_time(trainer, self._pace.left(batches_of_run, with_evaluations=True))
        loss, rate = self._loss_and_rate(trainer, unit, outputs)
        run = f"run {format_seconds(time.monotonic() - self._began)}"
        if math.isfinite(run_left):
            run += f", {format_seconds(run_left)} left"
        return [
            (0, _epoch(trainer)),
            (1, f"{unit} {done:,}/{total:,.0f}" if math.isfinite(total) else f"{unit} {done:,}"),
            (2, loss),
            (4, rate),
            (5, f"epoch {format_seconds(epoch_left)} left" if math.isfinite(epoch_left) else ""),
            (3, run),
        ]

    def _loss_and_rate(self, trainer: pl.Trainer, unit: str, outputs: Any) -> tuple[str, str]:
        """Return the mean loss of the epoch so far, and targets or updates per second, as text."""
        seconds = self._pace.per_batch()
        rate = f"{1 / seconds:,.1f} {unit}{'es' if unit == 'batch' else 's'}/s" if seconds > 0 else ""
        if self._metrics is None:
            return format_metrics(trainer.callback_metrics), rate
        loss, targets = self._metrics.running()
        if not targets:
            # `StepMetrics` is called after this callback, so it does not hold the first batch of an epoch yet.
            losses = []
            for output in micro_batch_outputs(outputs):
                if output.get("loss") is not None:
                    losses.append(float(output["loss"]))
            loss = sum(losses) / len(losses) if losses else math.nan
        now = time.monotonic()
        if self._targets is None:
            self._targets = (targets, now)
        first_targets, first_time = self._targets
        if targets > first_targets:
            per_second = trainer.world_size * (targets - first_targets) / (now - first_time)
            rate = f"{per_second:,.0f} {self._metrics.targets}/s"
        return f"loss {loss:.4f}" if math.isfinite(loss) else "", rate

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        if not self._validated:
            # Lightning keeps the scores of an earlier epoch's validation.
            metrics = {name: value for name, value in metrics.items() if not name.startswith("val")}
        means: dict[str, Any] = {}
        for name, value in metrics.items():
            if name.endswith("_epoch"):
                means[name.removesuffix("_epoch")] = value
        if self._metrics is not None and not any(name.startswith("train/loss") for name in metrics):
            # In an epoch that max_steps has cut, `StepMetrics` has logged no mean.
            loss, targets = self._metrics.running()
            if targets:
                means["train/loss"] = loss
        self.line.clear()
        if self._enabled:
            scores = shown_scores(metrics | means)
            self._end_epoch(trainer, scores, time.monotonic() - self._epoch_began)

    def _end_epoch(self, trainer: pl.Trainer, scores: Mapping[str, float], seconds: float) -> None:
        """Print the scores and the time of an epoch."""
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
        total_text = f"/{total:,.0f}" if total else ""
        parts = [(2, f"{name} {self._evaluated:,}{total_text}")]
        if trainer.state.fn == "fit":
            parts.insert(0, (0, _epoch(trainer)))
        self._show(trainer, parts)

    def _on_evaluation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True
        self.line.clear()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pace.end_evaluation(self._batches(trainer))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_evaluation_batch_end
    on_validation_end = on_test_end = on_predict_end = _on_evaluation_end
