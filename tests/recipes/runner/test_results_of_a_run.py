"""What a run says of itself when it has finished: in results.json, on the console and in its curves."""

import csv
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typing_extensions import override

from recipes.runner.saved_run import read_results, read_run
from tests.support.command_lines import Typed, type_line
from tests.support.ranks import run_ranks


class ForgetsAllInTheEnd(pl.Callback):
    """Makes the weights zero in the third epoch and after it, so that the best checkpoint is an earlier one."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch >= 2:
            for parameter in pl_module.parameters():
                parameter.data.zero_()


def _type_both(first: list[str], second: list[str], folder: str) -> list[Typed]:
    points = "tests.support.stock_data"
    more = ["lightning.pytorch.callbacks:ModelSummary", f"{__name__}:ForgetsAllInTheEnd"]
    return [type_line(f"{points}:Quadrants", f"{points}:Points", args, folder, more) for args in (first, second)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any], dict[str, Any]]:
    """The run's folder, what it printed, its results, and those after one more epoch."""
    home = tmp_path_factory.mktemp("run")
    fit = "--name one --max-epochs 3 --precision 32-true --log-every-n-steps 1 --batch-size 4 --lr 0.02"
    longer = "--name one --resume auto --max-epochs 4"
    lines = [[*line.split(), "--accelerator=cpu"] for line in (fit, longer)]
    folder = home / "runs" / "quadrants" / "one"
    ((first, second),) = run_ranks(_type_both, 1, *lines, str(home))
    assert (first.status, second.status) == (0, 0), first.err + second.err
    return folder, first.err + first.out, json.loads((folder / "results-before.json").read_text()), read_results(folder)


def test_lightnings_summary_of_the_layers_is_printed(run: Any) -> None:
    _, out, _, _ = run
    assert re.search(r"Name +\| Type +\| Params", out), out


def test_seconds_agree_with_the_clock(run: Any) -> None:
    _, out, results, longer = run
    seconds = results["seconds"]
    assert 0 < seconds["train"] < seconds["start_up"] + seconds["train"] < seconds["total"]
    wall = datetime.fromisoformat(results["ended_at"]) - datetime.fromisoformat(results["started_at"])
    assert wall.total_seconds() == pytest.approx(seconds["total"], abs=1.01)
    epochs = [float(line.split()[-2]) for line in out.splitlines() if line.startswith("epoch ")]
    # Each is rounded to a tenth, and has its validation.
    assert seconds["train"] < sum(epochs) + 0.05 * len(epochs) + 0.05
    assert results["samples_per_second"] * seconds["train"] == pytest.approx(3 * 26 * 4, rel=0.05)
    assert f" training {seconds['train']:.1f} s, " in " ".join(out.split())
    assert longer["epochs"] == 4
    assert longer["trainable_parameters"] == results["trainable_parameters"] == results["parameters"]


def test_results_describe_the_best_checkpoint(run: Any) -> None:
    folder, out, results, _ = run
    assert "scoring runs/quadrants/one/checkpoints/best.ckpt ..." in out
    best, saved = results["best"], read_run(folder / "checkpoints" / "best.ckpt")
    assert best["epoch"] < 3
    assert (best["epoch"], best["step"]) == (saved.epochs, saved.updates) == (saved.epoch, 26 * saved.epoch)
    assert best["value"] == results["scores"][best["monitor"]]
    assert results["scores"]
    assert all(name.startswith("val/") for name in results["scores"]), "no learning rates, no training loss"
    assert results["command"].startswith("python ")
    assert "--max-epochs 3" in results["command"]
    assert results["peak_memory_bytes"]["host"] > 1 << 27
    assert set(results) == {
        *("recipe", "command", "started_at", "ended_at", "host", "hardware", "devices", "num_nodes", "versions"),
        *("scores", "headline", "best", "seconds", "epochs", "samples_per_second", "peak_memory_bytes", "flops"),
        "weights_sha256",
        *("stopped_early", "parameters", "trainable_parameters", "data", "config"),
    }


def test_the_last_table_has_the_hash_of_the_trained_weights(run: Any) -> None:
    folder, out, results, longer = run
    lines = map(json.loads, (folder / "weights.jsonl").read_text().splitlines())
    hashes = {line["save"]["epoch"]: line["save"]["sha256"] for line in lines if "save" in line}
    assert results["weights_sha256"] == hashes[3]
    assert longer["weights_sha256"] == hashes[4]
    assert f" weights SHA-256 {hashes[3]} " in " ".join(out.split())
    assert results["best"]["epoch"] < 3, "the best checkpoint has other weights"


def test_evaluating_the_best_checkpoint_adds_no_point(run: Any) -> None:
    folder, *_ = run
    with (folder / "metrics.csv").open(newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file) if row["val/loss"]] == ["0", "1", "2", "3"]
    events = [EventAccumulator(str(path)).Reload() for path in folder.glob("events.*")]
    points = [each.Scalars("val/loss") for each in events if "val/loss" in each.Tags()["scalars"]]
    steps = sorted(point.step for curve in points for point in curve)
    assert steps == [25, 51, 77, 103], "after the updates of each epoch, from 0"
