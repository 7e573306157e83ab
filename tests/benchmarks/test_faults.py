"""The script of faults, on two of them; ``python -m benchmarks.faults`` brings all about."""

import pytest

from benchmarks import faults
from benchmarks.faults import FAULTS, FaultCase, main


@pytest.mark.slow
def test_a_fault_is_survived_and_a_failed_case_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, wrong = "last.ckpt with a flipped bit", FaultCase({"kind": "raise", "at": 17}, "what no run prints", 0, 1)
    monkeypatch.setattr(faults, "FAULTS", {good: FAULTS[good], "wrong": wrong})
    assert main(["--recipes", "mnist"]) == 1
    survived, failed = capsys.readouterr().out.splitlines()[-2:]
    assert survived.startswith(f"| mnist | {good} | 1 |")
    assert survived.endswith("| as it has to be, weights equal |")
    ended_after, updates_after, repeated = map(float, survived.split("|")[4:7])
    assert 0 <= ended_after < updates_after
    assert repeated == 13
    assert "exit status 1" in failed
    assert "no match for 'what no run prints'" in failed
    assert "2 updates lost, at most 1 may be" in failed
