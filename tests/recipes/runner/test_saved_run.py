"""The file of a run's results, and the peak of its memory."""

from pathlib import Path

import pytest

from datamodules.errors import UserError
from recipes.runner.saved_run import RESULTS, read_results, write_rows


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = {"recipe": "mnist", "scores": {"test/accuracy": 0.5}, "seconds": {"train": 1.5, "total": 2.0}}
    write_rows(tmp_path / RESULTS, results)
    assert read_results(tmp_path) == results


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "expected the folder of a run that has finished"),
        ("{", "cannot be read"),
        ("[1]", "holds no results of a run"),
        ('{"scores": 3}', "holds no results of a run"),
    ],
)
def test_a_file_that_holds_no_results_is_rejected(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_results(tmp_path)
