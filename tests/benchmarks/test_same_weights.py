"""The picture on the first page shows what was measured."""

import json

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
