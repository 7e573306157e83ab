"""Loggers, summary and curves of a run, and its progress in a notebook; a failing logger does not end the run."""

import csv
import html
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.writing import best_effort, forget_failures
from callbacks.lib.lightning_internals import set_writer
from callbacks.lib.updates import updates_made
from callbacks.run_progress import RunProgress, batches_left
from datamodules.errors import UserError, spelled
from datamodules.lightning import CSVLogger, ExperimentWriter, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger, pl
from recipes.figures.drawing import Figure
from recipes.figures.plots import curve_plot
from recipes.runner.errors import is_rank_zero
from recipes.runner.saved_run import SavedRun, write_rows

SUMMARY = "summary.csv"
METRICS = "metrics.csv"
_NAMES = {"tensorboard": "the TensorBoard log", "csv": METRICS, "wandb": "the wandb log", "mlflow": "the MLflow log"}
_SET_UP = {"wandb": "or set WANDB_MODE=offline"}
_TRACKERS = ("wandb", "mlflow")
"""The loggers whose runs have an id, which a checkpoint keeps for a resume."""
_METHODS = ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint")
Row = Mapping[str, str]
_TITLES = {"bleu": "BLEU", "chrf": "chrF", "macro_f1": "macro-F1"}
_STYLE = """<style>
.lightning-recipes { --paper: transparent; --ink: currentColor; --faint: currentColor; --grid: rgba(128, 128, 128, .3);
  --train: #3b82f6; --val: #e07b1a; }
.lightning-recipes progress { width: 16rem; }
.lightning-recipes table { margin: .5rem 0; }
.lightning-recipes td, .lightning-recipes th { text-align: right; padding: .1rem .8rem .1rem 0; }
.lightning-recipes svg { max-width: 100%; margin-right: 1.5rem; }
</style>"""


class EpochSummary:
    """Table of the last values of each epoch, without the scores of the test and of single classes.

    Example:
        >>> summary = EpochSummary([{"epoch": 0, "step": 4, "train/loss": 2.0}])
        >>> summary.add({"epoch": 0, "step": 9, "val/loss": 1.0})
        >>> summary.add({"epoch": 0, "step": 9, "train/loss_epoch": 1.5})
        >>> summary.rows()
        [{'epoch': 1, 'updates': 10, 'train/loss': 1.5, 'val/loss': 1.0}]
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._epochs: dict[int, dict[str, Any]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add values that were logged together; later values win, and values of a whole epoch win over other values."""
        logged = {name: value for name, value in row.items() if value != ""}
        values = {n: value for n, value in logged.items() if not n.startswith("test/") and "_class_" not in n}
        epoch = values.pop("epoch", None)
        step = values.pop("step", None)
        if epoch is None or step is None or not values:
            return
        values_of_epoch = self._epochs.setdefault(int(epoch), {})
        values_of_epoch.update(values)
        values_of_epoch["updates"] = int(step) + 1  # Lightning counts steps from 0.

    def columns(self) -> list[str]:
        """Return the columns of all epochs: the epoch, the number of updates at its end, and the values by name."""
        names = {name.removesuffix("_epoch") for values in self._epochs.values() for name in values}
        return ["epoch", "updates", *sorted(names - {"updates"})]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each epoch; missing values are nan."""
        columns = self.columns()
        rows = []
        for epoch, values in sorted(self._epochs.items()):
            row = {"epoch": epoch + 1}
            for name in columns[1:]:
                row[name] = values.get(f"{name}_epoch", values.get(name, "nan"))
            rows.append(row)
        return rows


class _TensorBoard(TensorBoardLogger):
    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        try:
            super().log_metrics(metrics, step)
        except ValueError as error:
            # Lightning reports every ValueError, such as the error of a full disk, as a score of a wrong type.
            raise error.__cause__ or error from None

    @override
    def log_graph(  # type: ignore[override]
        self, model: pl.LightningModule, input_array: Tensor | None = None
    ) -> None:
        """Write the graph of the network in evaluation mode, without a change of the network and the random state."""
        if model.example_input_array is None:
            raise UserError(f"{type(model).__name__} has no example_input_array with the shape of the network's inputs")
        modules = [module for module in model.modules() if module.training]
        # TensorBoard's writer would put all modules into training mode, even modules that were in evaluation mode.
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                super().log_graph(model, input_array)
        finally:
            # One by one: `model.train()` would include modules that were in evaluation mode.
            for module in modules:
                module.training = True

    @override
    def save(self) -> None:
        # The method of the base class: TensorBoardLogger.save would write hparams.yaml, and config.yaml has the
        # settings.
        super(TensorBoardLogger, self).save()


class _CSV(CSVLogger):
    @property
    @override
    def experiment(self) -> Any:
        if is_rank_zero() and self._experiment is None:
            set_writer(self, _MetricsFile(self.log_dir))
        return super().experiment

    @override
    def save(self) -> None:
        super(CSVLogger, self).save()  # For the same reason.

    @override
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self.experiment.write_summary()


class _MetricsFile(ExperimentWriter):
    """Writer of metrics.csv; after a failed write, the file is unchanged, and the next write has its rows."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.metrics_keys, rows = read_metrics(Path(self.metrics_file_path))
        self._summary = EpochSummary(rows)

    @override
    def _check_log_dir_exists(self) -> None:
        # Lightning's method deletes an existing file, with the rows from before a resume.
        pass

    @override
    def save(self) -> None:
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        columns = sorted(set(self.metrics_keys).union(*self.metrics))
        if columns == self.metrics_keys and path.is_file():
            self._append(path)
        else:
            # A new column changes the header, so the whole file is written again.
            write_rows(path, [*read_metrics(path)[1], *self.metrics], columns)
        saved_rows = self.metrics
        # Only now: if the write fails, the rows stay for the next save.
        self.metrics = []
        self.metrics_keys = columns
        forget_failures(path.name)
        for row in saved_rows:
            self._summary.add(row)
        if any(name.endswith("_epoch") for row in saved_rows for name in row):
            self.write_summary()

    def write_summary(self) -> None:
        """Write summary.csv, with the epochs whose rows are in metrics.csv."""
        rows = self._summary.rows()
        if rows:
            write_rows(Path(self.log_dir) / SUMMARY, rows, self._summary.columns())

    def _append(self, path: Path) -> None:
        size = path.stat().st_size
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        except OSError:
            # A full disk may leave a part of a row.
            os.truncate(path, size)
            raise


