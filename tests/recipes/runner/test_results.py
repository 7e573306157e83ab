"""The file of a run's results, and the peak of its memory."""

import mmap
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from datamodules.errors import UserError
from recipes.runner.results import RESULTS, Results, peak_memory, read_results, write_rows

HELD = 3 << 29


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = Results(recipe="mnist", scores={"test/accuracy": 0.5}, seconds={"train": 1.5, "total": 2.0})
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
def test_a_file_that_holds_no_results_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_results(tmp_path)


def test_the_peak_of_a_process_does_not_hold_that_of_the_process_that_started_it() -> None:
    code = """
        import torch
        from recipes.runner.results import peak_memory
        before = peak_memory(torch.device("cpu"))
        taken = torch.ones(1 << 26)  # 256 MiB.
        del taken
        print(before, peak_memory(torch.device("cpu")))
    """
    with mmap.mmap(-1, HELD) as held:
        for page in range(0, HELD, mmap.PAGESIZE):
            held[page] = 1
        assert peak_memory(torch.device("cpu")) > HELD
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after - before > 200 << 20
    assert after < HELD
