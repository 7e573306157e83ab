"""The results of a run at its end: the closing table, results.json, and all of it on the page report.html."""

import csv
import itertools
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.lib.writing import best_effort, unsaved
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError
from recipes.runner.experiment import Experiment, takes_inputs
from recipes.runner.loggers import METRICS
from recipes.runner.printing import print_error
from recipes.runner.results import (
    RESULTS,
    Stopwatch,
    count_parameters,
    hardware,
    loader_sizes,
    peak_memory,
    versions,
    write_rows,
    write_text,
)
from recipes.runner.saved_run import read_run
from recipes.tables import Table

_REPORT = "report.html"
_MOST_ROWS = 25


def shown(path: str | Path) -> str:
    """A path relative to the current folder, where it lies in it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def print_pairs(rows: dict[str, str]) -> None:
    """Print two columns, a name and its value."""
    column = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:<{column}}{value}".rstrip())  # noqa: T201


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table with a column per key; nothing without rows."""
    if not rows:
        return
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths)).rstrip())  # noqa: T201


def check_output(output: str | None, endings: Sequence[str]) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if output is not None and Path(output).suffix not in endings:
        raise UserError(f"--output {output}: expected a name that ends in {' or '.join(endings)}")
    if output is not None and not Path(output).parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {Path(output).parent}")


@dataclass(frozen=True)
class Outcome:
    """What a run has reached.

    Args:
        scores: of the best checkpoint.
        best: its path; None where none was saved.
        stopped_early: why, where early stopping has ended it.
        epochs: completed in all, also before a resume.
    """

    scores: dict[str, float]
    best: str | None
    stopped_early: str
    epochs: int


def _best(outcome: Outcome, monitor: str | None) -> dict[str, Any] | None:
    """The checkpoint that the scores are of, and the score by which it is the best, where something was validated."""
    if outcome.best is None:
        return None
    saved, value = read_run(outcome.best), outcome.scores.get(monitor or "")
    monitored = monitor if value is not None else None
    best = {"checkpoint": outcome.best, "epoch": saved.epoch, "step": saved.updates}
    return best | {"monitor": monitored, "value": value}


def _results(trainer: pl.Trainer, experiment: Experiment, stopwatch: Stopwatch, outcome: Outcome) -> dict[str, Any]:
    """The entries of ``results.json``.

    `scores` are of the checkpoint `best`, which was saved in `epoch`, from 1, after `step` updates. `seconds` has
    "start_up" to the beginning of training, "train" without validation, and "total" of the program that has written the
    file, which are those after a resume; `epochs` counts all. `devices` are those of one node, and `peak_memory_bytes`
    that of the process with rank 0.
    """
    recipe, data, device = experiment.recipe, data_contract(experiment.data), trainer.strategy.root_device
    sizes = dict(data.sizes) or stopwatch.sizes | loader_sizes(test=trainer.test_dataloaders)
    seconds, ended_at = stopwatch.seconds(), datetime.now().astimezone()
    parameters, trainable = count_parameters(recipe)
    return {
        "recipe": recipe.title,
        "command": experiment.typed.using(),
        "started_at": (ended_at - timedelta(seconds=seconds["total"])).isoformat(timespec="seconds"),
        "ended_at": ended_at.isoformat(timespec="seconds"),
        "host": platform.node(),
        "hardware": hardware(trainer),
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "versions": versions(),
        "scores": outcome.scores,
        "headline": recipe.headline(outcome.scores),
        "best": _best(outcome, recipe.monitor),
        "seconds": seconds,
        "epochs": outcome.epochs,
        "samples_per_second": stopwatch.epochs * sizes.get("train", 0) / max(1e-9, seconds["train"]),
        "peak_memory_bytes": {
            "host": peak_memory(torch.device("cpu")),
            "device": peak_memory(device) if device.type == "cuda" else None,
        },
        "stopped_early": outcome.stopped_early or None,
        "parameters": parameters,
        "trainable_parameters": stopwatch.trainable or trainable,
        "data": {"name": data.title, "sizes": sizes, "left_out": dict(data.left_out)},
        "config": dict(experiment.config),
    }


