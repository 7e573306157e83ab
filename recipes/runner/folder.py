"""The folder of a run: which checkpoint it resumes from, its lock and its settings.

- ``--resume FILE`` resumes from this checkpoint.
- ``--resume auto`` resumes from the newest valid checkpoint of the run.
- ``--resume none`` starts fresh. This is the default, except in a job that Slurm or torchrun may restart.

A restarted job finds its run by the name of the job. Its command is the same as before; with ``--resume FILE``, it
still resumes from its own newest checkpoint, because the run's ``lineage.json`` records the file from which each job
started. A second run in one process resumes the first run only with ``--resume auto``.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from filelock import BaseFileLock, FileLock, Timeout

from callbacks.lib.signals import NotRequeued, batch_job, requeue, restarts
from datamodules.errors import UserError, spelled
from recipes.runner.errors import is_rank_zero, print_error, rank_zero_print
from recipes.runner.loggers import METRICS
from recipes.runner.saved_run import (
    RESULTS,
    SavedRun,
    newest_valid_checkpoint,
    newest_valid_run,
    read_results,
    read_run,
    read_settings,
    readable_checkpoints,
    write_rows,
    write_text,
)
from recipes.runner.settings import describe_differences
from recipes.runner.variables import job_name, restarts_by_torch
from recipes.runner.worker import broadcast_from_rank_zero

_LINEAGE = "lineage.json"
_FAILURE = ".failure.json"
_LENGTHS = ("max_epochs", "max_steps", "max_time")

_used: set[str | None] = set()
"""The folders of this process's runs. Removed folders stay in the set: a restart must number folders the same."""
_LOCK = ".lock"
# Seconds: the loader workers of a killed run inherit its lock, and hold it for a while.
_LOCK_TIMEOUT = 20.0


@dataclass(frozen=True)
class ResumePoint:
    """The folder and the checkpoint from which a run starts or resumes.

    Args:
        folder: the run's folder, which may exist; None for a new folder, named by --name or the time.
        checkpoint: the checkpoint to resume from.
        finished: whether the run has been trained and tested.
        given: whether the user has passed the checkpoint.
        made: the folder, or the first of its parents, that was made for this run; None if the folder existed.
        job: the name of the Slurm or torchrun job, the same in all restarts and requeues; None without restarts.
        saved: the settings and the progress in the checkpoint.
    """

    folder: str | None = None
    checkpoint: str | None = None
    finished: bool = False
    given: bool = False
    made: str | None = None
    job: str | None = None
    saved: SavedRun | None = field(default=None, compare=False, repr=False)


def find_resume_point(
    resume: str | None,
    name: str | None,
    parent: Path,
    config: Mapping[str, Any],
    typed: Mapping[str, Any],
    changeable: Collection[str],
) -> ResumePoint:
    """Return the folder and the checkpoint of this command; the result is the same on ranks that share the folder.

    Args:
        resume: a checkpoint, "auto", "none", or None: "auto" if the launcher restarts the run, else "none".
        name: the name of the run.
        parent: the folder of the recipe's runs.
        config: the settings of this command.
        typed: the typed settings, and the settings in files of ``--config``.
        changeable: the settings that do not define the experiment.

    Raises:
        UserError: `resume` is not a valid checkpoint, or the job has no name.
    """

    def resume_same(folder: Path) -> ResumePoint | None:
        """Resume in `folder` if its config matches, or if it has none."""
        file = folder / "config.yaml"
        saved = read_settings(file) if file.is_file() else None
        if saved is not None and describe_differences(saved, config, changeable):
            return None
        point = resume_in(folder, typed)
        run = point.saved
        return None if run and describe_differences(run.config, config, changeable, run.auto_settings) else point

    if resume == "none":
        return ResumePoint()
    job = job_name(os.environ, name)
    if resume not in (None, "auto"):
        point = _from_file(resume, name, parent, typed, job)
    elif resume is None and job is None:
        point = ResumePoint()
    elif name is not None and (resume or str(parent / name) not in _used):
        point = resume_in(parent / name, typed)
    elif job:
        candidates = map(resume_same, _folders_of_job(parent / (name or job)))
        # The first folder of this experiment; the last candidate is a folder that does not exist yet.
        point = next(candidate for candidate in candidates if candidate)
    else:
        folders = [path.parent for path in parent.glob("*/config.yaml")]
        newest = sorted(folders, key=_modification_time, reverse=True)
        trained = (candidate for candidate in map(resume_same, newest) if candidate and candidate.checkpoint)
        point = next((candidate for candidate in trained if not candidate.finished), ResumePoint())
    _used.add(point.folder)
    return point


def resume_in(folder: Path, typed: Mapping[str, Any]) -> ResumePoint:
    """Resume in a run's folder, or start in it if it has no valid checkpoint."""
    saved = newest_valid_run(folder / "checkpoints")
    if saved is None:
        return ResumePoint(str(folder))
    return ResumePoint(str(folder), str(saved.path), _is_finished(folder, saved, typed), saved=saved)


