"""Report the results of a run at its end: the closing table, results.json, its tables, pictures and page."""

import platform
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from callbacks.lib.writing import best_effort, unsaved
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError
from datamodules.lightning import TensorBoardLogger, is_overridden, pl
from recipes.runner.classes import takes_inputs
from recipes.runner.curves import run_curves
from recipes.runner.experiment import Experiment
from recipes.runner.page import write_page
from recipes.runner.printing import print_error, relative_path
from recipes.runner.results import (
    RESULTS,
    Stopwatch,
    count_parameters,
    hardware,
    loader_sizes,
    peak_memory,
    versions,
    write_rows,
)
from recipes.runner.run_files import FIGURES, RunFiles, figures_of, save_pictures
from recipes.runner.run_result import RunResult
from recipes.runner.saved_run import read_run
from recipes.tables import ResultTable

_REPORT = "report.html"


def print_pairs(rows: dict[str, str]) -> None:
    """Print two columns, a name and its value."""
    column = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:<{column}}{value}".rstrip())  # noqa: T201


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table with a column for each key; print nothing without rows."""
    if not rows:
        return
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths)).rstrip())  # noqa: T201


def _best(result: RunResult) -> dict[str, Any] | None:
    """Return the checkpoint of the scores, and the monitored value by which it is the best."""
    if result.checkpoint is None:
        return None
    saved = read_run(result.checkpoint)
    value = result.scores.get(result.model.monitor)
    return {
        "checkpoint": str(result.checkpoint),
        "epoch": saved.epoch,
        "step": saved.updates,
        "monitor": result.model.monitor if value is not None else None,
        "value": value,
    }


def _results(trainer: pl.Trainer, experiment: Experiment, stopwatch: Stopwatch, result: RunResult) -> dict[str, Any]:
    """Return the entries of ``results.json``.

    `weights_sha256` is the hash of the weights at the end of the training, by which two runs are compared. `scores`
    belong to the checkpoint `best`, which was saved in `epoch`, counted from 1, after `step` updates.
    `seconds` has "start_up", "train" without validation, and "total", each of the program that writes the file: seconds
    before a resume are not added, while `epochs` counts all. `devices` are those of one node, and `peak_memory_bytes`
    those of rank 0.
    """
    recipe = result.model
    data = data_contract(experiment.data)
    device = trainer.strategy.root_device
    # A user's data module may not tell its sizes, so that those of its loaders are counted.
    sizes = dict(data.sizes) or stopwatch.sizes | loader_sizes(test=trainer.test_dataloaders)
    seconds = stopwatch.seconds()
    ended_at = datetime.now().astimezone()
    parameters, trainable = count_parameters(recipe)
    return {
        "recipe": recipe.title,
        "command": experiment.typed.call or experiment.typed.using(),
        "started_at": (ended_at - timedelta(seconds=seconds["total"])).isoformat(timespec="seconds"),
        "ended_at": ended_at.isoformat(timespec="seconds"),
        "host": platform.node(),
        "hardware": hardware(trainer),
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "versions": versions(),
        "scores": result.scores,
        "headline": {row.title: row.text for row in result.headline},
        "best": _best(result),
        "seconds": seconds,
        "epochs": result.epochs,
        "weights_sha256": result.weights_sha256,
        "samples_per_second": stopwatch.epochs * sizes.get("train", 0) / max(1e-9, seconds["train"]),
        "peak_memory_bytes": {
            "host": peak_memory(torch.device("cpu")),
            "device": peak_memory(device) if device.type == "cuda" else None,
        },
        "stopped_early": result.stopped_early or None,
        "parameters": parameters,
        "trainable_parameters": stopwatch.trainable or trainable,
        "data": {"name": data.title, "sizes": sizes, "left_out": dict(data.left_out)},
        "config": dict(experiment.config),
    }


def _rows(results: Mapping[str, Any], headline: Mapping[str, str]) -> dict[str, str]:
    """Return the rows of the closing table; the page passes no headline, which it shows elsewhere."""
    data = results["data"]
    seconds = results["seconds"]
    rate = results["samples_per_second"]
    sizes = ", ".join(f"{size:,} {part}" for part, size in data["sizes"].items())
    memory = {device_kind: size / 1e9 for device_kind, size in results["peak_memory_bytes"].items() if size}
    rows = {
        "data": ": ".join(filter(None, (data["name"], sizes))),
        "parameters": f"{results['parameters']:,} ({results['trainable_parameters']:,} trainable)",
        **headline,
        "training": f"{seconds['train']:.1f} s" + (f", {rate:,.0f} samples/s" if rate else ""),
        "time": f"{seconds['total']:.1f} s, of which start-up {seconds['start_up']:.1f}",
        "peak memory": ", ".join(f"{size:.2f} GB {device_kind}" for device_kind, size in memory.items()),
    }
    if results["weights_sha256"]:
        rows["weights"] = f"SHA-256 {results['weights_sha256']}"
    if results["stopped_early"]:
        rows["stopped early"] = results["stopped_early"]
    return rows


def _next_steps(trainer: pl.Trainer, experiment: Experiment, best: Path) -> dict[str, str]:
    """Return the path of the best checkpoint, and commands that use it."""
    rows = {"best checkpoint": relative_path(best)}
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        rows["TensorBoard"] = f"tensorboard --logdir {shlex.quote(relative_path(best.parents[2]))}"
    example = f" {experiment.recipe.predict_example}" if takes_inputs(type(experiment.data)) else ""
    if example or is_overridden("predict_dataloader", experiment.data):
        rows["predict"] = f"{experiment.typed.program} predict --ckpt {shlex.quote(relative_path(best))}{example}"
    return rows


def _write(
    trainer: pl.Trainer, result: RunResult, results: Mapping[str, Any], saved: Collection[str]
) -> dict[str, str]:
    """Write the files of a finished run; return the rows that name them.

    Args:
        saved: names of the pictures that were saved during training.
    """
    folder = result.folder
    assert folder is not None
    rows = {}
    with best_effort(RESULTS):
        write_rows(folder / RESULTS, results)
        for name, table in result.tables.items():
            with best_effort(name):
                write_rows(folder / name, table.rows, table.columns)
        if result.tables:
            rows["tables"] = f"{', '.join(result.tables)} in {relative_path(folder)}"
        with best_effort(_REPORT):
            pictures = run_curves(folder, result.model.monitor) | result.figures
            unsaved_pictures = {name: picture for name, picture in pictures.items() if name not in saved}
            save_pictures(folder, unsaved_pictures, trainer)
            page = write_page(folder / _REPORT, results, result.headline, _rows(results, {}), pictures)
            rows["report"] = relative_path(page)
            if pictures:
                rows["report"] += f"; its pictures in {FIGURES}/"
    return rows


def report_interrupted(experiment: Experiment, trainer: pl.Trainer, files: RunFiles, how: str) -> None:
    """Write the page of an unfinished run, with the scores that were logged last.

    Args:
        how: how the run ended, such as "interrupted by Ctrl-C after 120 updates".
    """
    recipe = experiment.recipe
    scores = {name: float(value) for name, value in trainer.callback_metrics.items() if name.partition("/")[0] != "lr"}
    result = RunResult(recipe, scores, files.folder, None, epochs=trainer.current_epoch, stopped_early=how)
    results = _results(trainer, experiment, files, result)
    pictures = run_curves(files.folder, recipe.monitor) | figures_of(trainer)
    write_page(files.folder / _REPORT, results, result.headline, _rows(results, {}), pictures)


def report(trainer: pl.Trainer, experiment: Experiment, stopwatch: Stopwatch, result: RunResult) -> None:
    """Write results.json, its tables and report.html into the run's folder, and print the closing table."""
    results = _results(trainer, experiment, stopwatch, result)
    rows = _rows(results, results["headline"])
    if result.folder is not None:
        if result.checkpoint:
            rows |= _next_steps(trainer, experiment, result.checkpoint)
        # Files first: printing fails where the terminal has been closed.
        saved = stopwatch.figures if isinstance(stopwatch, RunFiles) else ()
        rows |= _write(trainer, result, results, saved)
    print_pairs(rows)


