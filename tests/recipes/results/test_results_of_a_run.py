"""What a run says of itself when it has finished: in results.json, on the console, in figures and in its curves."""

import csv
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typing_extensions import override

from callbacks.drawing.classification_images import confusion_figure
from callbacks.drawing.evaluation_samples import rendered
from recipes.results.results_file import PARTS, Results, read_results
from recipes.resume.saved_run import read_run
from tests.support.command_lines import Typed, type_line
from tests.support.ranks import run_ranks
from tests.support.stock_data import Points, Quadrants


class ForgetsAllInTheEnd(pl.Callback):
    """Makes the weights zero in the third epoch and after it, so that the best checkpoint is an earlier one."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch >= 2:
            for parameter in pl_module.parameters():
                parameter.data.zero_()


def _type_both(first: list[str], second: list[str], folder: str) -> list[Typed]:
    points = "tests.support.stock_data"
    return [type_line(f"{points}:Quadrants", f"{points}:Points", args, folder) for args in (first, second)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Results, Results]:
    """The run's folder, what it printed, its results, and those after one more epoch."""
    home = tmp_path_factory.mktemp("run")
    always = ["--accelerator=cpu", "--callbacks+=ModelSummary", f"--callbacks+={__name__}.ForgetsAllInTheEnd"]
    fit = "--name one --max-epochs 3 --precision 32-true --log-every-n-steps 1 --batch-size 4 --lr 0.02"
    longer = "--name one --resume auto --max-epochs 4"
    lines = [[*line.split(), *always] for line in (fit, longer)]
    folder = home / "runs" / "quadrants" / "one"
    ((first, second),) = run_ranks(_type_both, 1, *lines, str(home))
    assert (first.status, second.status) == (0, 0), first.err + second.err
    return folder, first.err + first.out, json.loads((folder / "results-1.json").read_text()), read_results(folder)


def test_lightnings_summary_of_the_layers_is_printed_where_it_is_asked_for(run: Any) -> None:
    _, out, _, _ = run
    assert re.search(r"Name +\| Type +\| Params", out), out


def test_seconds_by_part_add_up_to_the_wall_clock_and_agree_with_the_epochs_on_the_console(run: Any) -> None:
    _, out, results, _ = run
    seconds = results["seconds"]
    assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["total"], abs=1e-4)
    wall = datetime.fromisoformat(results["ended_at"]) - datetime.fromisoformat(results["started_at"])
    assert wall.total_seconds() == pytest.approx(seconds["total"], abs=1.01)
    assert all(seconds[part] > 0 for part in ("start_up", "train", "validate", "save", "draw"))
    epochs = [float(line.split()[-2]) for line in out.splitlines() if line.startswith("epoch ")]
    # Each is rounded to a tenth.
    assert sum(epochs) == pytest.approx(seconds["train"] + seconds["validate"], abs=0.05 * len(epochs) + 0.05)
    assert f"training               {seconds['train'] + seconds['validate']:.1f} s with validation" in out
    assert re.search(rf"^time +{seconds['total']:.1f} s: ", out, re.MULTILINE)


def test_the_seconds_of_a_resumed_run_are_its_own_and_those_of_the_earlier_start_stand_beside_them(run: Any) -> None:
    _, _, first, longer = run
    assert first["earlier_seconds"] is None
    assert 0 < longer["earlier_seconds"]["train"] <= first["seconds"]["train"]
    assert longer["earlier_seconds"]["draw"] == 0.0, "that was after the checkpoint"
    assert longer["seconds"]["total"] == pytest.approx(sum(longer["seconds"][part] for part in PARTS), abs=1e-4)
    assert longer["epochs"] == 4
    assert longer["trainable_parameters"] == first["trainable_parameters"] == first["parameters"]


def test_results_describe_the_best_checkpoint_and_where_it_comes_from(run: Any) -> None:
    folder, _, results, _ = run
    best, saved = results["best"], read_run(folder / "checkpoints" / "best.ckpt")
    assert best["epoch"] < 3
    assert (best["epoch"], best["step"]) == (saved.epochs, saved.updates) == (saved.epoch, 26 * saved.epoch)
    assert best["value"] == results["scores"][best["monitor"]]
    assert results["scores"]
    assert all(name.startswith("val/") for name in results["scores"]), "no learning rates, no training loss"
    assert results["command"].startswith("python ")
    assert "--max-epochs 3" in results["command"]
    assert results["peak_memory_bytes"]["host"] > 1 << 27
    assert set(results) == set(Results.__annotations__)


def _matrix(checkpoint: Path) -> torch.Tensor:
    saved, points = torch.load(checkpoint, weights_only=True), Points()
    module = Quadrants(num_classes=10)
    module.load_state_dict(saved["state_dict"])
    points.setup("validate")
    matrix = torch.zeros(10, 10, dtype=torch.long)
    for inputs, targets in points.val_dataloader():
        for row, column in zip(targets, module.eval()(inputs).argmax(1)):
            matrix[row, column] += 1
    return matrix


def test_figures_are_of_the_best_checkpoint_and_its_evaluation_adds_no_point_to_the_curves(run: Any) -> None:
    folder, *_ = run
    best = folder / "checkpoints" / "best.ckpt"
    expected = rendered(confusion_figure(_matrix(best), [str(i) for i in range(10)], "val: confusion matrix"))
    assert np.array_equal(np.asarray(Image.open(folder / "figures" / "val_confusion_matrix.png")), expected)
    with (folder / "metrics.csv").open(newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file) if row["val/loss"]] == ["0", "1", "2", "3"]
    steps: dict[str, list[int]] = {"loss/val": [], "val/confusion_matrix": []}
    for path in folder.glob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        for tag, kind in (("loss/val", events.Scalars), ("val/confusion_matrix", events.Images)):
            if tag in events.Tags()["scalars"] + events.Tags()["images"]:
                steps[tag] += [event.step for event in kind(tag)]
    assert sorted(steps["loss/val"]) == [1, 2, 3, 4]
    assert set(steps["val/confusion_matrix"]) == {read_run(best).updates}
