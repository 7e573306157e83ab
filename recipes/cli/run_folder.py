"""A run's folder, and what is logged into it."""

import csv
import difflib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

from callbacks.lib.lightning_internals import set_writer
from callbacks.lib.writing import best_effort, forget_failures
from datamodules.errors import UserError
from recipes.files import write_rows
from recipes.resume.resume_point import ResumePoint, locked
from recipes.resume.saved_run import read_run
from recipes.runner.launch import is_rank_zero, print_error, rank_zero_print
from recipes.runner.settings import RunSettings

__all__ = ["do_nothing", "log_settings", "logger_ids", "logger_names", "loggers", "run_folder", "tensorboard_name"]

_LOGGERS: dict[str, tuple[str, ...]] = {"tensorboard": (), "csv": (), "wandb": ("wandb",), "mlflow": ("mlflow",)}
"""The loggers, and the packages one of which each needs besides those of this one."""

_TENSORBOARD = "the TensorBoard log"
_NAMES = {"tensorboard": _TENSORBOARD, "csv": "metrics.csv", "wandb": "the wandb log", "mlflow": "the mlflow log"}


@contextmanager
def run_folder(
    settings: RunSettings, title: str, start: ResumePoint, worth_keeping: Callable[[], bool] = lambda: False
) -> Iterator[Path]:
    """The run's folder, locked for this process.

    A new folder is removed when a `UserError` ends the run, unless it is `worth_keeping`.
    """
    folder = Path(start.folder) if start.folder else None
    if folder is None and start.checkpoint:
        rank_zero_print(f"{start.checkpoint} is not in the folder of a run: resuming in a new folder")
    if not is_rank_zero():
        # Only rank 0 writes; Lightning tells the others where its checkpoints are.
        yield folder or Path(settings.run_dir) / title / "unknown"
        return
    folder, new = (folder, _make(folder)) if folder else (_new_folder(settings, title), True)
    _refuse_links(folder)
    with locked(folder):
        try:
            yield folder
        except UserError:
            if new and not worth_keeping():
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _refuse_links(folder: Path) -> None:
    """Refuse a folder with links to what lies outside of it: a run would write and delete there.

    Raises:
        UserError: with the first of them.
    """
    inside = folder / "checkpoints"
    for path in (*folder.iterdir(), *(inside.iterdir() if inside.is_dir() else ())):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path} is a link to {path.readlink()}, and a run neither writes nor deletes outside of its folder:"
                " replace the link by what it names, or pass another --name; --run-dir chooses the disk"
            )


def _make(folder: Path) -> bool:
    """Make a folder; False where it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"cannot make the run's folder {folder}: {error.strerror}; pass --run-dir") from error
    return True


def _new_folder(settings: RunSettings, title: str) -> Path:
    """A new folder, with a number after its name if that exists."""
    parent = Path(settings.run_dir) / title
    name = settings.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = parent / name, 1
    while True:
        if _make(folder):
            if settings.name and number > 1:
                print_error(
                    f"note: {parent / name} exists, so this run is {folder}; --resume auto goes on in the first"
                )
            return folder
        number += 1
        folder = parent / f"{name}-{number}"


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a log's method."""


class _Writer:
    """TensorBoard's writer, or what is left of it on a full disk: whoever calls it, nothing is raised."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        if self._writer is None:
            return do_nothing
        found = getattr(self._writer, name)
        return best_effort(_TENSORBOARD, OSError)(found) if callable(found) else found


def _print_no_traceback_of_writers() -> None:
    """Leave the errors of TensorBoard's background threads to the next call of their writer, which raises them."""
    if threading.excepthook is threading.__excepthook__:

        def hook(args: threading.ExceptHookArgs) -> None:
            if type(args.thread).__module__.partition(".")[0] != "tensorboard":
                threading.__excepthook__(args)

        threading.excepthook = hook