def print_scores(scores: Mapping[str, Any], tables: Mapping[str, ResultTable], files: Mapping[str, Path]) -> None:
    """Print the scores of an evaluation but those of single classes, and where its tables are.

    Args:
        scores: the scores by name.
        tables: the tables of the evaluation by name.
        files: the written files by the names of the tables.
    """
    print_pairs({name: f"{value:.4f}" for name, value in scores.items() if "_class_" not in name})
    if tables:
        print()  # noqa: T201
        rows = []
        for name, table in tables.items():
            path = relative_path(files[name]) if name in files else f"FILE_{name}"
            rows.append(f"{path} ({len(table.rows):,} rows)")
        print_pairs({"written" if files else "--output FILE.json writes": ", ".join(rows)})


def report_unsaved(folder: Path | None) -> None:
    """Print at the end of a run what could not be written, in one line.

    Args:
        folder: the run's folder, if it has one.

    Raises:
        RunFailedError: the results were not written.
    """
    failures = unsaved()
    description = "; ".join(f"{name} ({reason})" for name, reason in failures.items())
    if RESULTS in failures:
        raise RunFailedError(f"the training is done and its weights are saved, but not: {description}")
    if failures:
        saved = f"; the weights and {RESULTS} are in {relative_path(folder)}" if folder else ""
        print_error(f"warning: not saved: {description}{saved}")
