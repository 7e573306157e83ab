"""`benchmarks.gpu` runs on a CPU, too, where its figures mean nothing."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_a_quick_run_on_the_cpu_measures_the_plain_loop_and_the_recipe_of_each_workload(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--quick", "--json", str(path)]) == 0
    sections = json.loads(path.read_text())["sections"]
    assert list(sections) == list(gpu.WORKLOADS)
    for section in sections.values():
        rates = [next(iter(row.values()))["median"] for row in section["rows"].values()]
        assert list(section["rows"]) == [gpu.PLAIN, gpu.RECIPE]
        assert min(rates) > 0


def test_what_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> float:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(gpu, "recipe_seconds", fails)
    section = gpu.measure(gpu.mnist(quick=True), torch.device("cpu"), 1, 1, compiled=False)
    assert (list(section.rows), section.notes) == ([gpu.PLAIN], ["recipe failed: RuntimeError: no kernel"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA GPU here; --device cpu --quick shows that it runs" in capsys.readouterr().err
