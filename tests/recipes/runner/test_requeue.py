"""A batch job that has lost a process is requeued if it has saved something new."""

from pathlib import Path

import pytest

from recipes.runner.folder import record_failure, requeue_after_loss
from tests.recipes.runner.test_folder import make_run
from tests.support.scontrol import BATCH, RUNNING, fake_scontrol


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this process one of a batch job with so many restarts."""

    def become(restarts: int, show: str = RUNNING) -> None:
        env = BATCH | {"SLURM_RESTART_COUNT": str(restarts)}
        env |= fake_scontrol(tmp_path / "bin", show.replace("Restarts=0", f"Restarts={restarts}"))
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    return become


def test_a_job_is_requeued_if_it_has_saved_something_new(job, tmp_path):
    last = make_run(tmp_path, "slurm-71", 4)
    run = str(last.parents[1])
    job(50)
    assert requeue_after_loss(run, 3) == "requeued as job 71"
    ended = "not requeued, because nothing new was saved; to do so: scontrol requeue 71"
    assert requeue_after_loss(run, 4) == requeue_after_loss(None, 0) == ended
    last.write_bytes(b"cut off")
    assert requeue_after_loss(run, 3) == ended


def test_a_job_that_may_not_requeue_resumes_in_a_new_one(job, tmp_path):
    job(0, RUNNING.replace("Requeue=1", "Requeue=0"))
    run = make_run(tmp_path, "slurm-71").parents[1]
    why = "not requeued, because the job was submitted without --requeue"
    assert requeue_after_loss(str(run), 0) == f"{why}; resume in a new job with --name slurm-71"


def test_a_job_that_failed_by_an_error_is_not_requeued(job, tmp_path, monkeypatch):
    folder = str(make_run(tmp_path, "slurm-71").parents[1])
    job(0)
    record_failure(folder, 1, "ValueError: a bad pixel")
    line = "not requeued, because of an error of the program: rank 1 failed: ValueError: a bad pixel"
    assert requeue_after_loss(folder, 0) == line
    job(1)
    assert requeue_after_loss(folder, 0) == "requeued as job 71", "the error was one of the start before"
    monkeypatch.delenv("SLURM_JOB_ID")
    record_failure(str(tmp_path / "other"), 1, "")
    assert not (tmp_path / "other").exists()


def test_torchrun_restarts_as_long_as_it_may(job, tmp_path, monkeypatch):
    run = str(make_run(tmp_path, "slurm-71").parents[1])
    job(0)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert requeue_after_loss(run, 0) == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert requeue_after_loss(run, 0) == "requeued as job 71"


def test_outside_of_a_batch_job_nothing_is_asked(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert requeue_after_loss(None, 0) == ""