def read_metrics(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and rows of a file of metrics; without a file, empty lists."""
    if not path.is_file():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        rows = list(table)
    return list(table.fieldnames or ()), rows


def _csv(folder: Path, updates: int) -> CSVLogger:
    """Build the logger of metrics.csv; a resumed run keeps the rows of its first `updates`."""
    # Only rank 0 reads the file: all nodes may share its disk.
    if is_rank_zero():
        file = folder / METRICS
        if not updates:
            file.unlink(missing_ok=True)
            (folder / SUMMARY).unlink(missing_ok=True)
        elif file.is_file():
            columns, rows = read_metrics(file)
            # After a crash of the machine, the last row may be cut, without its step.
            complete = [row for row in rows if (row.get("step") or "").isdigit()]
            write_rows(file, [row for row in complete if int(row["step"]) < updates], columns)
    return _CSV(str(folder), name="", version="")


def _print_no_traceback_of_writers() -> None:
    """Ignore errors of TensorBoard's threads: the next call of their writer raises them again."""
    if threading.excepthook is threading.__excepthook__:

        def hook(args: threading.ExceptHookArgs) -> None:
            if type(args.thread).__module__.partition(".")[0] != "tensorboard":
                threading.__excepthook__(args)

        threading.excepthook = hook


def logger_names(text: str) -> list[str]:
    """Return the names in ``--logger`` without duplicates.

    Raises:
        UserError: there is no such logger, or its package is not installed.
    """
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if names == ["none"]:
        return []
    for name in names:
        if name not in _NAMES:
            problem = f"expected some of {', '.join(_NAMES)} with commas, or none"
            raise UserError(problem, setting="logger", value=name)
    for name in names:
        if name in _TRACKERS and not find_spec(name):
            raise UserError(f"{spelled('logger', name)} needs another package: pip install {name}")
    return names


def loggers(folder: Path, saved: SavedRun | None, names: Sequence[str] = ("tensorboard", "csv")) -> list[Logger]:
    """Build the loggers of a run by name; their failures, such as a full disk, are printed and do not end the run.

    With `saved`, the checkpoint of a resume, earlier entries are kept, and W&B and MLflow continue their run. MLflow
    logs to the server of MLFLOW_TRACKING_URI, or into `mlflow.db` beside the runs.
    """
    saved_ids = saved.run_ids if saved else {}
    _print_no_traceback_of_writers()
    loggers_of_run = []
    for name in names:
        try:
            logger = _build_logger(name, folder, saved.updates if saved else 0, saved_ids)
            if isinstance(logger, WandbLogger):
                _ = logger.experiment  # Logs in now: an error is one line here, but a traceback during training.
        except Exception as error:
            reason = str(error).splitlines()[0].rstrip(".")
            setting = spelled("logger", name)
            advice = _SET_UP.get(name, "set it up")
            raise UserError(f"{setting} cannot start: {reason}; {advice}, or leave it out") from error
        for method in _METHODS:
            setattr(logger, method, best_effort(_NAMES[name])(getattr(logger, method)))
        loggers_of_run.append(logger)
    return loggers_of_run


def _build_logger(name: str, folder: Path, updates: int, saved_ids: Mapping[str, str]) -> Logger:
    if name == "tensorboard":
        return _TensorBoard(str(folder), name="", version="", log_graph=True, default_hp_metric=False)
    if name == "csv":
        return _csv(folder, updates)
    project = folder.parent.name
    if name == "wandb":
        return WandbLogger(
            folder.name, folder, id=saved_ids.get("wandb") or token_hex(4), project=project, resume="allow"
        )
    tracking_uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parent}/mlflow.db")
    return MLFlowLogger(project, folder.name, tracking_uri, run_id=saved_ids.get("mlflow"))


