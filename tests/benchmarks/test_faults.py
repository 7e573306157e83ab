"""The script of faults, on a few of them; ``python -m benchmarks.faults`` brings all about."""

import pytest

from benchmarks import faults
from benchmarks.faults import FAULTS, FaultCase, main


@pytest.mark.slow
def test_a_fault_is_survived(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "last.ckpt with a flipped bit", "--recipes", "resnet"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_failed_case_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = FaultCase({"kind": "raise", "at": 17}, "what no run prints", status=0, lost=1)
    monkeypatch.setattr(faults, "FAULTS", {"wrong": wrong})
    assert main(["--recipes", "mnist"]) == 1
    printed = capsys.readouterr().out
    assert "exit status 1" in printed
    assert "no match for 'what no run prints'" in printed
    assert "2 updates lost, at most 1 may be" in printed


def test_an_unknown_fault_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "flood"])
    assert "kill -9 in validation" in capsys.readouterr().err
    assert len(FAULTS) == 17
