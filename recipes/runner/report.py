"""Results of a run: the result of `fit`, the closing table, results.json, tables, pictures and the page."""

import csv
import html
import io
import itertools
import json
import platform
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from callbacks.checkpointing.writing import atomic_write, best_effort, unsaved
from callbacks.lib.lightning_internals import callbacks_of
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError
from datamodules.lightning import TensorBoardLogger, is_overridden, pl
from recipes.base import Recipe
from recipes.evaluation_tables import Headline, ResultTable
from recipes.figures.drawing import color_style
from recipes.figures.images import ImageGrid, Picture
from recipes.runner.build import BuiltRun
from recipes.runner.errors import print_error, relative_path
from recipes.runner.flags import takes_inputs
from recipes.runner.loggers import METRICS, SUMMARY, LoggedImage, framed, log_images, plots, run_curves, table
from recipes.runner.saved_run import (
    RESULTS,
    Stopwatch,
    count_parameters,
    forward_flops,
    hardware,
    loader_sizes,
    peak_memory,
    read_results,
    read_run,
    versions,
    write_rows,
    write_text,
)

FIGURES = "figures"
_MAX_ROWS = 25
_MAX_TRANSLATIONS = 12
_TILES = 3
_TRANSLATIONS = "test_translations.csv"
_REPORT = "report.html"
_LINKED = ("checkpoints/best.ckpt", "checkpoints/last.ckpt", RESULTS, "config.yaml", METRICS, SUMMARY)
"""Files of a run to which its page links, if they exist."""


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run.

    Args:
        model: the recipe with the weights of the best checkpoint; `fit` returns it in evaluation mode on the CPU.
        scores: the scores of this checkpoint, such as "val/accuracy" and "test/loss".
        folder: the run's folder with checkpoints, curves and ``results.json``; None if nothing was saved.
        checkpoint: the checkpoint with the weights; None if no checkpoint was saved.
        data: the data module of the training; None if the run had finished before.
        epochs: number of completed epochs, including epochs before a resume.
        stopped_early: the reason of early stopping, or "".
        weights_sha256: the hash of the weights and buffers at the end of the training, see
            `recipes.runner.verify.weights_hash`; None if the run has not ended.
        tables: tables of the validation and the test after training, by the name of their file.
        figures: the pictures of ``report.html`` except the curves, by name.
    """

    model: Recipe
    scores: dict[str, float]
    folder: Path | None
    checkpoint: Path | None
    data: pl.LightningDataModule | None = None
    epochs: int = 0
    stopped_early: str = ""
    weights_sha256: str | None = None
    tables: dict[str, ResultTable] = field(default_factory=dict)
    figures: dict[str, Picture] = field(default_factory=dict)

    @override
    def __repr__(self) -> str:
        scores = ", ".join(f"{row.title} {row.value}" for row in self.headline)
        return f"<RunResult {self.model.title}: {scores or 'no score'}; {self.folder or 'not saved'}>"

    @property
    def headline(self) -> list[Headline]:
        """The main scores."""
        return self.model.headline(self.scores)

    def _repr_html_(self) -> str:
        """Return the scores and the curves, for notebooks."""
        figures = run_curves(self.folder, self.model.monitor) if self.folder else {}
        report_link = f"<p>The whole run: {html.escape(str(self.folder / 'report.html'))}</p>" if self.folder else ""
        return framed(table([{row.title: row.text for row in self.headline}]), plots(figures), report_link)


def read_result(folder: Path, recipe: type[Recipe]) -> RunResult:
    """Read the result of a finished run from its folder.

    Args:
        folder: the run's folder, which may have moved.
        recipe: the class of the run's recipe.
    """
    results = read_results(folder)
    saved = results["best"]["checkpoint"] if results["best"] else "last.ckpt"
    # Only the file's name in the saved path: the folder may have moved.
    best = folder / "checkpoints" / Path(saved).name
    return RunResult(
        model=recipe.load_from_checkpoint(best, map_location="cpu", weights_only=True),
        scores=results["scores"],
        folder=folder,
        checkpoint=best,
        epochs=results["epochs"],
        stopped_early=results["stopped_early"] or "",
        weights_sha256=results.get("weights_sha256"),  # None in a file of an earlier version.
    )


def figures_of(trainer: pl.Trainer) -> dict[str, Picture]:
    """Return the ``figures`` of the recipe and of the callbacks, by name."""
    return _collected(trainer, "figures")


def tables_of(trainer: pl.Trainer) -> dict[str, ResultTable]:
    """Return the ``tables`` of the recipe and of the callbacks, by the name of their file."""
    return _collected(trainer, "tables")


def _collected(trainer: pl.Trainer, name: str) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    for owner in (trainer.lightning_module, *callbacks_of(trainer)):
        items_of_owner = getattr(owner, name, None)
        if isinstance(items_of_owner, Mapping):
            collected |= items_of_owner
    return collected


def save_pictures(folder: Path, pictures: Mapping[str, Picture], trainer: pl.Trainer) -> None:
    """Write pictures into the folder of a run as PNG, and log them; the loggers have the curves already."""
    images = {}
    for name, picture in pictures.items():
        with best_effort(f"{FIGURES}/{name}.png"):
            image = picture.image()
            file = io.BytesIO()
            # Higher levels of compression take twice as long, and save a fifth of the bytes.
            image.save(file, "png", compress_level=1)
            with atomic_write(folder / FIGURES / f"{name}.png") as temporary:
                temporary.write_bytes(file.getvalue())
            if not name.startswith("curve_"):
                images[name] = LoggedImage(image, file.getvalue())
    log_images(trainer.loggers, images, trainer.global_step)


class RunFiles(Stopwatch):
    """Callback that saves pictures of the first training batch, and the page of an interrupted run.

    `figures` has these pictures. The callback also measures the run, as a `Stopwatch`.

    Runs on: the start and the first batch of training, and `on_exception`; on rank 0.

    Args:
        started_at: `time.monotonic` at the start of the program.
        folder: the run's folder.
        built: the built run, for the page of an unfinished run.
    """

    def __init__(self, started_at: float, folder: Path, built: BuiltRun) -> None:
        super().__init__(started_at)
        self.folder = folder
        self.figures: dict[str, Picture] = {}
        self._built = built
        self._has_batch = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._has_batch = not trainer.is_global_zero
        # Moved away: a folder has results.json if and only if its run has finished.
        if trainer.is_global_zero and (self.folder / RESULTS).is_file():
            with best_effort("the results of the shorter training"):
                (self.folder / RESULTS).replace(self.folder / "results-before.json")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._has_batch:
            return
        self._has_batch = True
        with best_effort("pictures of the training data"):
            self.figures = pl_module.training_figures(batch)
            save_pictures(self.folder, self.figures, trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and trainer.state.fn == "fit":
            name = getattr(exception, "signal_name", None) or type(exception).__name__
            for logger in trainer.loggers:
                logger.save()  # The page draws its curves from metrics.csv.
            with best_effort("report.html"):
                how = f"interrupted by {name} after {trainer.global_step:,} updates"
                report_interrupted(trainer, self._built, self, how)


def _tables(folder: Path) -> dict[str, list[list[str]]]:
    """Return the first rows of the tables in a folder, such as the tables of classes and mistakes."""
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        if path.name not in (METRICS, _TRANSLATIONS):
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                tables[path.name] = list(itertools.islice(csv.reader(file), _MAX_ROWS + 1))
    return tables


def _translations(path: Path) -> tuple[list[dict[str, str]], int]:
    """Return at most twelve evenly spaced rows of a table (files are often sorted), and its number of rows."""
    if not path.is_file():
        return [], 0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    shown = min(_MAX_TRANSLATIONS, len(rows))
    return [rows[number * len(rows) // shown] for number in range(shown)], len(rows)


def split_scores(
    headline: Sequence[Headline], scores: Mapping[str, float]
) -> tuple[list[Headline], dict[str, str], dict[str, str]]:
    """Split the scores into three groups: tiles, other scores, and signatures of metrics.

    The scores of single classes are left out, because a table has them.

    Example:
        >>> headline = [Headline("val accuracy", "val/accuracy", "99.00 %")]
        >>> split_scores(headline, {"val/accuracy": 0.99, "val/loss": 0.25})[1]
        {'val/loss': '0.25'}
    """
    other_scores = {}
    for row in headline[_TILES:]:
        other_scores[row.title] = row._replace(signature="").text
    shown = {row.score for row in headline}
    for name, score in scores.items():
        if "_class_" not in name and name not in shown:
            other_scores[name] = f"{score:.5g}"
    signatures = {row.title: row.signature for row in headline if row.signature}
    return list(headline[:_TILES]), other_scores, signatures


@cache
def _page_template() -> Any:
    from jinja2 import Template

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def write_page(
    path: Path,
    results: Mapping[str, Any],
    headline: Sequence[Headline],
    rows: Mapping[str, str],
    pictures: Mapping[str, Picture],
) -> Path:
    """Write the page of a run, from its results, its pictures, and the tables in the folder of the page.

    Args:
        results: the entries of ``results.json``.
        headline: the main scores.
        rows: rows to add to the environment: data, parameters, times and memory.
        pictures: pictures by name; names with the prefix "curve_" form a group, and so do names with "attention_".

    Raises:
        OSError: the page cannot be written; an earlier page is unchanged.
    """
    folder = path.parent
    best = results["best"]
    left_out = results["data"]["left_out"]
    environment = {
        **rows,
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()),
        "epochs": str(results["epochs"]),
        "hardware": results["hardware"],
        "nodes": str(results["num_nodes"]),
        "host": results["host"],
        "started": results["started_at"],
        "ended": results["ended_at"],
        **results["versions"],
    }
    settings = {}
    for name, value in results["config"].items():
        settings[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    tiles, scores, signatures = split_scores(headline, results["scores"])
    curves = [picture for name, picture in pictures.items() if name.startswith("curve_")]
    attention = [picture for name, picture in pictures.items() if name.startswith("attention")]
    other_pictures: list[Picture] = []
    wide_pictures: list[Picture] = []
    for name, picture in pictures.items():
        if not name.startswith(("curve_", "attention")):
            # A grid of groups is too high for a column.
            is_wide = isinstance(picture, ImageGrid) and picture.group > 1
            (wide_pictures if is_wide else other_pictures).append(picture)
    translations, number_of_translations = _translations(folder / _TRANSLATIONS)
    page = _page_template().render(
        colors=color_style(),
        title=f"{results['recipe']}: {folder.resolve().name}",
        state=results["stopped_early"],
        command=results["command"],
        best=f"of {Path(best['checkpoint']).name}, saved after {best['step']:,} updates" if best else "",
        tiles=tiles,
        scores=scores,
        signatures=signatures,
        curves=curves,
        attention=attention,
        pictures=other_pictures,
        wide_pictures=wide_pictures,
        translations=translations,
        number_of_translations=number_of_translations,
        translations_file=_TRANSLATIONS,
        tables=_tables(folder),
        most_rows=_MAX_ROWS,
        settings=settings,
        environment={name: text for name, text in environment.items() if text},
        files=[name for name in _LINKED if (folder / name).is_file()],
        tensorboard=f"tensorboard --logdir {relative_path(folder.parent)}" if [*folder.glob("events.*")] else "",
    )
    write_text(path, page)
    return path


def print_pairs(rows: dict[str, str]) -> None:
    """Print two columns: names and values."""
    column = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:<{column}}{value}".rstrip())  # noqa: T201


def print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table with a column for each key; without rows, print nothing."""
    if not rows:
        return
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths)).rstrip())  # noqa: T201