def log_settings(
    loggers: Sequence[Logger], config: Mapping[str, Any], graph_of: pl.LightningModule | None = None
) -> None:
    """Log the settings with the loggers that show settings; they are also in config.yaml.

    Args:
        graph_of: the recipe whose graph is written for TensorBoard, or None.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            with best_effort(_NAMES["tensorboard"]):
                _write_settings(logger, config)
            if graph_of is not None:
                with best_effort("the graph of the network"):
                    logger.log_graph(graph_of)
        elif isinstance(logger, WandbLogger):
            logger.log_hyperparams(dict(config))
        elif isinstance(logger, MLFlowLogger):
            with best_effort(_NAMES["mlflow"]):
                # MLflow rejects a second value of a parameter, such as the epochs of a resume that trains longer.
                logged = logger.experiment.get_run(logger.run_id).data.params
                logger.log_hyperparams({name: value for name, value in config.items() if name not in logged})


def _write_settings(logger: TensorBoardLogger, config: Mapping[str, Any]) -> None:
    """Write the settings into TensorBoard's table of hyperparameters.

    `TensorBoardLogger.log_hyperparams` needs a score to write settings, and the score would add a point to its curve
    before the first update. With the settings alone, TensorBoard still compares all runs, and shows every score.
    """
    from torch.utils.tensorboard.summary import hparams

    # TensorBoard's table takes numbers and text only.
    plain: dict[str, Any] = {}
    for name, value in config.items():
        plain[name] = value if isinstance(value, (int, float, str)) else json.dumps(value)
    _, session, _ = hparams(plain, {})
    logger.experiment.file_writer.add_summary(session)


class LoggedImage(NamedTuple):
    """Image and its PNG file, so that no logger has to compress the image again."""

    image: Image
    png: bytes


def log_images(loggers: Iterable[Logger], images: Mapping[str, LoggedImage], step: int) -> None:
    """Log images with the loggers that take images: TensorBoard and W&B.

    Args:
        images: the images by name.
        step: the number of completed updates.
    """
    for logger in loggers if images else ():
        if isinstance(logger, TensorBoardLogger):
            with best_effort(_NAMES["tensorboard"]):
                _write_images(logger, images, step)
        elif isinstance(logger, WandbLogger):
            with best_effort(_NAMES["wandb"]):
                for name, logged in images.items():
                    logger.log_image(name, [logged.image])


def _write_images(logger: TensorBoardLogger, images: Mapping[str, LoggedImage], step: int) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard.writer import FileWriter

    # After training, the logger's file is closed; TensorBoard reads another file as a continuation.
    open_writer = logger.experiment.file_writer
    writer = open_writer or FileWriter(logger.log_dir)
    for name, (image, png) in images.items():
        encoded = Summary.Image(height=image.height, width=image.width, colorspace=3, encoded_image_string=png)
        writer.add_summary(Summary(value=[Summary.Value(tag=name, image=encoded)]), step)
    writer.flush()
    if writer is not open_writer:
        writer.close()


def run_ids(loggers: Iterable[Logger]) -> dict[str, str]:
    """Return the ids of the runs of W&B and MLflow by logger; a checkpoint keeps them for a resume."""
    ids: dict[str, str] = {}
    for logger in loggers:
        for name, kind in (("wandb", WandbLogger), ("mlflow", MLFlowLogger)):
            if isinstance(logger, kind):
                # Without its server, the run has no id and no log.
                with best_effort(_NAMES[name]):
                    ids[name] = str(logger.version)
    return ids


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def series(rows: Sequence[Row], column: str) -> list[tuple[float, float]]:
    """Return the values of a column as (completed updates, value), in order; the last value of each update counts.

    Example:
        >>> series([{"step": "4", "val/loss": "0.5"}, {"step": "9", "val/loss": ""}], "val/loss")
        [(5.0, 0.5)]
    """
    # Lightning logs the index of the step, from 0; the number of completed updates is larger by one.
    values = {_number(row.get("step")) + 1: _number(row[column]) for row in rows if row.get(column)}
    return sorted((update, value) for update, value in values.items() if math.isfinite(update + value))


def _both_parts(rows: Sequence[Row], name: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of a quantity in training and in validation.

    For training, these are the points between the epochs, or the points of whole epochs if there are more.
    """
    between_epochs = series(rows, f"train/{name}")
    whole_epochs = series(rows, f"train/{name}_epoch")
    series_by_part = {
        "training": between_epochs if len(between_epochs) > len(whole_epochs) else whole_epochs,
        "validation": series(rows, f"val/{name}"),
    }
    return {part: points for part, points in series_by_part.items() if points}


