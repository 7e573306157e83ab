"""The picture on the first page shows what was measured."""

import json
from pathlib import Path

from benchmarks import same_weights
from benchmarks.harness.loss_picture import picture
from benchmarks.same_weights import PICTURE, RESULTS, RUNS

MEASURED = json.loads(RESULTS.read_text())


def test_the_picture_is_drawn_from_the_measured_figures() -> None:
    assert PICTURE.read_text() == picture(MEASURED), "python -m benchmarks.same_weights --draw"


def test_our_runs_have_one_hash_on_any_number_of_processes() -> None:
    runs = MEASURED["programs"]["lightning-recipes"]
    assert [*runs] == [*RUNS]
    assert len({run["sha256"] for run in runs.values()}) == 1
    assert len({tuple(run["losses"]) for run in runs.values()}) == 1


def test_a_measurement_writes_no_file_unless_it_is_asked_to(tmp_path: Path, monkeypatch, capsys) -> None:
    """It starts the processes as a user does: by Lightning's launcher, without OMP_NUM_THREADS, on two threads each."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(same_weights, "RUNS", {name: RUNS[name] for name in ("1 process", "2 processes")})
    for name in ("RESULTS", "PICTURE"):
        monkeypatch.setattr(same_weights, name, tmp_path / name)
    monkeypatch.setattr("sys.argv", ["same_weights", "--threads", "2"])
    same_weights.main()
    assert not any(tmp_path.iterdir())
    printed = [line.rsplit("  loss", 1)[0].split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 4
    assert printed[2] == printed[3], "ours on one process and on two"
