"""Data of your own from the command line to its predictions, on any number of devices, interrupted or not."""

import json
import shlex
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from typing_extensions import override

from datamodules.images.builtin_datasets import load_digits
from tests.support.command_lines import type_line, typed
from tests.support.ranks import run_ranks
from tests.support.tables import equal

RECIPES = {
    "mnist": ("recipes:MNISTClassifier", "datamodules:MNISTDataModule"),
    "resnet": ("recipes:ResNetFineTuner", "datamodules:ImageFolderDataModule"),
}
EXACT = ("--precision", "32-true", "--accelerator", "cpu")


def type_in(folder: Path, *args: str) -> None:
    (ended,) = run_ranks(type_line, 1, *RECIPES["mnist"], list(args), str(folder))
    assert ended.status == 0, ended.err


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / "runs/mnist" / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


class SaysWhenItTrains(pl.Callback):
    """Prints a line before the first batch."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print("it trains", file=sys.stderr)


def test_a_run_names_its_classes_before_it_trains(tmp_path: Path):
    line, says = "--max-epochs 1 --logger none --batch-size 512", [f"{__name__}:SaysWhenItTrains"]
    digits = shlex.split(f"{line} --dataset digits --devices 2 --accelerator cpu --enable-progress-bar false")
    first, second = run_ranks(type_line, 2, *RECIPES["mnist"], digits, str(tmp_path), says)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "training on 10 classes: 0 (1" in first.err.partition("it trains")[0]
    assert first.err.count("10 classes") == 1
    assert "classes" not in second.err
    for number in range(36):
        path = tmp_path / "tree" / f"class {number % 12:02}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (7 * number, 0, 0)).save(path)
    listed = "".join(f"tree/class 00/{n}.png,ant\ntree/class 01/{n + 1}.png,bee\n" for n in (0, 12, 24))
    (tmp_path / "train.csv").write_text(f"path,label\n{listed}tree/class 02/2.png,bee\n")
    line += " --weights none --arch resnet20 --image-size 8 --val-fraction 0"
    recipe, data = RECIPES["resnet"]
    lines = (f"{line} --data-dir {place}" for place in ("tree", "train.csv"))
    ended = typed(tmp_path, *lines, recipe=recipe, data=data, callbacks=says)
    named = ", ".join(f"class {number:02} (3)" for number in range(10))
    for run, classes in zip(ended, (f"12 classes: {named}, and 2 more", "2 classes: ant (3), bee (4)"), strict=True):
        assert run.status == 0, run.err
        assert f"training on {classes}\n" in run.err.partition("it trains")[0]


@pytest.mark.slow
def test_own_digits_train_alike_from_a_folder_or_an_archive(tmp_path: Path):
    images, labels = (part.numpy() for part in load_digits()["train"])
    order = np.argsort(labels, kind="stable")
    images, labels = images[order], labels[order]
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "tree" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "tree" / str(label) / f"{number:04}.png")
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    line = ("--max-epochs", "2", "--batch-size", "100", "--seed", "3", "--test-fraction", "0.2", *EXACT)
    line += ("--schedule", "constant")  # It does not depend on where a run ends.
    type_in(tmp_path, "--data-dir", "tree", "--name", "tree", *line)
    type_in(tmp_path, "--data-dir", "digits.npz", "--name", "npz", *line)
    assert equal(weights(tmp_path, "npz"), weights(tmp_path, "tree"))
    # Two devices with half the batch each take the same samples; float64 has no rounding to speak of.
    for name, size, devices in (("one", "100", 1), ("two", "50", 2)):
        cut = ("--batch-size", size, f"--devices={devices}", "--sync-bn", "--precision", "64-true", "--name", name)
        done = run_ranks(type_line, devices, *RECIPES["mnist"], ["--data-dir", "tree", *line, *cut], str(tmp_path))[0]
        assert done.status == 0, done.err
        assert ("note: SyncBN normalizes over what the devices see" in done.out + done.err) == (name == "two")
    one, two = weights(tmp_path, "one"), weights(tmp_path, "two")
    assert max(float((two[name].double() - one[name].double()).abs().max()) for name in one) < 1e-8
    results = json.loads((tmp_path / "runs/mnist/tree/results.json").read_text())
    assert results["data"]["name"] == "tree"
    assert sum(results["data"]["sizes"].values()) == len(labels)
    ckpt = "runs/mnist/tree/checkpoints/best.ckpt"
    type_in(tmp_path, "test", "--ckpt", ckpt, "--output", "test.json")
    assert json.loads((tmp_path / "test.json").read_text())["test/accuracy"] == results["scores"]["test/accuracy"]
