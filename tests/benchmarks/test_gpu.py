"""What `benchmarks.gpu` does without a GPU: its loops by hand, its count of operations, limits, and a rehearsal."""

import json
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.loops import Way, Workload, flops_of_step, seconds_a_step
from benchmarks.gpu.speed import BASE, BY_HAND, Setting, Speed, ways

ROOT = Path(__file__).parents[2]


class Watched(nn.Module):
    """Notes what reaches the convolution."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.seen: list[tuple[bool, bool, torch.dtype]] = []

    @property
    def network(self) -> nn.Module:
        return self

    def forward(self, images: Tensor) -> Tensor:
        maps = self.convolution(images)
        last = torch.channels_last
        weights = self.convolution.weight.is_contiguous(memory_format=last)
        self.seen.append((images.is_contiguous(memory_format=last), weights, maps.dtype))
        return self.head(maps.mean((2, 3)))


def workload(made: list[Watched]) -> Workload:
    def build() -> Watched:
        made.append(Watched())
        return made[-1]

    batch = torch.randn(4, 3, 8, 8), torch.arange(4) % 2
    return Workload("four images", build, batch, 4, "images", 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*ways(images=True), "graph"])
def test_each_way_trains_as_its_name_says(name: str) -> None:
    made: list[Watched] = []
    way = ways(images=True).get(name, Way(graph=True))
    assert seconds_a_step(way, workload(made), 3, torch.device("cpu")) > 0
    seen = made[0].seen
    assert len(seen) == 8  # Five that do not count.
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(way.precision, torch.float32)
    assert set(seen) == {(way.channels_last, way.channels_last, dtype)}
    torch.manual_seed(1)
    assert not torch.equal(made[0].head.weight, Watched().head.weight)


def test_ways_add_one_thing_each() -> None:
    found = list(ways(images=True).values())
    assert found[0] == BASE
    for before, after in pairwise(found):
        assert sum(getattr(before, field.name) != getattr(after, field.name) for field in fields(Way)) == 1


def test_operations_are_those_of_the_formula() -> None:
    # A product of (1, 8) by (8, 4): 2 x 8 x 4 forward, as many for the weights' gradients, none for the inputs'.
    linear, convolution = nn.Linear(8, 4, bias=False), nn.Conv2d(3, 4, 3, bias=False)
    assert flops_of_step(lambda: linear(torch.ones(1, 8)).sum()) == 2 * 2 * 8 * 4
    # Each of 6 x 6 outputs sums 3 x 3 x 3 products in each of 4 channels.
    assert flops_of_step(lambda: convolution(torch.ones(1, 3, 8, 8)).sum()) == 2 * 2 * 36 * 27 * 4


def test_a_contender_that_fails_is_left_out_and_said_so() -> None:
    speed = Speed(Setting("", True, 1.0, lambda _: None), "title", workload([]), ("ours", BY_HAND, 1.05))

    def fails() -> float:
        raise RuntimeError("no kernel\nfor this")

    speed.measure({BY_HAND: lambda: 0.5, "broken": fails, "ours": lambda: 0.6}, repeats=2)
    rate, milliseconds, share, ratio = speed.section.rows["ours"]
    assert rate is not None
    assert rate.values == pytest.approx((4 / 0.6,) * 2)
    assert milliseconds is not None
    assert milliseconds.median == pytest.approx(600)
    assert share is not None
    assert share.median == pytest.approx(100 * 1000 / 0.6 / 1e12)
    assert ratio is not None
    assert ratio.median == pytest.approx(1.2)
    assert list(speed.section.rows) == [BY_HAND, "ours"]
    assert "broken failed: RuntimeError: no kernel" in speed.section.notes
    assert [(goal.found, goal.met) for goal in speed.section.goals] == [("1.200", False)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "python -m benchmarks.gpu: there is no CUDA GPU here; --rehearse runs all of it tiny on the CPU\n"
    )


def test_all_parts_end_within_ten_minutes() -> None:
    assert sum(part.seconds for part in gpu.PARTS.values()) < 600


@pytest.mark.slow
def test_a_part_is_killed_at_its_limit_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.PARTS, "translator", gpu.PARTS["translator"]._replace(seconds=0))
    assert gpu.main(["--rehearse", "translator", "exactness"]) == 1
    lines = [line.split(",")[0].split(maxsplit=1) for line in capfd.readouterr().out.splitlines() if "," in line]
    assert ["translator", "killed at its limit of 0 s"] in lines
    assert ["exactness", "done"] in lines


@pytest.mark.slow
def test_a_rehearsal_runs_the_parts_and_gives_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    # The others' code is that of these, or among the slow tests by itself.
    parts = [name for name in gpu.PARTS if name not in ("exactness", "no_sync", "cifar", "resnet50")]
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--json", str(path), *parts]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "rehearsed, no figures"
    assert "reached" not in ended.stdout
    results = json.loads(path.read_text())
    assert results["rehearsed"]
    assert {name: part["ended"] for name, part in results["parts"].items()} == dict.fromkeys(parts, "done")
    assert all(part["rows"] for part in results["parts"].values())
