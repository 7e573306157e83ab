"""The soak, for seconds in place of an hour."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.soak import QUANTITIES, Sample, growth

FLAT = Sample(10**9, 10**8, 30, 4, 2, 6, 10**6, 10**5, 0.1, 0.1)


@pytest.mark.slow
def test_a_run_of_seconds_is_sampled_after_each_epoch(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "1", "--json", str(file)]
    # The status is that of a comparison, and seconds are too few for one.
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert file.is_file(), ended.stderr
    samples = [Sample(**sample) for sample in json.loads(file.read_text())]
    assert len(samples) >= 3
    assert {sample.children for sample in samples} == {2}  # A worker that trains, and one that validates.
    assert {sample.files for sample in samples[1:]} == {7}
    assert all(sample.memory > 10**8 and sample.checkpoints > 10**6 and sample.wall > 0 for sample in samples)
    assert samples[-1].logs > samples[0].logs


@pytest.mark.parametrize("field", [field for field, quantity in QUANTITIES.items() if quantity.judged])
def test_what_grows_is_named(field: str) -> None:
    leak = [replace(FLAT, **{field: asdict(FLAT)[field] * (1 + 0.001 * epoch)}) for epoch in range(200)]
    assert growth(leak) == [QUANTITIES[field].name]


def test_what_stays_within_the_noise_is_not_called_growth() -> None:
    assert growth([replace(FLAT, memory=10**9 + epoch % 7 * 10**6, wall=epoch) for epoch in range(200)]) == []
