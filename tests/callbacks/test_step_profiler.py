"""A trace of some updates is written, its phases add up to their time, and the run goes on as without it."""

import gzip
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, TensorDataset

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lean_loop import LeanLoop
from callbacks.step_profiler import TABLE, TRACE, StepProfiler, phase_seconds
from datamodules.errors import UserError
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence

SETTINGS = QUIET | {"max_epochs": 2, "enable_progress_bar": False, "enable_checkpointing": False}


def fit(*callbacks: pl.Callback, **options: Any) -> tuple[pl.Trainer, list[torch.Tensor]]:
    silence()
    torch.manual_seed(1)
    module = Tiny(image_network(dropout=0.2).double(), torch.optim.AdamW, lr=0.01)
    trainer = pl.Trainer(callbacks=[LeanLoop(), GradientAccumulation(2), *callbacks], **SETTINGS | options)
    data = TensorDataset(*noisy_images(24))
    trainer.fit(module, DataLoader(data, 2), DataLoader(data, 8))
    return trainer, [*module.state_dict().values()]


def test_updates_are_traced_and_the_run_is_the_same_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, traced = fit(StepProfiler(tmp_path / "run", updates=2, skip=2))
    assert all(torch.equal(one, other) for one, other in zip(traced, fit()[1], strict=True))
    assert type(trainer.profiler) is PassThroughProfiler
    events = json.loads(gzip.decompress((tmp_path / "run" / TRACE).read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    # Two updates of two micro-batches each.
    for part, count in {"ProfilerStep": 2, "Strategy.training_step": 4, "train_dataloader_next": 4}.items():
        assert sum(part in name for name in names if name.startswith(("[", "Prof"))) == count, part
    out = capsys.readouterr().out
    assert (tmp_path / "run" / TABLE).read_text() in out
    for text in ("profile of 2 updates", "forward", "backward", "optimizer", "data wait", "ui.perfetto.dev"):
        assert text in out


def test_phases_are_without_those_in_them_and_add_up() -> None:
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace, record_function("[Callback]Outer.hook"):
        with record_function("[LightningModule]Tiny.optimizer_step"):
            with record_function("[Strategy]SingleDeviceStrategy.training_step"):
                torch.randn(300, 300) @ torch.randn(300, 300)
            torch.randn(100, 100)
        with record_function("[_TrainingEpochLoop].train_dataloader_next"):
            torch.randn(100)
    durations = {event.name: event.time_range.elapsed_us() / 1e6 for event in trace.events()}
    seconds = phase_seconds(trace.events())
    forward = durations["[Strategy]SingleDeviceStrategy.training_step"]
    assert sum(seconds.values()) == pytest.approx(durations["[Callback]Outer.hook"])
    assert seconds["forward"] == pytest.approx(forward)
    assert seconds["optimizer"] == pytest.approx(durations["[LightningModule]Tiny.optimizer_step"] - forward)


def test_a_run_that_is_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(StepProfiler(tmp_path / "run", skip=12))
    assert "nothing was profiled: the run ended before update 14" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_run_that_ends_in_the_trace_writes_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(StepProfiler(tmp_path, updates=100, skip=4))
    assert "ms per update" in capsys.readouterr().out
    assert (tmp_path / TRACE).is_file()


def test_two_profilers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="profiler=SimpleProfiler would trace at the same time"):
        fit(StepProfiler(tmp_path), profiler=SimpleProfiler())
