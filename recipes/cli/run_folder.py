"""A run's folder, and what is logged into it."""

import csv
import difflib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from typing_extensions import override

from callbacks.lib.lightning_internals import set_writer
from datamodules.errors import UserError
from recipes.cli.settings import RunSettings
from recipes.launch.rank_zero import is_rank_zero, rank_zero_print
from recipes.resume.resume_point import ResumePoint, locked
from recipes.resume.saved_run import read_run

__all__ = ["logger_names", "loggers", "run_folder"]

_LOGGERS: dict[str, tuple[str, ...]] = {"tensorboard": (), "csv": (), "wandb": ("wandb",), "mlflow": ("mlflow",)}
"""The loggers, and the packages one of which each needs besides those of this one."""

log = logging.getLogger("lightning_recipes.cli")


@contextmanager
def run_folder(
    settings: RunSettings, title: str, start: ResumePoint, worth_keeping: Callable[[], bool] = lambda: False
) -> Iterator[Path]:
    """The run's folder, locked for this process.

    A new folder is removed when a `UserError` ends the run, unless it is `worth_keeping`.
    """
    folder = Path(start.folder) if start.folder else None
    if folder is None and settings.resume:
        rank_zero_print(f"{settings.resume} is not in the folder of a run: resuming in a new folder")
    if not is_rank_zero():
        # Only rank 0 writes; Lightning tells the others where its checkpoints are.
        yield folder or Path(settings.run_dir) / title / "unknown"
        return
    folder, new = (folder, _make(folder)) if folder else (_new_folder(settings, title), True)
    with locked(folder):
        try:
            yield folder
        except UserError:
            if new and not worth_keeping():
                shutil.rmtree(folder)
            raise


def _make(folder: Path) -> bool:
    """Make a folder; False where it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot_make(folder, error) from error
    return True


def _cannot_make(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot make the run's folder {folder}: {error.strerror}; pass --run-dir")


def _new_folder(settings: RunSettings, title: str) -> Path:
    """A new folder, with a number after its name if that exists."""
    parent = Path(settings.run_dir) / title
    name = settings.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = parent / name, 1
    while True:
        if _make(folder):
            return folder
        number += 1
        folder = parent / f"{name}-{number}"


def _cannot_log(name: str, error: OSError) -> None:
    log.warning("warning: %s cannot write (%s); the run continues without it", name, error.strerror or error)


class _Writer:
    """TensorBoard's writer; after an error, such as a full disk, it writes no more and the run continues."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._failed = writer, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._writer, name)
        return partial(self._try, found) if callable(found) else found

    def _try(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._failed:
            return None
        try:
            return write(*args, **kwargs)
        except OSError as error:
            self._failed = True
            _cannot_log("TensorBoard", error)
            return None


class _TensorBoard(TensorBoardLogger):
    @property
    @override
    def experiment(self) -> Any:
        writer = super().experiment
        if is_rank_zero() and not isinstance(writer, _Writer):
            # Where the base class keeps it, so that it is made once.
            writer = _Writer(writer)
            set_writer(self, writer)
        return writer

    @override
    def save(self) -> None:
        # Without hparams.yaml, which TensorBoardLogger.save would write: config.yaml holds the settings.
        with _warned_once(self, "TensorBoard"):
            super(TensorBoardLogger, self).save()


class _CSV(CSVLogger):
    @override
    def save(self) -> None:
        # Without hparams.yaml, as above.
        with _warned_once(self, "metrics.csv"):
            super(CSVLogger, self).save()


@contextmanager
def _warned_once(logger: Any, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not getattr(logger, "_warned", False):
            _cannot_log(name, error)
        logger._warned = True


def logger_names(text: str) -> list[str]:
    """The loggers that ``--logger`` names, each once.

    Raises:
        UserError: there is no such logger, or its package is not installed.

    Example:
        >>> logger_names("csv, TensorBoard"), logger_names("none")
        (['csv', 'tensorboard'], [])
    """
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if names == ["none"]:
        return []
    for name in names:
        if name not in _LOGGERS:
            close = difflib.get_close_matches(name, _LOGGERS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"--logger {name}: expected some of {', '.join(_LOGGERS)} with commas, or none{hint}")
        packages = _LOGGERS[name]
        if packages and not any(find_spec(package) for package in packages):
            raise UserError(f"--logger {name} needs another package: pip install {packages[0]}")
    return names


def loggers(folder: Path, resume: str | None, names: Sequence[str] = ("tensorboard", "csv")) -> list[Logger]:
    """The loggers of a run, by name. TensorBoard and CSV write into its folder.

    With `resume`, what was logged before that checkpoint stays there.
    """
    make: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: _TensorBoard(str(folder), name="", version="", log_graph=True, default_hp_metric=False),
        "csv": lambda: _csv(folder, resume),
        "wandb": lambda: WandbLogger(folder.name, save_dir=folder, project=folder.parent.name),
        "mlflow": lambda: _mlflow(folder),
    }
    made = []
    for name in names:
        try:
            made.append(make[name]())
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--logger {name} cannot start: {reason}; set it up, or leave it out") from error
    return made


def _mlflow(folder: Path) -> MLFlowLogger:
    """Logs to MLFLOW_TRACKING_URI; without it, into a data base beside the runs."""
    parent = folder.parent.resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None if uri else str(parent / "mlartifacts")
    uri = uri or f"sqlite:///{parent}/mlflow.db"
    return MLFlowLogger(parent.name, folder.name, uri, artifact_location=artifacts)


def _csv(folder: Path, resume: str | None) -> CSVLogger:
    rows: list[dict[str, Any]] = []
    metrics_file = folder / "metrics.csv"
    if resume and metrics_file.is_file():
        done = read_run(resume).updates
        with metrics_file.open(newline="") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file) if int(row["step"]) < done]
    csv_logger = _CSV(str(folder), name="", version="")
    if is_rank_zero() and rows:
        # The logger starts with an empty file; what was logged up to the checkpoint is written first.
        csv_logger.experiment.metrics.extend(rows)
        csv_logger.save()
    return csv_logger
