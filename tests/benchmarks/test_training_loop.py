import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.contenders.loops import Job, bare_loop, fabric_loop, plain_loop
from benchmarks.contenders.peers import peer_loops
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.laps import PARTS, Laps, PartsProfiler
from benchmarks.harness.terminal import interruptible, unread_terminal
from benchmarks.sections.input_pipeline import write_files

IMAGES = torch.randint(256, (64, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(64) % 10


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


JOB = Job(small, IMAGES, LABELS, batch_size=16, steps=6, settling=2, precision="32-true")
LOOPS: dict[str, Callable[[Job], Laps]] = {"Fabric": fabric_loop, "bare Trainer": bare_loop, **peer_loops()}


def trained(loop: Callable[[Job], Laps]) -> tuple[torch.Tensor, Laps]:
    """The first layer's weights after a loop, and its laps."""
    made: list[nn.Module] = []

    def network() -> nn.Module:
        made.append(small())
        return made[-1]

    with suppress_output(), unread_terminal():
        laps = loop(replace(JOB, network=network))
    return made[0].state_dict()["1.weight"], laps


def test_all_loops_learn_the_same_so_a_difference_in_time_is_none_of_work() -> None:
    expected, laps = trained(plain_loop)
    assert not torch.equal(expected, JOB.build().state_dict()["1.weight"])
    assert (len(laps.ends), laps.steps) == (6, 4)
    for name, loop in LOOPS.items():
        found, laps = trained(loop)
        assert torch.equal(found, expected), name
        assert laps.steps == 4, name


@pytest.mark.parametrize("loop", [plain_loop, partial(bare_loop, profile=True)], ids=["plain loop", "Trainer"])
def test_the_parts_of_a_step_add_up_to_it(loop: Callable[[Job], Laps]) -> None:
    laps = trained(loop)[1]
    split = laps.split()
    assert tuple(split) == PARTS
    assert sum(split.values()) == pytest.approx(laps.seconds * 1e6)
    assert min(split[part] for part in ("data", "compute", "optimiser")) > 0
    assert split["rest"] > -1  # A plain loop leaves nothing; the last lap ends just before the step.


def test_an_action_inside_another_is_counted_once() -> None:
    laps = Laps(settling=0, total=1)
    profiler = PartsProfiler(laps)
    with profiler.profile("[Strategy]Any.training_step"):
        time.sleep(0.01)
        with profiler.profile("[Callback]Any.on_before_backward"):
            time.sleep(0.05)
    assert 0.01 <= laps.parts["compute"] < 0.04
    assert laps.parts["callbacks"] >= 0.05
    laps.end_step()
    laps.add("compute", 9.0)
    assert laps.parts["compute"] < 0.04, "it came after the last step"


def test_the_recipe_runs_through_its_command_line_with_a_bar_on_an_unread_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.contenders.recipe_loops import recipe_loop

    write_files(tmp_path, IMAGES.squeeze(1).repeat(10, 1, 1), LABELS.repeat(10).to(torch.uint8))
    with suppress_output():
        laps = recipe_loop(JOB, tmp_path, augment=False, profile=True)
    assert (len(laps.ends), laps.steps) == (6, 4)
    split = laps.split()
    assert split["callbacks"] > 0
    assert split["optimiser"] > 0
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_in_whatever_is_measured_is_a_keyboard_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), interruptible():
        time.sleep(30)
    assert signal.getsignal(signal.SIGINT) == before


def test_what_is_printed_inside_goes_to_a_terminal_and_not_to_ours(capfd: pytest.CaptureFixture[str]) -> None:
    import sys

    with unread_terminal():
        assert sys.stderr.isatty()
        print("x" * 100_000, file=sys.stderr)  # More than an unread terminal holds.
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_command_line_on_the_unread_terminal_is_reported() -> None:
    with pytest.raises(RuntimeError, match="status 2: error: no such flag"), unread_terminal():
        print("a bar")
        print("error: no such flag", file=sys.stderr)
        sys.exit(2)
