"""What `benchmarks.averages` compares, and that the page of results shows what was measured."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from benchmarks import averages
from benchmarks.averages import BEST, EMA, LAST, MIRRORED, RESULTS, TASKS, Recorder, Task, compare, p_value, table
from recipes import fit

ROOT = Path(__file__).parents[2]
MEASURED = json.loads(RESULTS.read_text())
DIGITS = {"dataset": "digits", "batch_size": 64, "max_epochs": 2}
QUIET: dict[str, Any] = {"logger": "csv", "verbose": False, "threads": 1, "seed": 1}


def test_the_page_shows_the_measured_scores() -> None:
    page = (ROOT / "docs" / "reference" / "results-more.md").read_text()
    assert "\n".join(table(MEASURED)) in page, "python -m benchmarks.averages --table"


def test_the_page_of_the_flag_quotes_the_measured_gain() -> None:
    page = " ".join((ROOT / "docs" / "recipes" / "resnet-evaluation-export.md").read_text().split())
    runs = MEASURED["runs"]["CIFAR-10"].values()
    gain = mean(run["scores"][MIRRORED] - run["scores"][BEST] for run in runs)
    assert f"adds {gain:.2f} points on CIFAR-10" in page


def test_every_data_set_is_measured_with_every_seed() -> None:
    assert [*MEASURED["runs"]] == [*TASKS]
    assert {tuple(map(int, runs)) for runs in MEASURED["runs"].values()} == {averages.SEEDS}


def test_the_measured_settings_are_those_of_the_program() -> None:
    assert MEASURED["conditions"]["tasks"] == averages.settings_of_tasks()


def test_a_mean_of_checkpoints_leaves_whole_numbers(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.ckpt" for number in range(3)]
    for number, path in enumerate(paths):
        state = {"weight": torch.full((2,), float(number**2)), "num_batches_tracked": torch.tensor(7 + number)}
        torch.save({"state_dict": state}, path)
    averaged = averages.mean_of_checkpoints(paths)
    torch.testing.assert_close(averaged["weight"], torch.full((2,), 5 / 3))
    assert averaged["num_batches_tracked"] == 7


def test_the_recorded_average_is_that_of_the_flag(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = {**DIGITS, **QUIET, "run_dir": str(tmp_path), "max_epochs": 1}
    fit("mnist", callbacks=recorder, **settings, name="recorded")
    expected = fit("mnist", ema=averages.DECAY, **settings, name="ema").model
    for average, tensor in zip(recorder.average, averages.averaged_tensors(expected), strict=True):
        torch.testing.assert_close(average, tensor.detach(), rtol=0, atol=1e-6)


def test_the_best_checkpoint_has_the_test_score_of_the_run(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    scores = compare(Task("mnist", DIGITS, recomputes=True), 1, tmp_path, tmp_path)
    results = json.loads((tmp_path / "mnist" / "seed-1" / "results.json").read_text())
    assert scores[BEST] == pytest.approx(100 * results["scores"]["test/accuracy"])
    means = [f"mean of the {count} best{more}" for count in (3, 5) for more in ("", ", BatchNorm recomputed")]
    assert [*scores] == [BEST, *means, LAST, EMA]


def test_p_is_that_of_the_paired_t_test() -> None:
    # The two-sided 5 % point of Student's t with 4 degrees of freedom is 2.776.
    assert p_value([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(0.0132, abs=1e-4)
    assert p_value([0.0] * 5) == 1.0


@pytest.mark.parametrize(
    ("gains", "cells"),
    [
        ((0.4, 0.5, 0.6, 0.5, 0.5), "| **+0.50 ± 0.07** | < 0.001 |"),
        ((0.1, 0.2, 0.3, 0.2, 0.2), "| +0.20 ± 0.07 | 0.003 |"),
        ((-2.0, 3.0, 2.0, -1.0, 3.0), "| +1.00 ± 2.35 | 0.394 |"),
    ],
    ids=["gains", "less than 0.3", "by chance"],
)
def test_a_gain_that_is_large_enough_is_bold(gains: tuple[float, ...], cells: str) -> None:
    runs = {str(seed): {"scores": {BEST: 90.0, LAST: 90.0 + gain}} for seed, gain in enumerate(gains)}
    assert table({"runs": {"CIFAR-10": runs}})[-1].endswith(cells)
