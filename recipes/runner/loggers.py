"""The loggers of a run: TensorBoard and metrics.csv in its folder, W&B and MLflow. None of their failures ends it."""

import csv
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from PIL.Image import Image
from typing_extensions import override

from callbacks.lib.lightning_internals import set_writer
from callbacks.lib.writing import best_effort, forget_failures
from datamodules.errors import UserError
from recipes.runner.printing import is_rank_zero
from recipes.runner.results import write_rows
from recipes.runner.saved_run import read_run
from recipes.runner.summary import SUMMARY, EpochSummary

METRICS = "metrics.csv"
_NAMES = {"tensorboard": "the TensorBoard log", "csv": METRICS, "wandb": "the wandb log", "mlflow": "the MLflow log"}
_TRACKERS = ("wandb", "mlflow")
"""Those whose run has an id, which a checkpoint keeps for a resume."""
_METHODS = ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint")


class _TensorBoard(TensorBoardLogger):
    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        try:
            super().log_metrics(metrics, step)
        except ValueError as error:
            raise error.__cause__ or error from None  # Lightning's says that a full disk were a score of a wrong type.

    @override
    def save(self) -> None:
        # Without hparams.yaml, which TensorBoardLogger.save would write: config.yaml holds the settings.
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
        super(CSVLogger, self).save()  # Without hparams.yaml, too.

    @override
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self.experiment.write_summary()


class _MetricsFile(ExperimentWriter):
    """Writes metrics.csv; where it cannot, the file stays as it was, and the rows are written with the next ones."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.metrics_keys, rows = read_metrics(Path(self.metrics_file_path))
        self._summary = EpochSummary(rows)

    @override
    def _check_log_dir_exists(self) -> None:
        # Lightning's method deletes a file that is there, and it holds what was logged before a resume.
        pass

    @override
    def save(self) -> None:
        if not self.metrics:
            return
        path, columns = Path(self.metrics_file_path), sorted(set(self.metrics_keys).union(*self.metrics))
        if columns == self.metrics_keys and path.is_file():
            self._append(path)
        else:
            write_rows(path, [*read_metrics(path)[1], *self.metrics], columns)
        written = self.metrics
        self.metrics, self.metrics_keys = [], columns
        forget_failures(path.name)
        for row in written:
            self._summary.add(row)
        if any(name.endswith("_epoch") for row in written for name in row):
            self.write_summary()

    def write_summary(self) -> None:
        """Write summary.csv; it has the epochs whose rows are in metrics.csv."""
        if rows := self._summary.rows():
            write_rows(Path(self.log_dir) / SUMMARY, rows, self._summary.columns())

    def _append(self, path: Path) -> None:
        size = path.stat().st_size
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        except OSError:
            os.truncate(path, size)
            raise


def read_metrics(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and rows of a file of metrics; none where there is no file."""
    if not path.is_file():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        rows = list(table)
    return list(table.fieldnames or ()), rows


def _csv(folder: Path, updates: int) -> CSVLogger:
    """Logs into metrics.csv, which keeps what was logged in the first `updates` of a run."""
    # Only rank 0 looks at the file: it may lie on a disk that all nodes share.
    if is_rank_zero():
        file = folder / METRICS
        if not updates:
            file.unlink(missing_ok=True)
            (folder / SUMMARY).unlink(missing_ok=True)
        elif file.is_file():
            columns, rows = read_metrics(file)
            # A machine that went down may have cut the last row.
            kept = [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) < updates]
            write_rows(file, kept, columns)
    return _CSV(str(folder), name="", version="")


def _print_no_traceback_of_writers() -> None:
    """Leave the errors of TensorBoard's background threads to the next call of their writer, which raises them."""
    if threading.excepthook is threading.__excepthook__:

        def hook(args: threading.ExceptHookArgs) -> None:
            if type(args.thread).__module__.partition(".")[0] != "tensorboard":
                threading.__excepthook__(args)

        threading.excepthook = hook


def logger_names(text: str) -> list[str]:
    """The loggers that ``--logger`` names, each once.

    Raises:
        UserError: there is no such logger, or its package is not installed.
    """
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if names == ["none"]:
        return []
    for name in names:
        if name not in _NAMES:
            raise UserError(f"logger={name}: expected some of {', '.join(_NAMES)} with commas, or none")
    for name in names:
        if name in _TRACKERS and not find_spec(name):
            raise UserError(f"logger={name} needs another package: pip install {name}")
    return names


