"""A run that has finished, and the same command line again."""

import shutil
from pathlib import Path

import pytest
import torch

from callbacks.checkpointing.verified_io import write_checkpoint
from tests.support.command_lines import contents, typed

FIT = "--name one --precision 32-true --logger csv --lr 0.1 --batch-size 16"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run of two epochs was started."""
    home = tmp_path_factory.mktemp("trained")
    typed(home, f"{FIT} --max-epochs 2")
    return home


def test_a_finished_run_is_never_rewritten(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "runs" / "quadrants" / "one"
    auto = "--name one --resume auto"
    before = contents(folder)
    again, shorter, other, given, steps = typed(
        tmp_path,
        auto,  # Without a length: the recipe's default is longer.
        f"{auto} --max-epochs 1 --logger none",
        f"{auto} --lr 0.5",
        f"--resume {folder / 'checkpoints' / 'last.ckpt'}",
        f"--resume {folder / 'checkpoints' / 'last.ckpt'} --max-steps 3",
    )
    assert contents(folder) == before
    assert [folder.name for folder in folder.parent.iterdir()] == ["one"]
    for ended in (again, shorter):
        assert ended.status == 0
        assert "the run in runs/quadrants/one has finished, and nothing was done" in ended.out
    assert other.status == 2
    assert "is of another experiment: --lr is 0.5, and 0.1 in the checkpoint" in other.err
    for ended in (given, steps):
        assert ended.status == 2
        assert "this run has finished its 2 epochs and 14 updates; pass --max-epochs 4 to train longer" in ended.err


def test_settings_that_the_recipe_lacks_are_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "runs" / "quadrants" / "one" / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    saved["config"] |= {"mixup": 0.2}
    write_checkpoint(saved, last)
    scored, resumed, again = typed(
        tmp_path,
        f"validate --ckpt {last}",
        "--name one --resume auto --max-epochs 3",
        "--name one --resume auto --max-epochs 4",
    )
    for ended in (scored, resumed):
        assert ended.status == 0
        assert "last.ckpt has settings that this recipe leaves out: mixup=0.2" in ended.err
    assert "leaves out" not in again.err
