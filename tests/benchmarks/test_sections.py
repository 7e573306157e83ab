"""Each section runs once, tiny; and what it compares does the same work, so that a difference in time is none of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import benchmarks
from benchmarks.__main__ import main
from benchmarks.contenders.loops import Job, Laps, bare_loop, fabric_loop, plain_loop
from benchmarks.contenders.peers import peer_loops
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.terminal import unread_terminal
from benchmarks.sections import equal_bits, scaling
from benchmarks.sections.input_pipeline import our_loader, stock_loader, write_files

PROCESSES = ("time_to_accuracy", "start_up", "scaling", "equal_bits")
"""What they measure takes processes of their own."""
TOGETHER = [name for name in benchmarks.SECTIONS if name not in PROCESSES]


@pytest.mark.slow
@pytest.mark.parametrize("names", [TOGETHER, *([name] for name in PROCESSES)], ids=" ".join)
def test_a_section_runs_once_tiny(names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    args = ["--quick", "--repeats", "1", "--threads", "1", "--json", str(path), "--data-dir", str(tmp_path)]
    assert main([*names, *args]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert list(written["sections"]) == names
    for section in written["sections"].values():
        assert section["title"] in printed
        assert section["header"]["precision"]
        assert section["header"]["threads"].startswith("1 of torch")
        assert section["goals"]
        for row, figures in section["rows"].items():
            first = next(iter(figures.values()))
            assert first["min"] == first["median"] == first["max"] > 0, row


IMAGES = torch.randint(256, (64, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


JOB = Job(small, IMAGES, torch.arange(64) % 10, batch_size=16, steps=6, settling=2, precision="32-true")
LOOPS: dict[str, Callable[[Job], Laps]] = {"Fabric": fabric_loop, "bare Trainer": bare_loop, **peer_loops()}


def trained(loop: Callable[[Job], Laps]) -> torch.Tensor:
    """The first layer's weights after a loop."""
    made: list[nn.Module] = []

    def network() -> nn.Module:
        made.append(small())
        return made[-1]

    with suppress_output(), unread_terminal():
        laps = loop(replace(JOB, network=network))
    assert (len(laps.ends), laps.steps) == (6, 4)
    return made[0].state_dict()["1.weight"]


def test_all_training_loops_learn_the_same() -> None:
    expected = trained(plain_loop)
    assert not torch.equal(expected, JOB.build().state_dict()["1.weight"])
    assert all(torch.equal(trained(loop), expected) for loop in LOOPS.values())


def test_both_sides_of_the_input_pipeline_yield_the_same_images(tmp_path: Path) -> None:
    images = torch.randint(256, (300, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # All images differ by their first pixels, by which they are put in the same order.
    images[:, 0, 0], images[:, 0, 1] = torch.arange(300) % 256, torch.arange(300) // 256
    write_files(tmp_path, images, (torch.arange(300) % 10).to(torch.uint8))

    def everything(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (torch.cat(parts) for parts in zip(*loader))
        order = (images[:, 0, 0, 1] * 1000 + images[:, 0, 0, 0]).argsort()
        return images[order], labels[order]

    ours, stock = everything(our_loader(tmp_path, augment=False)), everything(stock_loader(tmp_path))
    torch.testing.assert_close(ours[0], stock[0], rtol=0, atol=1e-5)
    assert torch.equal(ours[1], stock[1])


def test_scaling_figures_of_a_world_are_formed_within_a_round() -> None:
    job = partial(scaling.Job, image_size=32, steps=1, rounds=2, threads=1, precision="32-true", cuda=False)
    forms = scaling.ALONE, scaling.BESIDE, scaling.TOGETHER, scaling.PLAIN_BESIDE, scaling.PLAIN_TOGETHER
    found = dict(zip(forms, ([1.0, 2.0], [1.5, 3.0], [2.0, 4.0], [2.0, 2.0], [4.0, 2.5]), strict=True))
    row = scaling.world_row(job(world_size=2, batch_size=4), found)
    assert [spread and spread.values for spread in row] == [(4.0, 2.0), (50.0, 50.0), (75.0, 75.0), (50.0, 80.0)]


def test_a_ratio_in_order_is_the_median_of_a_rounds_pairs() -> None:
    job = equal_bits.Job(2, 0, 0, steps=3, rounds=2, threads=1, precision="32-true", cuda=False)
    found = {equal_bits.ORDERED: [2.0, 9.0, 3.0, 4.0, 4.0, 1.0], equal_bits.PLAIN: [2.0, 3.0, 2.0, 2.0, 2.0, 2.0]}
    assert job.ratio(found).values == (1.5, 2.0)
