"""A run that begins with the weights of a file: by any recipe, on any number of ranks, and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from callbacks.seed_control import SeedControl
from tests.support.command_lines import MNIST, typed
from tests.support.ranks import run_ranks
from tests.support.stock_data import Points, Quadrants
from tests.support.tables import quiet_trainer

QUICK = "--max-epochs 1 --logger none --lr 0.01"


def _first_weights(file: str, world_size: int, strategy: str, **options: Any) -> dict[str, Tensor]:
    """The weights with which a run begins."""
    SeedControl(seed=2)
    recipe = Quadrants(num_classes=2, weights=file, **options)
    quiet_trainer(max_epochs=0, devices=world_size, strategy=strategy).fit(recipe, Points())
    return {name: value.clone() for name, value in recipe.network.state_dict().items()}


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("ddp", 2)])
def test_every_rank_begins_with_the_weights_of_the_file(strategy: str, world_size: int, tmp_path: Path):
    saved = {f"module.{k}": torch.full_like(v, 0.5) for k, v in Quadrants(num_classes=2).network.state_dict().items()}
    torch.save(saved, tmp_path / "a.pt")
    file = str(tmp_path / "a.pt")
    for found in run_ranks(_first_weights, world_size, file, world_size, strategy, weights_skip="2.*"):
        for name, value in found.items():
            assert torch.equal(value, torch.full_like(value, 0.5)) is name.startswith("0."), name


def test_a_resumed_run_does_not_read_the_file_again(tmp_path: Path):
    file = "runs/quadrants/first/checkpoints/best.ckpt"
    first, begun, scratch, rejected = typed(
        tmp_path,
        f"{QUICK} --name first",
        f"{QUICK} --name begun --weights {file} --weights-skip 2.* --seed 2",
        f"{QUICK} --name scratch --seed 2",
        f"{QUICK} --weights {file} --weights-skip fc.*",
    )
    assert first.status == begun.status == scratch.status == 0, begun.err
    assert f"weights from {file}: 2 loaded, 0 skipped, 0 new, 2 not chosen (2.weight, 2.bias)" in begun.err
    state = torch.load(tmp_path / "runs/quadrants/begun/checkpoints/last.ckpt", weights_only=True)
    assert state["config"]["weights_skip"] == "2.*"
    other = torch.load(tmp_path / "runs/quadrants/scratch/checkpoints/last.ckpt", weights_only=True)
    assert not torch.equal(state["state_dict"]["network.0.weight"], other["state_dict"]["network.0.weight"])
    assert rejected.status == 2
    assert "'fc.*' matches no module or parameter; the first names are ['0', '1', '2'" in rejected.err

    (tmp_path / file).unlink()
    (resumed,) = typed(tmp_path, "--resume runs/quadrants/begun/checkpoints/last.ckpt --max-epochs 2")
    assert resumed.status == 0, resumed.err
    assert "loaded" not in resumed.err


def test_exported_weights_are_scored_as_their_checkpoint(tmp_path: Path):
    best = "runs/mnist/run/checkpoints/best.ckpt"
    *runs, both, other, neither = typed(
        tmp_path,
        "--dataset digits --max-epochs 1 --name run --network classic --logger none",
        f"test --ckpt {best} --output a.json",
        f"export --ckpt {best} --format safetensors --output b.safetensors",
        "test --weights b.safetensors --output b.json",
        f"test --ckpt {best} --weights b.safetensors",
        "test --weights b.safetensors --network default",
        "test",
        **MNIST,
    )
    assert [run.status for run in runs] == [0, 0, 0, 0], [run.err for run in runs]
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert both.status == other.status == neither.status == 2
    assert "--ckpt and --weights are two sources" in both.err
    assert "are of another network" in other.err
    assert "or --weights FILE" in neither.err