def _best(result: RunResult) -> dict[str, Any] | None:
    """Return the checkpoint of the scores and its monitored value."""
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


def _results(trainer: pl.Trainer, built: BuiltRun, stopwatch: Stopwatch, result: RunResult) -> dict[str, Any]:
    """Return the entries of ``results.json``.

    `weights_sha256` is the hash of the weights at the end of the training, for the comparison of two runs. `scores`
    belong to the checkpoint `best`, which was saved in `epoch`, counted from 1, after `step` updates.
    `seconds` has "start_up", "train" without validation, and "total" of the program that writes the file, without the
    time before a resume; `epochs` counts all epochs. `devices` is the number on one node, and `peak_memory_bytes` is
    measured on rank 0.
    """
    recipe = result.model
    data = data_contract(built.data)
    device = trainer.strategy.root_device
    # The sizes of the loaders: a user's data module may not have its sizes.
    sizes = dict(data.sizes) or stopwatch.sizes | loader_sizes(test=trainer.test_dataloaders)
    seconds = stopwatch.seconds()
    ended_at = datetime.now().astimezone()
    parameters, trainable = count_parameters(recipe)
    return {
        "recipe": recipe.title,
        "command": built.typed.call or built.typed.using(),
        "started_at": (ended_at - timedelta(seconds=seconds["total"])).isoformat(timespec="seconds"),
        "ended_at": ended_at.isoformat(timespec="seconds"),
        "host": platform.node(),
        "hardware": hardware(trainer),
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "versions": {"cuda": None, "cudnn": None, **versions()},
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
        "flops": forward_flops(recipe) if built.spec.run.summary else None,
        "data": {"name": data.title, "sizes": sizes, "left_out": dict(data.left_out)},
        "config": dict(built.spec.config),
    }