def _rows(results: Mapping[str, Any], headline: Mapping[str, str]) -> dict[str, str]:
    """What the closing table says, and the page, which shows the headline elsewhere."""
    data, seconds, rate = results["data"], results["seconds"], results["samples_per_second"]
    sizes = ", ".join(f"{size:,} {part}" for part, size in data["sizes"].items())
    memory = {where: size / 1e9 for where, size in results["peak_memory_bytes"].items() if size}
    rows = {
        "data": ": ".join(filter(None, (data["name"], sizes))),
        "parameters": f"{results['parameters']:,} ({results['trainable_parameters']:,} trainable)",
        **headline,
        "training": f"{seconds['train']:.1f} s" + (f", {rate:,.0f} samples/s" if rate else ""),
        "time": f"{seconds['total']:.1f} s, of which start-up {seconds['start_up']:.1f}",
        "peak memory": ", ".join(f"{size:.2f} GB {where}" for where, size in memory.items()),
    }
    return rows | ({"stopped early": results["stopped_early"]} if results["stopped_early"] else {})


def _next_steps(trainer: pl.Trainer, experiment: Experiment, best: str) -> dict[str, str]:
    """Where the best checkpoint is, and what to type with it."""
    rows = {"best checkpoint": shown(best)}
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        rows["TensorBoard"] = f"tensorboard --logdir {shlex.quote(shown(Path(best).parents[2]))}"
    example = f" {experiment.recipe.predict_example}" if takes_inputs(type(experiment.data)) else ""
    if example or is_overridden("predict_dataloader", experiment.data):
        rows["predict"] = f"{experiment.typed.program} predict --ckpt {shlex.quote(shown(best))}{example}"
    return rows


def _write(folder: Path, results: Mapping[str, Any], tables: Mapping[str, Table]) -> dict[str, str]:
    """Write the files of a finished run; returns the rows that name them."""
    rows = {}
    with best_effort(RESULTS):
        write_rows(folder / RESULTS, results)
        for name, table in tables.items():
            with best_effort(name):
                write_rows(folder / name, table.rows, table.columns)
        if tables:
            rows["tables"] = f"{', '.join(tables)} in {shown(folder)}"
        with best_effort(_REPORT):
            rows["report"] = shown(write_report(folder, results))
    return rows


def report(
    trainer: pl.Trainer, experiment: Experiment, folder: Path | None, stopwatch: Stopwatch, outcome: Outcome
) -> None:
    """Write results.json, its tables and report.html into `folder`, and print the closing table."""
    results = _results(trainer, experiment, stopwatch, outcome)
    rows = _rows(results, results["headline"])
    if folder is not None:
        if outcome.best:
            rows |= _next_steps(trainer, experiment, outcome.best)
        # Before anything is printed: a terminal may have gone.
        rows |= _write(folder, results, experiment.recipe.tables)
    print_pairs(rows)


def report_unsaved(folder: Path | None) -> None:
    """Say at the end of a run what could not be written, in one line.

    Args:
        folder: of the run; None for one without.

    Raises:
        RunFailedError: the results were not written.
    """
    lost = unsaved()
    what = "; ".join(f"{name} ({reason})" for name, reason in lost.items())
    if RESULTS in lost:
        raise RunFailedError(f"the training is done and its weights are saved, but not: {what}")
    if lost:
        saved = f"; the weights and {RESULTS} are in {shown(folder)}" if folder else ""
        print_error(f"warning: not saved: {what}{saved}")


# report.html


def _tables(folder: Path) -> dict[str, list[list[str]]]:
    """The first rows of the tables in the folder, such as those of classes, mistakes and translations."""
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        if path.name != METRICS:
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                tables[path.name] = list(itertools.islice(csv.reader(file), _MOST_ROWS + 1))
    return tables


def write_report(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write the page of a finished run into its folder, from its results and the tables beside it.

    Raises:
        OSError: the page cannot be written; an earlier one is as it was.
    """
    from jinja2 import Template

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    best, config, left_out = results["best"], results["config"], results["data"]["left_out"]
    environment = {
        **_rows(results, {}),
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()),
        "epochs": str(results["epochs"]),
        "hardware": results["hardware"],
        "nodes": str(results["num_nodes"]),
        "host": results["host"],
        "started": results["started_at"],
        "ended": results["ended_at"],
        **results["versions"],
    }
    texts = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in config.items()}
    settings = {name: value if isinstance(value := config[name], str) else text for name, text in texts.items()}
    page = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        title=f"{results['recipe']}: {folder.resolve().name}",
        command=results["command"],
        best=f"Scores of {Path(best['checkpoint']).name}, saved after {best['step']:,} updates" if best else "Scores",
        headline=results["headline"],
        scores={name: f"{value:.5g}" for name, value in results["scores"].items() if "_class_" not in name},
        tables=_tables(folder),
        most_rows=_MOST_ROWS,
        settings=settings,
        environment={name: text for name, text in environment.items() if text},
    )
    write_text(folder / _REPORT, page)
    return folder / _REPORT