def loggers(folder: Path, resume: str | None, names: Sequence[str] = ("tensorboard", "csv")) -> list[Logger]:
    """The loggers of a run, by name; their failures, such as of a full disk or a server that is gone, are printed.

    With `resume`, what was logged before that checkpoint stays there, and W&B and MLflow go on in their run. MLflow
    logs to the server of MLFLOW_TRACKING_URI, or into `mlflow.db` beside the runs.
    """
    saved = read_run(resume) if resume else None
    saved_ids = saved.run_ids if saved else {}
    make: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: _TensorBoard(str(folder), name="", version="", default_hp_metric=False),
        "csv": lambda: _csv(folder, saved.updates if saved else 0),
        "wandb": lambda: WandbLogger(
            folder.name, folder, id=saved_ids.get("wandb") or token_hex(4), project=folder.parent.name, resume="allow"
        ),
        "mlflow": lambda: MLFlowLogger(
            folder.parent.name,
            folder.name,
            os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parent}/mlflow.db"),
            run_id=saved_ids.get("mlflow"),
        ),
    }
    _print_no_traceback_of_writers()
    made = []
    for name in names:
        try:
            logger = make[name]()
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"logger={name} cannot start: {reason}; set it up, or leave it out") from error
        for method in _METHODS:
            setattr(logger, method, best_effort(_NAMES[name])(getattr(logger, method)))
        made.append(logger)
    return made


def log_settings(loggers: Sequence[Logger], config: Mapping[str, Any]) -> None:
    """Give the settings to the loggers that show them; config.yaml also holds them."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            with best_effort(_NAMES["tensorboard"]):
                _write_settings(logger, config)
        elif isinstance(logger, WandbLogger):
            logger.log_hyperparams(dict(config))
        elif isinstance(logger, MLFlowLogger):
            with best_effort(_NAMES["mlflow"]):
                # It refuses another value of a setting, as a resume with more epochs has.
                logged = logger.experiment.get_run(logger.run_id).data.params
                logger.log_hyperparams({name: value for name, value in config.items() if name not in logged})


def _write_settings(logger: TensorBoardLogger, config: Mapping[str, Any]) -> None:
    """Write the settings for the table of hyper-parameters.

    `TensorBoardLogger.log_hyperparams` writes none without a score, whose curve would get a point before the first
    update. Of the settings alone TensorBoard compares all runs, and takes every score for a metric.
    """
    from torch.utils.tensorboard.summary import hparams

    # Numbers and text only.
    plain = {k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in config.items()}
    _, session, _ = hparams(plain, {})
    logger.experiment.file_writer.add_summary(session)


class LoggedImage(NamedTuple):
    """An image, and the same as the bytes of a PNG file, so that no logger has to compress it again."""

    image: Image
    png: bytes


def log_images(loggers: Iterable[Logger], images: Mapping[str, LoggedImage], step: int) -> None:
    """Give images to the loggers that take some: TensorBoard and W&B.

    Args:
        images: by name.
        step: updates that were made.
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

    # After training its file is closed; TensorBoard goes on with the next one.
    open_writer = logger.experiment.file_writer
    writer = open_writer or FileWriter(logger.log_dir)
    for name, (image, png) in images.items():
        encoded = Summary.Image(height=image.height, width=image.width, colorspace=3, encoded_image_string=png)
        writer.add_summary(Summary(value=[Summary.Value(tag=name, image=encoded)]), step)
    writer.flush()
    if writer is not open_writer:
        writer.close()


def run_ids(loggers: Iterable[Logger]) -> dict[str, str]:
    """The ids of the runs of W&B and MLflow by the logger's name, which a checkpoint keeps for a resume."""
    ids: dict[str, str] = {}
    for logger in loggers:
        for name, kind in (("wandb", WandbLogger), ("mlflow", MLFlowLogger)):
            if isinstance(logger, kind):
                # A server that is gone leaves the run without an id, and without its log.
                with best_effort(_NAMES[name]):
                    ids[name] = str(logger.version)
    return ids
