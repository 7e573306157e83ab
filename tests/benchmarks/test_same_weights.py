"""The picture on the first page shows what was measured."""

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("runs", "threads"),
    [(("1 process",), 1), pytest.param(("1 process", "2 processes"), 2, marks=pytest.mark.slow)],
    ids=["alone", "2 threads"],
)
def test_a_measurement_writes_no_file_unless_it_is_asked_to(runs, threads, tmp_path: Path, monkeypatch, capsys) -> None:
    """It starts the processes as a user does: by Lightning's launcher, without OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(same_weights, "RUNS", {name: RUNS[name] for name in runs})
    for name in ("RESULTS", "PICTURE"):
        monkeypatch.setattr(same_weights, name, tmp_path / name)
    monkeypatch.setattr("sys.argv", ["same_weights", "--threads", str(threads)])
    same_weights.main()
    assert not any(tmp_path.iterdir())
    hashes = [line.rsplit("  loss", 1)[0].split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert len(hashes) == 2 * len(runs), "of stock Lightning, then ours"
    assert len(set(hashes[len(runs) :])) == 1
