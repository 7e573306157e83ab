"""A run's folder, and what is logged into it."""

import csv
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from datamodules.errors import UserError
from recipes.console import say
from recipes.launch import is_rank_zero
from recipes.resume import Start, locked
from recipes.saved import read_run
from recipes.settings import RunSettings

__all__ = ["loggers", "run_folder"]


@contextmanager
def run_folder(settings: RunSettings, title: str, start: Start) -> Iterator[Path]:
    """The run's folder, for this call alone; a new one goes again where a mistake left it without weights."""
    folder = Path(start.folder) if start.folder else None
    if folder is None and settings.resume:
        say(f"{settings.resume} lies in no run's folder: going on in a new one")
    if not is_rank_zero():
        # Only rank 0 writes; Lightning tells the others where its checkpoints are.
        yield folder or Path(settings.run_dir) / title / "unknown"
        return
    folder, new = (folder, not folder.exists()) if folder else (_new_folder(settings, title), True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, error) from error
    try:
        with locked(folder):
            yield folder
    except UserError:
        if new and not (folder / "checkpoints").exists():
            shutil.rmtree(folder)
        raise


def _cannot_make(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot make the run's folder {folder}: {error.strerror}; pass --run-dir")


def _new_folder(settings: RunSettings, title: str) -> Path:
    """A folder that nobody else has, with a number behind its name where that is taken."""
    parent = Path(settings.run_dir) / title
    name = settings.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"
        except OSError as error:
            raise _cannot_make(folder, error) from error


def loggers(folder: Path, resume: str | None, config: dict[str, Any]) -> list[Logger]:
    """TensorBoard and CSV in a run's folder; with `resume`, what was logged before that checkpoint stays."""
    rows: list[dict[str, Any]] = []
    metrics_file = folder / "metrics.csv"
    if resume and metrics_file.is_file():
        done = read_run(resume).updates
        with metrics_file.open(newline="") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file) if int(row["step"]) < done]
    csv_logger = CSVLogger(str(folder), name="", version="")
    csv_logger.log_hyperparams(config)
    if is_rank_zero() and rows:
        # The logger begins with an empty file; what was logged up to the checkpoint stays in front.
        csv_logger.experiment.metrics.extend(rows)
        csv_logger.save()
    return [TensorBoardLogger(str(folder), name="", version="", log_graph=True, default_hp_metric=False), csv_logger]
