"""The learning-rate range test: what it chooses, and that nothing notices that it was there."""

import gc
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.generators import untouched_generators
from datamodules import TrainLoader
from datamodules.errors import UserError
from recipes.lr_finder import RateSweep, choose_rate, find_learning_rate
from tests.support.command_lines import typed
from tests.support.ranks import run_ranks
from tests.support.stock_data import Points, Quadrants
from tests.support.tables import on_ranks

RATES = [10 ** (k / 14 - 6) for k in range(98)]


@given(st.floats(-3, 0.5), st.integers(0, 9))
def test_the_choice_is_a_decade_below_the_rate_of_the_least_loss(least: float, seed: int):
    noise = torch.randn(len(RATES), generator=torch.Generator().manual_seed(seed)).mul(0.01).tolist()
    curve = [2 - math.exp(-((math.log10(rate) - least) ** 2)) for rate in RATES]
    chosen = choose_rate(RATES, [loss + more for loss, more in zip(curve, noise)])
    assert abs(math.log10(chosen) + 1 - least) < 0.4


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([1 + 0.01 * (-1) ** k for k in range(98)], "the loss fell from"),
        ([1.0] * 98, "the loss fell from"),
        ([1.0 + rate for rate in RATES], "the loss fell from"),
        ([2.0, 5.0, 70.0], "the loss grew from 2 after 3 updates"),
        ([], "the first loss is not finite"),
    ],
)
def test_a_curve_without_a_fall_gives_no_rate(losses: list[float], told: str):
    with pytest.raises(UserError, match=f"no learning rate was found: .*{told}"):
        choose_rate(RATES[: len(losses)], losses)


class Groups(Quadrants):
    """Two groups with different rates, whatever schedule there is."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        trunk, head = self.network[0], self.network[2]
        lr = self.hparams.lr
        slow = {"name": "trunk", "params": list(trunk.parameters()), "lr": 0.1 * lr}
        return [slow, {"name": "head", "params": list(head.parameters()), "lr": lr}]


SEEN: list[list[float]] = []


class Rates(pl.Callback):
    """The rates of the groups in each update."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        SEEN.append([group["lr"] for group in optimizer.param_groups])


def test_groups_keep_their_ratios_and_no_schedule_changes_the_rates():
    torch.manual_seed(1)
    module = Groups(num_classes=2, schedule="one_cycle", lr=0.05)
    SEEN.clear()
    found = find_learning_rate(module, Points(), callbacks=[Rates()], accelerator="cpu")
    assert len(SEEN) >= len(found.rates) > 50
    for (trunk, head), rate in zip(SEEN, found.rates):
        assert trunk == pytest.approx(0.1 * rate)
        assert head == pytest.approx(rate)


class Searched(Quadrants):
    """Of which the copies are counted."""


def test_module_loader_and_generators_are_as_before():
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(64, 2)
    loader = DataLoader(TensorDataset(points, (points.prod(1) > 0).long()), 16, shuffle=True, generator=generator)
    module = Searched(num_classes=2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = generator.get_state(), torch.get_rng_state()
    find_learning_rate(module, loader, accelerator="cpu")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert torch.equal(states[0], generator.get_state())
    assert torch.equal(states[1], torch.get_rng_state())
    assert module._trainer is None
    assert [each for each in gc.get_objects() if type(each) is Searched] == [module], "the copy is gone"


def _search(world_size: int, steps: int) -> tuple[float, list[float]]:
    torch.manual_seed(7)
    module = Quadrants(num_classes=2)
    x = torch.randn(96, 2, generator=torch.Generator().manual_seed(1))
    size, rank = 24 // (world_size * steps), int(os.environ.get("RANK", 0))
    loader = TrainLoader(x, (x.prod(1) > 0).long(), torch.arange(96), size, seed=1, rank=rank, world_size=world_size)
    options = on_ranks(world_size) | {"use_distributed_sampler": False}
    found = find_learning_rate(module, loader, callbacks=[GradientAccumulation(steps)], updates=60, **options)
    return found.lr, found.losses


def test_the_choice_is_the_same_however_the_global_batch_is_split():
    (one, whole), *_ = run_ranks(_search, 1, 1, 1)
    for world_size, steps in ((1, 2), (2, 1), (2, 2)):
        for lr, losses in run_ranks(_search, world_size, world_size, steps):
            assert lr == one
            # Past it rounding grows with the loss.
            assert losses[:50] == pytest.approx(whole[:50], rel=1e-4)


def test_generators_of_python_and_numpy_are_put_back():
    import random

    import numpy as np

    expected = [random.getstate()[1][:3], np.random.get_state()[1][:3].tolist()]
    with untouched_generators():
        random.random()
        np.random.rand()
    assert [random.getstate()[1][:3], np.random.get_state()[1][:3].tolist()] == expected


def test_a_sweep_without_room_is_refused():
    with pytest.raises(UserError, match="low=1"):
        RateSweep(low=1, high=0.1)


def test_a_run_that_finds_its_rate_is_the_run_with_that_rate_and_a_resume_does_not_search_again(tmp_path: Path):
    quick, more = "--max-epochs 2 --logger none --batch-size 16", "--warmup 3 --ema 0.9 --schedule cosine"
    found, resumed, invalid = typed(
        tmp_path,
        f"{quick} --name found --lr find {more}",
        "--name found --resume auto --max-epochs 3 --lr find",
        f"{quick} --lr found",
    )
    assert found.status == resumed.status == 0, found.err + resumed.err
    run = tmp_path / "runs/quadrants/found"
    lr = yaml.safe_load((run / "config.yaml").read_text())["lr"]
    assert isinstance(lr, float)
    assert f"lr {lr:g}: a tenth of " in found.out
    assert f"pass --lr {lr:g}" in found.out
    assert (run / "figures/lr_find.png").stat().st_size > 5000
    assert "a tenth of" not in resumed.out
    assert invalid.status == 2
    assert "--lr found is not a number or find" in invalid.err
    (given,) = typed(tmp_path, f"{quick} --name given --lr {lr} {more}")
    assert given.status == 0
    lines = [(tmp_path / f"runs/quadrants/{name}/weights.jsonl").read_text() for name in ("found", "given")]
    assert lines[0].splitlines()[0] == lines[1].splitlines()[0]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["config"]["lr"] == lr
