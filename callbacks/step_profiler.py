"""A trace of some steps in the middle of training, and where their time went.

Lightning's `PyTorchProfiler` observes every hook of the whole run, on every rank and in evaluation. Here a few updates
are traced on rank 0, under Lightning's own names, and the run goes on as before.
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from typing_extensions import override

from callbacks.lib.best_effort import best_effort
from callbacks.lib.terminal import fit_rows
from callbacks.lib.trainer_attributes import profiler_of, set_profiler
from datamodules.errors import UserError
from datamodules.ranges import COUNT, Range, check_ranges

__all__ = ["StepProfiler", "phase_seconds"]

TRACE, TABLE = "trace.json.gz", "profile.txt"
_WARMUP = 1  # Of torch's profiler, whose first traced step is slower.
_PHASES = {
    "train_dataloader_next": "data wait",
    "batch_to_device": "transfer to device",
    "Strategy.training_step": "forward",
    "Strategy.backward": "backward",
    "optimizer_step": "optimizer",
    "save_checkpoint": "saving",
    "validation_step": "validation",
    "val_next": "validation",
    "[Callback]": "callbacks",
    "ProfilerStep": "rest of the loop",
}


def _phase(name: str) -> str:
    """The phase that an event begins; "" for an operation."""
    if not name.startswith(("[", "ProfilerStep", "save_checkpoint")):
        return ""
    return next((phase for part, phase in _PHASES.items() if part in name), "")


def phase_seconds(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Seconds of the host by phase of the step, each without the phases in it, so that they add up.

    Args:
        events: of a trace under Lightning's names.
    """
    seconds = dict.fromkeys(_PHASES.values(), 0.0)
    for event in events:
        if not (phase := _phase(event.name)):
            continue
        elapsed = event.time_range.elapsed_us() / 1e6
        seconds[phase] += elapsed
        parent = event.cpu_parent
        while parent is not None and not _phase(parent.name):
            parent = parent.cpu_parent
        if parent is not None:
            seconds[_phase(parent.name)] -= elapsed
    return seconds


def _tables(trace: profile, updates: int, labels: Collection[str], most: int = 12) -> list[str]:
    """Where the time of the traced updates went: by phase, and by operation, which are all events but the labels."""
    phases = phase_seconds(trace.events())
    total = sum(phases.values()) or 1.0
    rows = [
        {"phase": name, "ms per update": f"{1e3 * seconds / updates:.2f}", "share": f"{seconds / total:.1%}"}
        for name, seconds in sorted(phases.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    averages = [
        average for average in trace.key_averages() if average.key not in labels and "ProfilerStep" not in average.key
    ]
    on_device = sum(average.self_device_time_total for average in averages) > 0
    times = {id(a): a.self_device_time_total if on_device else a.self_cpu_time_total for a in averages}
    averages.sort(key=lambda average: -times[id(average)])
    of_all = sum(times.values()) or 1.0
    operations = [
        {
            "operation": average.key if len(average.key) <= 40 else f"{average.key[:37]}...",
            "calls": f"{average.count / updates:.4g}",
            "ms per update": f"{times[id(average)] / 1e3 / updates:.2f}",
            "share": f"{times[id(average)] / of_all:.1%}",
        }
        for average in averages[:most]
    ]
    where = "device" if on_device else "CPU"
    return [*fit_rows(rows, None), "", f"operations by their own time on the {where}:", *fit_rows(operations, None)]


class _Labels(Profiler):
    """Marks what Lightning does in a trace of torch's profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._open: dict[str, list[Any]] = {}

    @override
    def start(self, action_name: str) -> None:
        label = record_function(action_name)
        label.__enter__()
        self.names.add(action_name)
        self._open.setdefault(action_name, []).append(label)

    @override
    def stop(self, action_name: str) -> None:
        # What had begun before the trace has no label.
        if labels := self._open.get(action_name):
            labels.pop().__exit__(None, None, None)


class StepProfiler(pl.Callback):
    """Traces some updates on rank 0, and prints where their time went.

    The folder gets ``trace.json.gz``, which https://ui.perfetto.dev and chrome://tracing open, and the tables as
    ``profile.txt``. Afterwards the run goes on as without: its weights are the same to the bit.

    Runs on: `on_train_batch_end`.

    Args:
        folder: for the files; None writes none.
        updates: how many are traced.
        skip: updates before the trace, which are slower or belong to the start.

    Raises:
        UserError: the Trainer has a profiler already.

    Example:
        >>> trainer = pl.Trainer(callbacks=[StepProfiler("profile")], logger=False, accelerator="cpu")
    """

    def __init__(self, folder: str | Path | None, updates: int = 10, skip: int = 10) -> None:
        check_ranges(updates=(updates, COUNT), skip=(skip, Range(0, whole=True)))
        self.folder = None if folder is None else Path(folder)
        self.updates, self.skip = updates, skip
        self._trace: profile | None = None
        self._first = 0
        self._done, self._written = True, False
        self._step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        other = type(profiler_of(trainer))
        if other is not PassThroughProfiler:
            raise UserError(f"profile=True and profiler={other.__name__} would trace at the same time: leave one out")
        self._done, self._written = not trainer.is_global_zero, False
        self._step = trainer.global_step
        self._first = self._step + max(1, self.skip)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._done or step == self._step:
            return
        self._step = step
        if self._trace is not None:
            self._trace.step()
            if step >= self._first + _WARMUP + self.updates:
                self._end(trainer)
        elif step >= self._first:
            self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # It would print of its own start, and of a missing GPU.
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        plan = schedule(wait=0, warmup=_WARMUP, active=self.updates, repeat=1)
        labels = _Labels()

        def write(trace: profile) -> None:
            self._write(trainer, trace, labels.names)

        self._trace = profile(activities=activities, schedule=plan, on_trace_ready=write)
        set_profiler(trainer, labels)
        self._trace.start()

    def _end(self, trainer: pl.Trainer) -> None:
        self._done = True
        if self._trace is not None:
            trace, self._trace = self._trace, None
            set_profiler(trainer, PassThroughProfiler())
            trace.stop()

    def _write(self, trainer: pl.Trainer, trace: profile, labels: Collection[str]) -> None:
        """Write and print what was traced."""
        self._written = True
        updates = sum(event.name.startswith("ProfilerStep") for event in trace.events())
        lines = [f"profile of {updates} updates, on rank 0:", *_tables(trace, max(1, updates), labels)]
        if self.folder is not None:
            with best_effort(TRACE):
                self.folder.mkdir(parents=True, exist_ok=True)
                trace.export_chrome_trace(str(self.folder / TRACE))
                (self.folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
                lines.append(f"the trace is {self.folder / TRACE}: open it in https://ui.perfetto.dev")
        trainer.print("\n".join(lines))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)
        if trainer.is_global_zero and not self._written:
            trainer.print(f"nothing was profiled: the run ended before update {self._first + _WARMUP + 1:,}")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end(trainer)
