"""A job that Slurm tells of its end is back in the queue before any of its processes leaves.

With ``srun --kill-on-bad-exit`` Slurm ends the whole step, and the request to requeue with it, as soon as one does.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.test_launch import by_slurm, free_job
from tests.support.agents import updates_done, wait_until
from tests.support.nodes import Shell


def slow_scontrol(folder: Path, seconds: float) -> dict[str, str]:
    """A scontrol that takes its time, and what has the run find it; it writes its number, then what it was asked."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho $$ > {folder}/number\nsleep {seconds}\necho "$@" > {folder}/asked\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


# The command line's watch ends a run 5 seconds after a rank has left.
@pytest.mark.parametrize("seconds", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_no_process_leaves_before_slurm_has_answered_and_rank_0_says_how_to_go_on(seconds: int, tmp_path: Path) -> None:
    job, scontrol = free_job(), slow_scontrol(tmp_path, seconds)
    args = ["--run-dir", str(tmp_path / "runs"), "--max-epochs", "100000"]
    shells = [Shell(tmp_path, f"shell{i}", args, env | scontrol) for i, env in enumerate(by_slurm(job))]
    last = tmp_path / "runs" / "failing" / f"slurm-{job}" / "checkpoints" / "last.ckpt"
    wait_until(lambda: updates_done(last) > 0, "a first checkpoint", 60)
    for shell in shells:
        os.kill(shell.process.pid or 0, signal.SIGUSR1)
    wait_until(lambda: not all(shell.process.is_alive() for shell in shells), "the end of a process", 30)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), signal.SIGKILL)
    ended = [shell.wait(30) for shell in shells]
    assert (tmp_path / "asked").read_text() == f"requeue {job}\n"
    assert [end.status for end in ended] == [138, 138]
    assert f"; requeued as job {job}" in ended[0].err
    assert "resume with" in ended[0].out
