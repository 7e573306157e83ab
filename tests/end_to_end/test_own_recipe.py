"""What belongs to a recipe stands in the recipe: one outside of the package needs no edit of ours."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.command_lines import Typed, type_line
from tests.support.ranks import run_ranks

COMMON = ["--accelerator", "cpu", "--precision", "32", "--enable-progress-bar=false"]
LAST = "runs/characters/run/checkpoints/last.ckpt"
CLASSES = "tests.support.own_recipe:NextCharacter", "tests.support.own_recipe:Text"


def typed(folder: Path, *args: str, devices: int = 1) -> Typed:
    """A command line in fresh processes, and what rank 0 prints."""
    command = [args[0], *COMMON, *args[1:]] if args[0] == "predict" else [*COMMON, *args, f"--devices={devices}"]
    return run_ranks(type_line, devices, *CLASSES, command, str(folder))[0]


def test_parameters_of_one_call_free_ones_and_the_rows_of_predict_are_the_recipes_own(tmp_path: Path) -> None:
    begun = typed(tmp_path, "--name", "run", "--accumulate", "2")
    assert begun.status == 0, begun.err
    assert "global batch 64 tokens = 2 micro-batches of 32 tokens on 1 device of 1 node, precision" in begun.out
    settings = yaml.safe_load((tmp_path / "runs/characters/run/config.yaml").read_text())
    assert settings["temperature"] == 1.0
    assert "histogram" not in settings
    assert "histogram" not in torch.load(tmp_path / LAST, weights_only=True)["config"]

    resumed = typed(tmp_path, "--resume", LAST, "--max-epochs", "3", "--temperature", "2", "--accumulate", "2")
    assert resumed.status == 0, resumed.err
    refused = typed(tmp_path, "--resume", LAST, "--max-epochs", "4", "--length", "4")
    assert refused.status == 2
    assert "is of another experiment: --length is 4, and 8 in the checkpoint" in refused.err

    options = ["--ckpt", LAST, "--histogram", "logits.txt", "--output", "rows.json"]
    predicted = typed(tmp_path, "predict", *options, "abc", "gha")
    assert predicted.status == 0, predicted.err
    lines = predicted.out.splitlines()
    assert lines[0].split() == ["continued", "certainty"]
    assert [line.split()[0][:3] for line in lines[1:]] == ["abc", "gha"]
    assert all(0 < float(line.split()[1]) < 1 for line in lines[1:])
    assert [row["continued"][:3] for row in json.loads((tmp_path / "rows.json").read_text())] == ["abc", "gha"]
    assert (tmp_path / "logits.txt").is_file()


@pytest.mark.slow
def test_its_batches_of_tokens_are_shared_among_more_devices_on_a_resume(tmp_path: Path) -> None:
    begun = typed(tmp_path, "--name", "run", "--accumulate", "2")
    assert begun.status == 0, begun.err
    resumed = typed(tmp_path, "--resume", LAST, "--max-epochs", "3", devices=2)
    assert resumed.status == 0, resumed.err
    assert "devices: 1 before, 2 now; the updates and their order stay" in resumed.out
    assert "micro-batches of 32 tokens on 2 devices" in resumed.out, resumed.out
    refused = typed(tmp_path, "--resume", LAST, "--max-epochs", "4", "--characters", "64", devices=2)
    assert refused.status == 2
    assert "8 samples of an update are no multiple of the 16 that all devices process at once" in refused.err
