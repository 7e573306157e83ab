"""--limit-train-batches and the Trainer's other limits on the command line: the same training on any split."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.support.command_lines import type_line
from tests.support.ranks import run_ranks

COMMON = "--dataset digits --accelerator cpu --precision 64 --lr 0.001 --schedule constant --name run"


CLASSES = "tests.support.plain_recipe:Plain", "datamodules:MNISTDataModule"


def typed(folder: Path, args: str, devices: int = 1) -> dict[str, torch.Tensor]:
    """The weights of a run that trains on several devices, a process each."""
    folder.mkdir(exist_ok=True)
    command = [*shlex.split(f"{args} {COMMON}"), "--devices", str(devices)]
    for status, _, err in run_ranks(type_line, devices, *CLASSES, command, str(folder)):
        assert status == 0, err
    checkpoint = torch.load(folder / "runs/plain/run/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 8, "two epochs of four updates"
    return checkpoint["state_dict"]


@pytest.mark.slow
def test_a_number_of_updates_is_trained_on_any_split_also_resumed_on_other_devices(tmp_path):
    limits = "--limit-train-batches 4 --val-check-interval 2 --limit-val-batches 2 --global-batch-size 64"
    run = f"{limits} --max-epochs 2"
    whole = typed(tmp_path / "1x1", f"{run} --batch-size 64")
    split = typed(tmp_path / "2x2", f"{run} --batch-size 16", devices=2)
    first = f"{limits} --max-epochs 1 --batch-size 32"
    (tmp_path / "resumed").mkdir()
    command = [*shlex.split(f"{first} {COMMON}"), "--devices", "2"]
    for status, _, err in run_ranks(type_line, 2, *CLASSES, command, str(tmp_path / "resumed")):
        assert status == 0, err
    resumed = typed(tmp_path / "resumed", "--resume runs/plain/run/checkpoints/last.ckpt --max-epochs 2")
    for name, value in whole.items():
        assert torch.allclose(value, split[name], rtol=1e-9, atol=1e-12), name
        assert torch.allclose(value, resumed[name], rtol=1e-9, atol=1e-12), name
    results = [json.loads((tmp_path / f"{n}/runs/plain/run/results.json").read_text()) for n in ("1x1", "2x2")]
    assert results[0]["scores"]["val/loss"] == pytest.approx(results[1]["scores"]["val/loss"], rel=1e-6)
    assert results[0]["config"]["limit_train_batches"] == results[1]["config"]["limit_train_batches"] == 4


def test_barebones_trains_without_a_folder_and_says_what_it_leaves_out(tmp_path):
    args = shlex.split(f"{COMMON} --barebones --max-epochs 1 --batch-size 256")
    ((status, out, err),) = run_ranks(type_line, 1, *CLASSES, args, str(tmp_path))
    assert status == 0, err
    assert "nothing is logged, saved or tested" in out
    assert "samples/s" in out
    assert not (tmp_path / "runs").exists()
