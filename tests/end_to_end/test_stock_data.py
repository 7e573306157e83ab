"""Every command on a data module without our contract: stock DataLoaders in a stock LightningDataModule."""

import json
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from datamodules.contract import DataContract, data_contract
from recipes.prediction import all_rows
from tests.support.command_lines import typed
from tests.support.minimal_recipe import Line

BEST = "runs/quadrants/run/checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained")
    ((status, out, err),) = typed(folder, "--num-classes 2 --max-epochs 2 --limit-train-batches 5 --name run")
    assert status == 0, err
    return folder, out


def test_the_table_shows_the_sizes_of_the_loaders(trained):
    folder, out = trained
    assert re.search(r"^data +Points: 101 train, 40 val$", out, re.MULTILINE)
    results = json.loads((folder / "runs/quadrants/run/results.json").read_text())
    assert results["data"] == {"name": "Points", "sizes": {"train": 101, "val": 40}, "left_out": {}}
    seconds = results["seconds"]["train"]
    assert results["samples_per_second"] * seconds == pytest.approx(2 * 5 * 101 / 7, rel=1e-3), "5 of 7 batches"


def test_the_printed_predict_command_works(trained):
    folder, out = trained
    (command,) = re.findall(r"^predict +python \S+ (predict .*)$", out, re.MULTILINE)
    validated, predicted = typed(folder, f"validate --ckpt {BEST}", f"{command} --output rows.json")
    assert validated[0] == 0, validated[2]
    assert "val/accuracy" in validated[1]
    assert predicted[0] == 0, predicted[2]
    rows = json.loads((folder / "rows.json").read_text())
    assert [row["sample"] for row in rows] == list(range(101))
    network = torch.load(folder / BEST, weights_only=True)["state_dict"]
    points = torch.randn(101, 2, generator=torch.Generator().manual_seed(1))
    hidden = (points @ network["network.0.weight"].T + network["network.0.bias"]).relu()
    expected = (hidden @ network["network.2.weight"].T + network["network.2.bias"]).softmax(1).max(1).values
    assert torch.allclose(torch.tensor([row["probability"] for row in rows]), expected, atol=0.02)


def test_what_the_data_module_lacks_is_said_in_words(trained):
    folder, _ = trained
    ended = typed(folder, f"predict --ckpt {BEST} one.png two.png", f"test --ckpt {BEST}")
    assert [status for status, _, _ in ended] == [2, 2]
    assert ended[0][2] == (
        "error: Points takes no inputs, because its constructor has no parameter predict_inputs; leave one.png two.png"
        " out to predict what Points.predict_dataloader() yields\n"
    )
    assert ended[1][2] == "error: test needs a method test_dataloader, and Points has none\n"


def test_a_recipe_without_a_table_prints_the_networks_outputs():
    class Named(pl.LightningDataModule, DataContract):
        prediction_names = ("a.txt",)

    nameless, named = data_contract(None), data_contract(Named())
    rows = all_rows(Line(), [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])], nameless)
    assert rows == [{"sample": 0, "output": [1.0]}, {"sample": 1, "output": [2.0]}, {"sample": 2, "output": [3.0]}]
    assert all_rows(Line(), [torch.tensor([[1.0]])], named) == [{"file": "a.txt", "output": [1.0]}]
    with pytest.raises(ValueError, match=r"predict_step of Line returns a dict.*write prediction_rows"):
        all_rows(Line(), [{"logits": torch.zeros(1)}], nameless)
