"""Lines of progress: numbers that are right for any limit, one line on a terminal, and nothing behind it."""

import io
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.run_progress import Pace, RunProgress, StatusLine, fitting
from callbacks.step_metrics import TrainLoss
from tests.support.tables import quiet_trainer


class Line(pl.LightningModule):
    """A straight line whose loss is 4 in each batch, and whose steps and validations take a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"loss": 4 + 0 * self.weight.sum(), "count": len(batch[0])}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that a reader sees at the end."""
        lines = []
        for line in self.getvalue().split("\n"):
            lines.append(line.rpartition("\x1b[K")[2].rpartition("\r")[2])
        return lines


def samples(count: int = 40) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=2)


def drawn(
    monkeypatch: pytest.MonkeyPatch, width: int = 200, seconds: float = 0.0, **options: Any
) -> tuple[list[str], Terminal]:
    """All lines that a run draws, and its terminal; a line for each batch."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    more = options.pop("callbacks", [])
    trainer = quiet_trainer(RunProgress(interval=0.0), TrainLoss(), *more, **options)
    trainer.fit(Line(), samples(), samples(8))
    assert sys.stderr is terminal
    return re.findall(r"\r\x1b\[K([^\r\n\x1b]+)", terminal.getvalue()), terminal


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines, terminal = drawn(monkeypatch, width, max_epochs=2)
    assert max(map(len, lines)) < width
    assert all(len(line) <= width for line in terminal.screen())
    last = next(line for line in reversed(lines) if "update" in line)
    before = {60: "loss 4.0000", 80: "samples/s"}.get(width, "samples/s  epoch 0:00 left")
    assert re.match(rf"epoch 2/2  update 20/20  .*{before}  run \d+:\d\d, 0:00 left$", last)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_steps": 7}, "update 7/7"),
        ({"max_steps": 27, "max_epochs": -1}, "update 7/7"),
        ({"max_epochs": 1, "limit_train_batches": 5}, "update 5/5"),
        ({"max_epochs": 1, "val_check_interval": 6}, "update 20/20"),
        ({"max_epochs": 1, "callbacks": [GradientAccumulation(4)]}, "update 5/5"),
    ],
)
def test_the_updates_are_those_that_the_run_will_make(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str
) -> None:
    lines, _ = drawn(monkeypatch, **options)
    last = next(line for line in reversed(lines) if "left" in line)
    assert expected in last
    assert re.search(r"run \d+:\d\d, 0:00 left", last)
    assert {"loss 4.0000" in line for line in lines if "update" in line or "batch" in line} == {True}


def test_the_loss_is_shown_from_the_first_update_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = drawn(monkeypatch, max_epochs=1, log_every_n_steps=50)
    updates = [line for line in lines if "update" in line]
    assert "update 1/20  loss 4.0000" in updates[0]
    assert "update 2/20  loss 4.0000" in updates[1]


def test_validation_has_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = drawn(monkeypatch, max_epochs=1, val_check_interval=10)
    assert [line for line in lines if "validating" in line] == [
        f"epoch 1/1  validating {n}/4" for n in (1, 2, 3, 4)
    ] * 2


def test_a_resumed_run_counts_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saves = ExactCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    drawn(monkeypatch, max_steps=13, callbacks=[saves])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    saves = ExactCheckpoint(tmp_path / "more", save_last=True)
    trainer = quiet_trainer(RunProgress(interval=0.0), TrainLoss(), saves, max_epochs=1)
    trainer.fit(Line(), samples(), samples(8), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    lines = re.findall(r"\r\x1b\[K(epoch[^\r\n\x1b]+)", terminal.getvalue())
    assert "update 14/20" in lines[0]
    assert "update 20/20" in next(line for line in reversed(lines) if "left" in line)


class Speaks(pl.Callback):
    """Prints in the middle of an epoch, on both streams."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 10:
            print("a warning", file=sys.stderr)
            print("a message")


def test_a_message_stands_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, terminal = drawn(monkeypatch, max_epochs=1, callbacks=[Speaks()])
    screen = terminal.screen()
    assert screen[0] == "a warning"
    assert screen[1] == "a message"
    assert screen[2].startswith("epoch 1/1  train/loss 4.0000")


class Fails(pl.Callback):
    """Ends a run in the middle of an epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 10:
            raise ValueError("on purpose")


def test_an_error_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trainer = quiet_trainer(RunProgress(interval=0.0), TrainLoss(), Fails(), max_epochs=1)
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(Line(), samples())
    assert sys.stderr is terminal
    assert terminal.screen() == [""]


def test_a_log_file_gets_a_line_per_log_interval(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress(log_interval=0.1)
    quiet_trainer(progress, TrainLoss(), max_epochs=1).fit(Line(seconds=0.02), samples())
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "update" in line]
    assert 1 <= len(lines) <= 5
    times = r"epoch 0:0\d left  run \d+:\d\d, 0:0\d left"
    assert re.fullmatch(rf"epoch 1/1  update \d+/20  loss 4\.0000  [\d,]+ samples/s  {times}", lines[-1])
    assert "\x1b" not in out
    quiet_trainer(RunProgress(), TrainLoss(), max_epochs=1).fit(Line(), samples())
    assert "update" not in capsys.readouterr().out


def test_an_epoch_that_max_steps_ends_has_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    quiet_trainer(RunProgress(), TrainLoss(), max_steps=3, max_epochs=-1).fit(Line(), samples())
    assert re.search(r"^epoch 1  train/loss 4\.0000  [\d.]+ s$", capsys.readouterr().out, re.M)


def test_the_pace_counts_evaluations_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace()
    assert math.isnan(pace.left(10, with_evaluations=True))
    for batches in range(1, 12):
        now[0] = 100.0 if batches == 1 else now[0] + 2.0  # The first takes long.
        pace.end_batch(batches)
    now[0] += 22.0
    pace.end_evaluation(11)
    assert pace.per_batch() == 2.0
    assert pace.left(5, with_evaluations=False) == 10.0
    assert pace.left(5, with_evaluations=True) == 10.0 + 5 * 2.0


def test_the_most_important_part_stays_in_the_narrowest_terminal() -> None:
    assert fitting([(0, "epoch 1/10"), (1, "update 5/10"), (2, "")], 3) == "epoch 1/10"


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    line = StatusLine()
    line.show("text")
    line.close()
    assert capsys.readouterr() == ("", "")
