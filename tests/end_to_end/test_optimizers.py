"""Optimisers and schedules on the command line: a user's own class, received files, and CIFAR's classic settings."""

import json
import re
import zipfile
from pathlib import Path

import pytest

from tests.support.command_lines import typed

ROOT = Path(__file__).parents[2]
OWN = "--optimizer tests.support.optimizers.Counting"


@pytest.mark.slow
def test_an_own_optimiser_is_resumed_where_it_is_typed_and_a_received_run_imports_none(tmp_path: Path) -> None:
    def own(*commands: str) -> list[tuple[int, str]]:
        return [(done.status, done.out + done.err) for done in typed(tmp_path, *commands)]

    # An epoch has seven updates.
    settings = (
        f"{OWN} --optimizer-args '{{scale: 0.5}}' --lr 0.01 --schedule multistep --milestones '5 steps, 11 steps'"
    )
    commands = [f"{settings} --name whole --max-epochs 2", f"{settings} --name stopped --max-epochs 2 --max-steps 9"]
    assert [status for status, _ in own(*commands)] == [0, 0]

    checkpoint = "runs/quadrants/stopped/checkpoints/last.ckpt"
    resume = "--name stopped --resume auto --max-steps=-1"
    inference, received, resumed = own(f"validate --ckpt {checkpoint}", resume, f"{resume} {OWN}")
    assert received[0] == 2
    assert "a checkpoint must not import tests.support.optimizers; if you trust it, pass --optimizer" in received[1]
    assert (inference[0], resumed[0]) == (0, 0)
    files = [tmp_path / f"runs/quadrants/{name}/weights.jsonl" for name in ("whole", "stopped")]
    whole, stopped = (json.loads(file.read_text().splitlines()[-1])["save"] for file in files)
    assert whole == stopped


def cifar_line() -> str:
    """CIFAR's settings for wider networks, as the README of the recipe has them."""
    text = (ROOT / "recipes/resnet/README.md").read_text(encoding="utf-8")
    found = re.search(
        r"^python -m recipes\.resnet (--data-dir CIFAR .*--milestones.*)$", text.replace("\\\n", ""), re.M
    )
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_cifars_classic_settings_in_the_readme_train(tmp_path: Path, shared_data: Path) -> None:
    with zipfile.ZipFile(shared_data / "cifar10-jpeg.zip") as archive:
        names = [name for name in archive.namelist() if re.search(r"(train|test)/\w+/000[01].jpg$", name)]
        archive.extractall(tmp_path / "cifar", names)
    line = cifar_line().replace("--data-dir CIFAR", "--data-dir cifar --max-steps 2 --name classic")
    (done,) = typed(tmp_path, line, recipe="recipes.resnet:ResNetFineTuner", data="datamodules:ImageFolderDataModule")
    assert done.status == 0, done.err
    assert "the run ends after 2 updates, before 3 of the --milestones" in done.out + done.err
    assert re.search(r"to fc +11,173,962 +11,173,962 +0\.1 +0\.0005$", done.err, re.MULTILINE)
    assert ".no_decay" not in done.err
    config = json.loads((tmp_path / "runs/resnet/classic/results.json").read_text())["config"]
    expected = {"milestones": "60 epochs, 120 epochs, 160 epochs", "gamma": 0.2, "decay_all": True, "batch_size": 128}
    assert expected.items() <= config.items()
