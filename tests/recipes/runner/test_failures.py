"""What a process of a run leaves and prints when it fails."""

import json
import signal

import pytest

from datamodules import UserError
from datamodules.loading.download import DownloadError
from recipes.runner.failures import failures_reported

LOST = RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2")


def test_a_lost_rank_is_told_before_the_job_is_requeued_and_signals_work_afterwards(capfd, monkeypatch):
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}

    def requeue() -> str:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return "requeued as job 71"

    with pytest.raises(RuntimeError, match="closed by peer"), failures_reported(requeue):
        raise LOST
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(
        "error: rank 0 lost its connection to another rank, which has ended or cannot be reached"
    )
    assert lines[1:] == ["requeued as job 71"]
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (DownloadError("no file"), "UserError: no file"),
        (UserError("no data"), "UserError: no data"),
        (LOST, "LostConnectionError: RuntimeError: [gloo/tcp"),
        (RuntimeError("Application timeout caused pair closure"), "TimeoutError: another rank did not answer within"),
        (ValueError("a bad pixel"), "ValueError: a bad pixel"),
    ],
)
def test_an_agent_finds_the_kind_of_a_failure_in_torchs_error_file(error, recorded, tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr("recipes.runner.failures._CAUSE_IS_SEEN", 0.0)
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    try:
        with pytest.raises(type(error)), failures_reported():
            raise error
    finally:
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, before[signum])
    assert json.loads(file.read_text())["message"]["message"].startswith(recorded)
