"""The drift table and the picture on the first page show what was measured."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import same_weights
from benchmarks.harness.drift_page import with_tables
from benchmarks.same_weights import PAGE, RECIPES, RESULTS, RUNS, drawn, hexadecimal, runs_of

MEASURED = json.loads(RESULTS.read_text())
DRAWN = drawn(MEASURED, PAGE.read_text())
OURS = [name for name in (*RECIPES, "lightning-recipes") if name in MEASURED["runs"]]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_drawn_files_show_the_measured_figures(path: Path) -> None:
    assert path.read_text() == DRAWN[path], "python -m benchmarks.same_weights --draw"


@pytest.mark.parametrize("name", MEASURED["runs"])
def test_every_layout_is_measured(name: str) -> None:
    assert [*MEASURED["runs"][name]] == [*runs_of(name)]


@pytest.mark.parametrize("name", OURS)
def test_our_runs_have_one_result_in_every_layout(name: str) -> None:
    runs = MEASURED["runs"][name].values()
    assert len({run["sha256"] for run in runs}) == 1
    assert len({run["loss"] for run in runs}) == 1
    assert len({tuple(run["losses"]) for run in runs if "losses" in run}) <= 1


def test_a_changed_loss_changes_the_tables() -> None:
    other = hexadecimal(0.25)
    changed = {"Fabric": {"1 process": {"loss": other, "sha256": "0" * 64}}}
    assert f"| 1 process | `{other}`<br>0.250000, `000000` |" in with_tables(
        PAGE.read_text(), MEASURED, changed, {}, [*RUNS]
    )


def test_a_loss_in_hexadecimal_is_exact() -> None:
    loss = MEASURED["runs"]["Fabric"]["1 process"]["loss"]
    assert hexadecimal(float.fromhex(loss)) == loss
    assert hexadecimal(0.1) == (0.1).hex(), "not a float32, so no digit is left out"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the command write below a folder; returns the folder."""
    for name in ("RESULTS", "PICTURE", "DRIFT_PICTURE", "PAGE"):
        monkeypatch.setattr(same_weights, name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("names", "runs", "threads"),
    [
        (("stock Lightning", "lightning-recipes"), ("1 process", "2 processes"), 2),
        (("Fabric", "Accelerate", "HF Trainer"), ("2, stopped, then 4",), 1),
    ],
    ids=["2 threads", "other programs"],
)
def test_a_measurement_writes_no_file_unless_it_is_asked_to(names, runs, threads, files, monkeypatch, capsys) -> None:
    """It starts the processes as a user does: by Lightning's launcher, without OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(same_weights, "RUNS", {name: RUNS[name] for name in runs})
    monkeypatch.setattr("sys.argv", ["same_weights", "--threads", str(threads), "--only", *names])
    same_weights.main()
    assert not any(files.iterdir())
    hashes = [
        line.rsplit("  loss", 1)[0].split()[-1] for line in capsys.readouterr().out.splitlines() if "  loss" in line
    ]
    installed = len(names) - (not find_spec("transformers")) * ("HF Trainer" in names)
    assert len(hashes) == installed * len(runs)
    if "lightning-recipes" in names:
        assert len(set(hashes[-len(runs) :])) == 1


@pytest.mark.ranks
def test_a_kept_measurement_goes_on_where_it_was(files, monkeypatch) -> None:
    trained = []

    def train(program, layout, threads):
        trained.append((program, layout))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return {"losses": [0.5, 0.25], "sha256": "0" * 64}

    monkeypatch.setattr(same_weights, "train_program", train)
    monkeypatch.setattr(same_weights, "RUNS", {"2 processes": RUNS["2 processes"], "1, stopped": RUNS["1, stopped"]})
    with pytest.raises(KeyboardInterrupt):
        same_weights.measure(["Fabric"], threads=1, keep=True)
    same_weights.measure(["Fabric"], threads=1, keep=True)
    assert trained == [("Fabric", RUNS[name]) for name in ("2 processes", "1, stopped", "1, stopped")]
    kept = json.loads(same_weights.RESULTS.read_text())["runs"]
    assert [*kept["Fabric"]] == ["2 processes", "1, stopped"]
    same_weights.measure(["Fabric"], threads=2, keep=True)
    assert len(trained) == 5, "other conditions: everything is measured again"