def curves(rows: Sequence[Row], monitor: str | None) -> dict[str, Figure]:
    """Plot the loss, the score that chooses the best checkpoint, and the learning rate; return the plots by name.

    Args:
        rows: the rows of metrics.csv.
        monitor: the score, such as "val/accuracy"; None: only the loss.
    """
    plots = {"curve_loss": curve_plot("loss", _both_parts(rows, "loss"))}
    if monitor and monitor.rpartition("/")[2] != "loss":
        part, _, name = monitor.rpartition("/")
        series_by_part = {"": series(rows, monitor)}
        if part == "val":
            series_by_part = _both_parts(rows, name)
        plots["curve_score"] = curve_plot(_TITLES.get(name, name.replace("_", " ")), series_by_part)
    rates = sorted(name for row in rows[:1] for name in row if name == "lr" or name.startswith("lr/"))
    if rates:
        plots["curve_rate"] = curve_plot("learning rate", {rates[0]: series(rows, rates[0])}, may_be_log=False)
    return {name: plot for name, plot in plots.items() if plot is not None}


def run_curves(folder: Path, monitor: str | None) -> dict[str, Figure]:
    """Return the curves of the run in a folder; without metrics.csv, an empty dict."""
    return curves(read_metrics(folder / METRICS)[1], monitor)


def in_notebook() -> bool:
    """Return whether this program runs in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def framed(*parts: str) -> str:
    """Return parts of a page in one element with their style."""
    return f'{_STYLE}<div class="lightning-recipes">{"".join(parts)}</div>'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table with the columns of all rows."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in columns)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def plots(figures: Mapping[str, Figure]) -> str:
    """Return figures side by side, as HTML."""
    return "".join(figure.html() for figure in figures.values())


class NotebookProgress(RunProgress):
    """Progress of a run in one output of a notebook: a bar, the line of `RunProgress` and a row for each epoch.

    At the end of training, the curves of the run replace the bar. The bar of an evaluation disappears at its end.

    Runs on: the hooks of `RunProgress`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[dict[str, str]] = []
        self._output: Any = None

    @override
    def _draws(self) -> bool:
        return True

    def _update(self, *parts: str) -> None:
        from IPython.display import HTML, display

        content = HTML(framed(*parts))  # type: ignore[no-untyped-call]
        if self._output is None:
            self._output = display(content, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(content)

    @override
    def _draw(self, trainer: pl.Trainer, parts: Sequence[tuple[int, str]]) -> None:
        line = html.escape("  ".join(text for _, text in parts if text))
        share = ""
        trains = trainer.state.fn == "fit" and not trainer.sanity_checking
        remaining = batches_left(trainer) if trains else float("inf")
        if remaining < float("inf"):
            share = f' value="{updates_made(trainer) / max(1, updates_made(trainer) + remaining):.3f}"'
        self._update(f"<progress{share}></progress> {line}", table(self._rows))

    @override
    def _end_epoch(self, trainer: pl.Trainer, scores: Mapping[str, float], seconds: float) -> None:
        values = {name: f"{value:.4f}" for name, value in scores.items()}
        self._rows.append({"epoch": str(trainer.current_epoch + 1), **values, "seconds": f"{seconds:.1f}"})
        self._update(table(self._rows))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        figures: dict[str, Figure] = {}
        for logger in trainer.loggers:
            logger.save()  # The curves are drawn from metrics.csv.
            if isinstance(logger, CSVLogger):
                figures = run_curves(Path(logger.log_dir), getattr(pl_module, "monitor", None))
        self._update(table(self._rows), plots(figures))
        self._output = None

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._output is not None and trainer.state.fn != "fit":
            self._update("")
        self._output = None
