"""The script of faults, on a few of them; ``python -m benchmarks.faults`` brings all about."""

import re

import pytest

from benchmarks.faults import battery as faults
from benchmarks.faults.battery import main
from benchmarks.faults.cases import EVERY_RECIPE, FAULTS, FaultCase
from benchmarks.faults.faulty_run import Fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("last.ckpt with a flipped bit", "resnet"),
        ("exception in rank 1's step", "mnist"),
        ("SIGTERM to rank 1 of 2", "seq2seq"),
    ],
)
def test_a_fault_is_survived(name: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", name, "--recipes", recipe, "--repeats", "1"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_as_an_undisturbed_one(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--recipes", "mnist", "--repeats", "0", "--kills", "2"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "2 kills with SIGKILL at random moments (seed 1): the weights, files and sizes of an undisturbed" in printed


@pytest.mark.slow
def test_a_failed_case_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = FaultCase({"kind": "raise", "at": 17}, "what no run prints", statuses=(0,), lost=1)
    monkeypatch.setattr(faults, "FAULTS", {"wrong": wrong})
    assert main(["--recipes", "mnist", "--repeats", "1"]) == 1
    printed = capsys.readouterr().out
    assert "exit status 1" in printed
    assert "no match for 'what no run prints'" in printed
    assert "2 updates lost, at most 1 may be" in printed


def test_an_unknown_fault_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "flood"])
    assert "kill -9 in validation" in capsys.readouterr().err
    assert len(FAULTS) >= 30


def test_what_needs_root_is_not_called_passed_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "FAULTS", {"mounted": FaultCase({}, "", needs_root=True)})
    monkeypatch.setattr(faults, "may_mount", lambda: False)
    assert main([]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "mounted" in line)
    assert "not tried: needs root" in row
    assert "yes" not in row


def test_every_row_states_what_it_expects() -> None:
    for name, case in FAULTS.items():
        assert set(case.recipes) <= set(EVERY_RECIPE), name
        assert case.statuses, name
        assert case.message or case.statuses[0] < 0 or case.shell, f"{name}: only who is killed or not heard is silent"
        assert re.compile(case.message), name
        assert Fault("folder", **case.fault).moment, name