def tensorboard_name(name: str, main: Collection[str], by_epoch: bool) -> tuple[str, bool]:
    """What TensorBoard calls a score, and whether its x axis counts epochs; an empty name leaves it out.

    TensorBoard sorts by name. So the curves of a main score are beside each other and come first, and so does its test
    among the metrics of a hyper-parameter table: "accuracy/test", "accuracy/train", "accuracy/val", "loss/test". What
    is logged within an epoch is below "updates"; single classes and other scores of the validation come last.

    Args:
        main: the names of the main scores, such as "loss".
        by_epoch: the run validates at the ends of epochs; else all x axes count updates.

    Example:
        >>> [tensorboard_name(name, {"loss"}, True) for name in ("val/loss", "train/loss", "train/loss_epoch", "lr")]
        [('loss/val', True), ('updates/loss', False), ('loss/train', True), ('updates/lr', False)]
        >>> [tensorboard_name(name, {"loss"}, False) for name in ("val/loss", "train/loss", "train/loss_epoch", "lr")]
        [('loss/val', False), ('loss/train', False), ('', False), ('updates/lr', False)]
    """
    part, _, score = name.partition("/")
    mean = score.removesuffix("_epoch")
    if (
        name == "epoch"
        or (part == "test" and "_class_" in score)
        or (part == "train" and score != mean and not by_epoch)
    ):
        return "", False
    if part == "monitor":
        return f"updates/{score}", False
    if part == "lr" or (part == "train" and score == mean and (by_epoch or score not in main)):
        return f"updates/{name.removeprefix('train/')}", False
    counts_epochs = by_epoch and part in ("train", "val", "test")
    return (f"{mean}/{part}" if mean in main else name), counts_epochs


class _TensorBoard(TensorBoardLogger):
    def __init__(self, folder: Path, main: Collection[str], by_epoch: bool) -> None:
        super().__init__(str(folder), name="", version="", default_hp_metric=False)
        self._main, self._by_epoch = main, by_epoch

    @property
    @override
    def experiment(self) -> Any:
        _print_no_traceback_of_writers()
        writer = None
        with best_effort(_TENSORBOARD):  # It makes a folder, a file and a thread.
            writer = super().experiment
        if is_rank_zero() and not isinstance(writer, _Writer):
            # Where the base class keeps it, so that it is made once.
            writer = _Writer(writer)
            set_writer(self, writer)
        return writer

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        epoch = metrics.get("epoch")
        by_epoch, by_update = {}, {}
        for name, value in metrics.items():
            shown, counts_epochs = tensorboard_name(name, self._main, self._by_epoch and epoch is not None)
            # The test follows the last epoch.
            if shown and counts_epochs:
                by_epoch[shown, not name.startswith("test/")] = value
            elif shown:
                by_update[shown] = value
        super().log_metrics(by_update, step)
        for (shown, within), value in by_epoch.items():
            super().log_metrics({shown: value}, int(epoch or 0) + within)

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `log_settings` writes all of them, and TensorBoard reads what comes first."""

    def log_settings(self, config: Mapping[str, Any]) -> None:
        """Write the settings for the hyper-parameter table.

        Without a summary of the experiment, which torch writes of one run. TensorBoard then compares all runs, shows
        the settings that differ first, and takes every score for a metric.
        """
        from torch.utils.tensorboard.summary import hparams

        # Numbers and text only.
        plain = {k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in config.items()}
        _, session, _ = hparams(plain, {})
        self.experiment.file_writer.add_summary(session)

    @override
    def save(self) -> None:
        # Without hparams.yaml, which TensorBoardLogger.save would write: config.yaml holds the settings.
        super(TensorBoardLogger, self).save()


class _MetricsFile(ExperimentWriter):
    """Writes metrics.csv; where it cannot, the file stays as it was, and the rows are written with the next ones."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.metrics_keys = list(csv.DictReader(file).fieldnames or ())

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
            self._rewrite(path, columns)
        self.metrics, self.metrics_keys = [], columns
        forget_failures(path.name)

    def _append(self, path: Path) -> None:
        size = path.stat().st_size
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        except OSError:
            os.truncate(path, size)
            raise

    def _rewrite(self, path: Path, columns: list[str]) -> None:
        old: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                old = list(csv.DictReader(file))
        write_rows(path, [*old, *self.metrics], columns)


