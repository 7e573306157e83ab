"""A job that Slurm tells of its end is back in the queue before any of its processes leaves.

With ``srun --kill-on-bad-exit`` Slurm ends the whole step, and the request to requeue with it, as soon as one does.
"""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.end_to_end.test_launch import by_slurm, free_job
from tests.support.agents import updates_done, wait_until
from tests.support.nodes import Shell, start
from tests.support.scontrol import RUNNING, fake_scontrol


# The command line's watch ends a run 5 seconds after a rank has left.
@pytest.mark.parametrize("seconds", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_no_process_leaves_before_slurm_has_answered_and_rank_0_says_how_to_go_on(seconds: int, tmp_path: Path) -> None:
    job, scontrol = free_job(), fake_scontrol(tmp_path / "bin", seconds=seconds)
    args = ["--run-dir", str(tmp_path / "runs"), "--max-epochs", "100000"]
    shells = [Shell(tmp_path, f"shell{i}", args, env | scontrol) for i, env in enumerate(by_slurm(job))]
    last = tmp_path / "runs" / "failing" / f"slurm-{job}" / "checkpoints" / "last.ckpt"
    wait_until(lambda: updates_done(last) > 0, "a first checkpoint", 60)
    for shell in shells:
        os.kill(shell.process.pid or 0, signal.SIGUSR1)
    wait_until(lambda: not all(shell.process.is_alive() for shell in shells), "the end of a process", 30)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "bin" / "number").read_text()), signal.SIGKILL)
    ended = [shell.wait(30) for shell in shells]
    assert (tmp_path / "bin" / "asked").read_text() == f"requeue {job}\n"
    assert [end.status for end in ended] == [138, 138]
    assert re.search(rf"SIGUSR1 after update \d+: saved .*\n.*requeued as job {job}\n", ended[0].err)
    assert f"resume in a new job with --name slurm-{job}, or with\n  srun --nodes=1 --ntasks-per-node=2" in ended[0].out


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_job_that_lost_a_process_is_requeued_by_a_rank_that_lives(killed: int, tmp_path: Path) -> None:
    job = free_job()
    after = RUNNING.replace("RUNNING", "COMPLETING").replace("Restarts=0", "Restarts=1")
    scontrol = fake_scontrol(tmp_path / "bin", seconds=1, after=after, ends=True)
    fails = ["--fail-rank", str(killed), "--fail-how", "kill"]
    ended = start(tmp_path, [(fails, env | scontrol) for env in by_slurm(job)])
    assert [end.status for end in ended] == ([-9, 1] if killed == 0 else [1, -9])
    assert (tmp_path / "bin" / "asked").read_text() == f"requeue {job}\n"
    assert ended[1 - killed].err.endswith(f"crashed in native code\nrequeued as job {job}\n")
