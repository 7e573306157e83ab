"""What a process of a run leaves and prints when it fails."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from datamodules import UserError
from datamodules.errors import RunFailedError
from datamodules.loading.download import DownloadError
from recipes.runner.errors import Failure, failures_reported, first_cause

LOST = RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2")


def test_a_lost_rank_is_reported_before_the_job_is_requeued(capfd, monkeypatch):
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}

    def requeue() -> str:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return "requeued as job 71"

    with pytest.raises(RuntimeError, match="closed by peer"), failures_reported(requeue, print):
        raise LOST
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(
        "error: rank 0 lost its connection to another rank, which has ended or cannot be reached"
    )
    assert lines[1:] == ["requeued as job 71"]
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers


@pytest.mark.parametrize(
    ("error", "kind", "message", "status"),
    [
        (DownloadError("no file"), "user", "no file", 2),
        (UserError("no data\n: red"), "user", "no data\\n: red", 2),
        (RunFailedError("the loss is NaN"), "user", "the loss is NaN", 1),
        (LOST, "lost", "lost its connection to another rank, which has ended", 1),
        (RuntimeError("Application timeout"), "timed out", "failed: TimeoutError: another rank did not answer", 1),
        (ValueError("a bad pixel\nin the corner"), "failed", "failed: ValueError: a bad pixel", 1),
    ],
)
def test_an_agent_reads_the_kind_of_a_failure(error, kind, message, status, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    Failure.of(error).write()
    failure = Failure.read(str(tmp_path / "error.json"))
    assert failure is not None
    assert (failure.kind, failure.status) == (kind, status)
    assert failure.message.startswith(message)
    # torch's agent, which torchrun runs, reads the same file.
    assert ProcessFailure(0, 1, 1, str(tmp_path / "error.json")).message == failure.message


def test_a_process_without_a_record_is_known_by_its_exit_status(tmp_path):
    assert Failure.read(str(tmp_path / "none.json")) is None
    assert [Failure.of_exit(status).kind for status in (-9, 143, 3)] == ["killed", "signal", "failed"]


def test_a_consequence_comes_after_its_cause():
    lost, late = Failure.of(LOST), Failure.of(RuntimeError("timed out"))
    bug, killed = Failure.of(ValueError("a bad pixel")), Failure.of_exit(-9)
    assert first_cause([lost, bug, late]) == bug
    assert first_cause([lost, late, killed]) == killed
    assert first_cause([lost, bug, Failure.of(UserError("no data"))]).message == "no data"