class _CSV(CSVLogger):
    @property
    @override
    def experiment(self) -> Any:
        if is_rank_zero() and self._experiment is None:
            set_writer(self, _MetricsFile(self.log_dir))
        return super().experiment

    @override
    def save(self) -> None:
        # Without hparams.yaml, as above.
        super(CSVLogger, self).save()


_LOGS = ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint")


def _continue_without(logger: Logger, name: str) -> Logger:
    """Have a logger's failures, such as of a full disk or a server that is gone, printed in place of raised."""
    for method in _LOGS:
        setattr(logger, method, best_effort(name)(getattr(logger, method)))
    return logger


def log_settings(loggers: Sequence[Logger], config: Mapping[str, Any]) -> None:
    """Give the settings to the loggers that show them; config.yaml holds them, too."""
    for logger in loggers:
        if isinstance(logger, _TensorBoard):
            with best_effort(_TENSORBOARD):
                logger.log_settings(config)
        elif not isinstance(logger, CSVLogger):
            logger.log_hyperparams(dict(config))


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


def loggers(
    folder: Path,
    resume: str | None,
    names: Sequence[str] = ("tensorboard", "csv"),
    main: Collection[str] = ("loss",),
    by_epoch: bool = True,
) -> list[Logger]:
    """The loggers of a run, by name. TensorBoard and CSV write into its folder.

    With `resume`, what was logged before that checkpoint stays there, and W&B and MLflow go on in their run.

    Args:
        main: the scores that TensorBoard shows first, see `tensorboard_name`.
        by_epoch: TensorBoard's curves of epochs have epochs on their x axis.
    """
    make: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: _TensorBoard(folder, main, by_epoch),
        "csv": lambda: _csv(folder, resume),
        "wandb": lambda: WandbLogger(
            folder.name, folder, id=ids.get("wandb") or token_hex(4), project=folder.parent.name, resume="allow"
        ),
        "mlflow": lambda: _mlflow(folder, ids.get("mlflow")),
    }
    ids = read_run(resume).config.get("logger_ids", {}) if resume else {}
    made = []
    for name in names:
        try:
            made.append(_continue_without(make[name](), _NAMES[name]))
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--logger {name} cannot start: {reason}; set it up, or leave it out") from error
    return made


def logger_ids(loggers: Iterable[Logger]) -> dict[str, str]:
    """The ids of the runs of W&B and MLflow, by the logger's name, which a checkpoint keeps for a resume."""
    named = {"wandb": WandbLogger, "mlflow": MLFlowLogger}
    found = ((name, logger.version) for logger in loggers for name, kind in named.items() if isinstance(logger, kind))
    return {name: str(version) for name, version in found if version is not None}


class _ResumedMLflow(MLFlowLogger):
    """Goes on in a run of MLflow, whose parameters stay those that it began with: MLflow lets none of them change."""

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def _mlflow(folder: Path, run_id: str | None) -> MLFlowLogger:
    """Logs to MLFLOW_TRACKING_URI; without it, into a data base beside the runs."""
    parent = folder.parent.resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None if uri else str(parent / "mlartifacts")
    uri = uri or f"sqlite:///{parent}/mlflow.db"
    kind = _ResumedMLflow if run_id else MLFlowLogger
    return kind(parent.name, folder.name, uri, artifact_location=artifacts, run_id=run_id)


def _csv(folder: Path, resume: str | None) -> CSVLogger:
    # Only rank 0 looks at the file: it may lie on a disk that all nodes share.
    if is_rank_zero():
        _shorten(folder / "metrics.csv", read_run(resume).updates if resume else 0)
    return _CSV(str(folder), name="", version="")


def _shorten(file: Path, updates: int) -> None:
    """Keep what was logged in the first `updates` of a run."""
    if not updates:
        file.unlink(missing_ok=True)
    elif file.is_file():
        with file.open(newline="", encoding="utf-8") as lines:
            table = csv.DictReader(lines)
            rows = [row for row in table if int(row["step"]) < updates]
        write_rows(file, rows, table.fieldnames)
