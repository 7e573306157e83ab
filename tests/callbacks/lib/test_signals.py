"""What Slurm is asked for a batch job, and when it is not asked; and a program that a signal ends at once."""

import os
import signal
from pathlib import Path

import pytest

from callbacks.lib import signals as slurm_job
from callbacks.lib.signals import (
    NotRequeued,
    Preempted,
    batch_job,
    ending_on_signals,
    is_batch_job,
    keep_until_imported,
    requeue,
)
from tests.support.scontrol import BATCH, RUNNING, fake_scontrol


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a scontrol that this process finds, and tells what it was asked."""

    def make(*args, **kwargs):
        slurm_job._slurm_says_batch.cache_clear()
        monkeypatch.setenv("PATH", fake_scontrol(tmp_path, *args, **kwargs)["PATH"])

    def asked() -> str:
        return (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""

    make.asked = asked
    yield make
    slurm_job._slurm_says_batch.cache_clear()


def test_a_batch_job_is_recognized_by_slurm_not_by_its_name(scontrol):
    scontrol(RUNNING.replace("BatchFlag=1", "BatchFlag=0"))
    assert not is_batch_job({})
    assert is_batch_job(BATCH | {"SLURM_JOB_NAME": "interactive"})
    assert not is_batch_job({"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "train"})
    scontrol(RUNNING)
    assert is_batch_job({"SLURM_JOB_ID": "71", "ENVIRONMENT": "production"}), "a script has replaced Slurm's variable"
    assert batch_job({"SLURM_JOB_ID": "71"}) == "71"


def test_a_running_job_is_requeued_once(scontrol):
    scontrol(after=RUNNING.replace("Restarts=0", "Restarts=1"))
    assert [requeue(BATCH), requeue(BATCH)] == ["71", "71"]
    assert scontrol.asked() == "requeue 71\n", "the second time it has been requeued already"
    assert requeue({}) is None


def test_a_job_whose_restarts_slurm_does_not_report_is_requeued(scontrol):
    scontrol(RUNNING.replace("Restarts=0 ", ""))
    assert requeue(BATCH) == "71"
    assert scontrol.asked() == "requeue 71\n"


def test_a_request_that_a_signal_ends_is_made_again(scontrol):
    scontrol(killed=2)
    assert requeue(BATCH) == "71"
    assert scontrol.asked() == "requeue 71\n"
    scontrol(killed=3)
    with pytest.raises(NotRequeued, match="scontrol show job 71 ended with -9"):
        requeue(BATCH)


def test_a_requeue_request_made_by_another_rank_succeeds(scontrol):
    scontrol(status=1, after=RUNNING.replace("Restarts=0", "Restarts=1"))
    assert requeue(BATCH) == "71"


@pytest.mark.parametrize(
    ("show", "status", "why"),
    [
        (RUNNING.replace("RUNNING", "CANCELLED"), 0, "because the job is CANCELLED"),
        (RUNNING.replace("Requeue=1", "Requeue=0"), 0, "because the job was submitted without --requeue"),
        (RUNNING, 1, "scontrol requeue 71 ended with 1"),
    ],
)
def test_a_job_that_cannot_be_requeued_gives_the_reason(show, status, why, scontrol):
    scontrol(show, status=status)
    with pytest.raises(NotRequeued, match=why):
        requeue(BATCH)
    assert bool(scontrol.asked()) == bool(status)


def test_without_scontrol_the_reason_names_it(monkeypatch, tmp_path):
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRequeued, match=r"scontrol show job 71 ended with 127: .*not found"):
        requeue(BATCH)


def test_a_signal_ends_the_block_that_says_so_at_once():
    def ignore(signum, frame):
        pass

    before = signal.signal(signal.SIGUSR1, ignore)
    try:
        with pytest.raises(Preempted) as ended, ending_on_signals(signal.SIGUSR1):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (ended.value.code, ended.value.at_once) == (138, True)
        assert signal.getsignal(signal.SIGUSR1) is ignore
        keep_until_imported(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Preempted) as ended, ending_on_signals(signal.SIGUSR1):
            pytest.fail("the signal that arrived before ends the block as it begins")
        assert ended.value.code == 138
    finally:
        signal.signal(signal.SIGUSR1, before)