def _is_finished(folder: Path, run: SavedRun, typed: Mapping[str, Any]) -> bool:
    """Return whether a run has its results, and the command does not extend the training.

    Args:
        run: the run's newest checkpoint.
        typed: the typed settings. If they have no length, the run's length holds.
    """
    if not (folder / RESULTS).is_file():
        return False
    lengths = {name: run.config.get(name) for name in _LENGTHS}
    lengths |= {name: typed[name] for name in _LENGTHS if typed.get(name) is not None}
    steps = lengths["max_steps"]
    if run.is_finished(lengths["max_epochs"], -1 if steps is None else steps):
        return True
    # Early stopping or the time limit has ended the run earlier, and would end it again with the same settings.
    names = ("patience",) if read_results(folder).get("stopped_early") else _LENGTHS
    return all(typed.get(name) in (None, run.config.get(name)) for name in names)


def numbered(folder: Path) -> Iterator[Path]:
    """Yield the folders NAME, NAME-2, ...: several runs may have the same name, and a job may make several runs."""
    yield folder
    for number in count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def _folders_of_job(first: Path) -> Iterator[Path]:
    """Yield the numbered folders of a job, without the folders of earlier runs of this process."""
    for folder in numbered(first):
        if str(folder) not in _used:
            yield folder


def _modification_time(path: Path) -> float:
    return path.stat().st_mtime


def _from_file(resume: str, name: str | None, parent: Path, typed: Mapping[str, Any], job: str | None) -> ResumePoint:
    """Resume from this checkpoint or, if the job was restarted, from a later checkpoint of the job."""
    parent_folder = Path(resume).resolve().parent
    in_run = parent_folder.name == "checkpoints" and (parent_folder.parent / "config.yaml").is_file()
    folder = parent_folder.parent if in_run else None
    if job:
        if folder is None:
            # The first start of the job has made one of these folders, or uses the first folder that does not exist.
            candidates = _folders_of_job(parent / (name or job))
            folder = next(path for path in candidates if not path.exists() or _lineage(path).get(job) == resume)
        began_here = _lineage(folder).get(job) == resume and str(folder) not in _used
        resumed = resume_in(folder, typed) if began_here else None
        if resumed and resumed.checkpoint:
            return resumed
    try:
        saved = read_run(resume)
    except UserError as error:
        valid = newest_valid_checkpoint(parent_folder, logs=False) if parent_folder.name == "checkpoints" else None
        if valid is None:
            raise
        raise UserError(f"{error}; the newest valid checkpoint is {valid}: pass {spelled('resume', 'auto')}") from error
    return ResumePoint(str(folder) if folder else None, resume, given=True, job=job, saved=saved)


def start_from(point: ResumePoint, folder: Path) -> list[Path]:
    """Start a run in a folder from the checkpoint of ``--resume FILE``; on rank 0, right before training.

    Checkpoints with more updates are renamed: ``--resume auto`` would use them until the run has made as many updates
    again.

    Args:
        point: the checkpoint, and the job for its restarts.
        folder: the run's folder.

    Returns:
        The new paths, which end in ``.abandoned``.
    """
    if not point.given or point.saved is None:
        return []
    renamed = []
    # Before the lineage is written, so that a job restarted in between does not resume from these checkpoints.
    for run in readable_checkpoints(folder / "checkpoints"):
        if run.updates > point.saved.updates:
            renamed.append(run.path.rename(run.path.with_name(f"{run.path.name}-{run.updates}.abandoned")))
    if point.job:
        write_rows(folder / _LINEAGE, _lineage(folder) | {point.job: point.checkpoint})
    return renamed


def _lineage(folder: Path) -> dict[str, str]:
    """Return the checkpoints from which jobs resumed in a folder, as typed, by the name of the job."""
    return _read_json(folder / _LINEAGE)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file; without a readable file, an empty dict."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def record_failure(folder: str | None, rank: int, error: str) -> None:
    """Record in the run's folder that a rank of this Slurm batch job has failed, so that the job is not requeued.

    The other ranks only see that a rank has ended.

    Args:
        folder: the run's folder, if it is known.
        error: the error in one line.
    """
    job = batch_job(os.environ)
    if job and folder and Path(folder).is_dir():
        start = {"job": job, "restarts": restarts(os.environ)}
        with suppress(OSError):
            write_rows(Path(folder) / _FAILURE, start | {"error": f"rank {rank} failed: {error}"})


def _failure_of_job(folder: str, job: str) -> str:
    """Return the error that a rank of this start of a job has recorded, or ""."""
    failure = _read_json(Path(folder) / _FAILURE)
    is_of_this_start = (failure.get("job"), failure.get("restarts")) == (job, restarts(os.environ))
    return str(failure.get("error", "")) if is_of_this_start else ""