def _rows(results: Mapping[str, Any], headline: Mapping[str, str]) -> dict[str, str]:
    """Return the rows of the closing table; for the page, `headline` is empty."""
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


def _next_steps(trainer: pl.Trainer, built: BuiltRun, best: Path) -> dict[str, str]:
    """Return the path of the best checkpoint, and commands for it."""
    rows = {"best checkpoint": relative_path(best)}
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        rows["TensorBoard"] = f"tensorboard --logdir {shlex.quote(relative_path(best.parents[2]))}"
    example = f" {built.recipe.predict_example}" if takes_inputs(type(built.data)) else ""
    if example or is_overridden("predict_dataloader", built.data):
        rows["predict"] = f"{built.typed.program} predict --ckpt {shlex.quote(relative_path(best))}{example}"
    return rows


def _write(
    trainer: pl.Trainer, result: RunResult, results: Mapping[str, Any], saved: Collection[str]
) -> dict[str, str]:
    """Write the files of a finished run; return rows with their paths.

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


def report_interrupted(trainer: pl.Trainer, built: BuiltRun, files: RunFiles, how: str) -> None:
    """Write the page of an unfinished run, with the last logged scores.

    Args:
        how: the end of the run in words, such as "interrupted by Ctrl-C after 120 updates".
    """
    recipe = built.recipe
    scores = {name: float(value) for name, value in trainer.callback_metrics.items() if name.partition("/")[0] != "lr"}
    result = RunResult(recipe, scores, files.folder, None, epochs=trainer.current_epoch, stopped_early=how)
    results = _results(trainer, built, files, result)
    pictures = run_curves(files.folder, recipe.monitor) | figures_of(trainer)
    write_page(files.folder / _REPORT, results, result.headline, _rows(results, {}), pictures)


def report(trainer: pl.Trainer, built: BuiltRun, stopwatch: Stopwatch, result: RunResult) -> None:
    """Write results.json, its tables and report.html into the run's folder, and print the closing table."""
    results = _results(trainer, built, stopwatch, result)
    rows = _rows(results, results["headline"])
    if result.folder is not None:
        if result.checkpoint:
            rows |= _next_steps(trainer, built, result.checkpoint)
        # Files first: printing fails if the terminal has been closed.
        saved = stopwatch.figures if isinstance(stopwatch, RunFiles) else ()
        rows |= _write(trainer, result, results, saved)
    print_pairs(rows)


def print_scores(scores: Mapping[str, Any], tables: Mapping[str, ResultTable], files: Mapping[str, Path]) -> None:
    """Print the scores of an evaluation, without the scores of single classes, and the paths of its tables.

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
    """Print, at the end of a run and in one line, the outputs that could not be written.

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
