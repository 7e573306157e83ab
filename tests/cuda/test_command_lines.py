"""The three recipes from their command lines on a GPU, from training to a file for other programs."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.harness.tiny_recipes import TINY_RECIPES
from tests.cuda.conftest import Device
from tests.support.command_lines import Typed, type_line
from tests.support.devices import run_on

FIT = "fit --name one --max-epochs 1 --batch-size 8 --log-every-n-steps 1 --limit-train-batches 26"
LONGER = "fit --name one --resume auto --max-epochs 2"
LAST = "runs/{name}/one/checkpoints/last.ckpt"


def _type_all(name: str, device: str, folder: str) -> list[Typed]:
    tiny = TINY_RECIPES[name]
    few = ["--enable-progress-bar=false", "--limit-val-batches=2", "--limit-test-batches=2"]
    here = [f"--accelerator={device}", "--devices=1", *few]
    last = LAST.format(name=name)
    lines = [
        [*FIT.split(), *tiny.flags, *here],
        [*LONGER.split(), *here],
        ["test", "--ckpt", last, *here],
        ["test", "--ckpt", last, "--accelerator=cpu", "--precision=32-true", *few],
        ["export", "--ckpt", last, "--format", "safetensors", "--output", "exported.safetensors"],
    ]
    return [type_line(tiny.recipe, tiny.data, line, folder) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_RECIPES)
def test_a_recipe_trains_resumes_tests_and_exports(device: Device, name: str, tmp_path: Path) -> None:
    ended = run_on(device, _type_all, 1, name, device, str(tmp_path), timeout=240.0)[0]
    assert [line.status for line in ended] == [0] * 5, [line.err[-2000:] for line in ended]
    run = tmp_path / "runs" / name / "one"
    results = json.loads((run / "results.json").read_text())
    with (run / "metrics.csv").open(newline="") as file:
        logged = {key for row in csv.DictReader(file) for key, value in row.items() if value}
    on_gpu = device == "cuda"
    assert ("cuda" in results["versions"]) == ("cudnn" in results["versions"]) == on_gpu
    assert ("NVIDIA" in results["hardware"] or "AMD" in results["hardware"]) == on_gpu
    assert "monitor/gradient_norm" in logged
    assert (tmp_path / "exported.safetensors").stat().st_size > 0