def requeue_after_loss(folder: str | None, updates: int) -> str:
    """Requeue this Slurm batch job after the loss of a process or a node.

    A job that has saved nothing new is not requeued, because the same cause may kill it again at the same update.

    Args:
        folder: the run's folder, if it is known.
        updates: the number of updates at the start of this process.

    Returns:
        The outcome in words; empty outside of a batch job, and if torchrun restarts the processes.
    """
    job = batch_job(os.environ)
    restarts_made, restarts_allowed = restarts_by_torch(os.environ)
    if job is None or restarts_made < restarts_allowed:
        return ""
    failure = _failure_of_job(folder, job) if folder else ""
    if failure:
        return f"not requeued, because of an error of the program: {failure}"
    saved = readable_checkpoints(Path(folder) / "checkpoints") if folder else []
    if all(run.updates <= updates for run in saved):
        return f"not requeued, because nothing new was saved; to do so: scontrol requeue {job}"
    try:
        return f"requeued as job {requeue(os.environ)}"
    except NotRequeued as reason:
        again = f"; resume in a new job with --name {Path(folder).name}" if folder else ""
        return f"not requeued, {reason}{again}"


def settle_folder(parent: Path, name: str | None, point: ResumePoint) -> ResumePoint:
    """Return the start of a run with its folder; a new folder is made.

    Args:
        parent: the folder of the recipe's runs.
        name: ``--name``.

    Raises:
        UserError: the folder cannot be made, or has links to places outside of it.
    """
    if point.folder:
        folder = Path(point.folder)
        made = _make(folder)
    else:
        if point.checkpoint:
            rank_zero_print(f"{point.checkpoint} is not in the folder of a run: resuming in a new folder")
        folder, made = _new_folder(parent, name)
    _reject_links(folder)
    _used.add(str(folder))
    return replace(point, folder=str(folder), made=str(made) if made else None)


@contextmanager
def removed_if_unused(point: ResumePoint) -> Iterator[None]:
    """Remove a new folder without logs and checkpoints if an error ends the command; on rank 0."""
    try:
        yield
    except BaseException as error:
        if point.folder and point.made and is_rank_zero():
            folder = Path(point.folder)
            is_empty = all(path.name.startswith(".") for path in folder.glob("*"))  # Of a lock at most.
            is_unused = not (folder / METRICS).exists() and not any(folder.glob("checkpoints/*.ckpt"))
            if is_empty or (is_unused and isinstance(error, UserError)):
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # Another run may have a folder there.
                    while str(folder) != point.made:
                        folder = folder.parent
                        folder.rmdir()
        raise


def _reject_links(folder: Path) -> None:
    """Reject a folder with links to places outside of it: a run would write and delete there.

    Raises:
        UserError: the folder has such a link.
    """
    for path in (*folder.iterdir(), *folder.glob("checkpoints/*")):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path} is a link to {path.readlink()}, and a run neither writes nor deletes outside of its folder:"
                f" replace the link by what it names, or pass another {spelled('name')}; {spelled('run_dir')} chooses"
                " the disk"
            )


def _make(folder: Path) -> Path | None:
    """Make a folder; return the first parent that was made with it, or None if the folder exists."""
    made = folder
    while not made.parent.exists():
        made = made.parent
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return None
    except OSError as error:
        raise UserError(
            f"cannot make the run's folder {folder}: {error.strerror}; pass {spelled('run_dir')}"
        ) from error
    return made


def _new_folder(parent: Path, name: str | None) -> tuple[Path, Path | None]:
    """Make a new folder, with a number if the name exists."""
    unnumbered = parent / (name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    folder, made = next((path, made) for path in numbered(unnumbered) if (made := _make(path)))
    if name and folder != unnumbered:
        print_error(f"note: {unnumbered} exists, so this run is {folder}; to go on in the first, resume it")
    return folder, made


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder on rank 0, the only rank that writes.

    Raises:
        UserError: another process trains in it.
        RankZeroFailed: rank 0 has raised this error; on the other ranks.
    """
    lock = FileLock(folder / _LOCK)
    broadcast_from_rank_zero(partial(_acquire, lock, folder))
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=_LOCK_TIMEOUT, poll_interval=0.2)
    except Timeout as error:
        raise UserError(
            f"another process is training in {folder}; wait for it, or pass another {spelled('name')}"
        ) from error
    except (NotImplementedError, OSError):
        pass  # The file system has no locks.


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the settings of a run in the format of ``--config``."""
    try:
        write_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    except OSError as error:
        raise UserError(
            f"cannot write {folder / 'config.yaml'}: {error.strerror or error}; make room, or pass"
            f" {spelled('run_dir')} with a folder on another disk"
        ) from error
