"""Where a command trains: in a new folder, or in the folder of a run that it resumes from a checkpoint."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from datamodules.errors import UserError
from recipes.results.results_file import RESULTS, read_results
from recipes.resume.job_name import is_restarted, launch_name
from recipes.resume.lineage import abandon_later_checkpoints, record_start, was_started_from
from recipes.resume.saved_run import SavedRun, describe_differences, newest_valid_checkpoint, read_run
from recipes.resume.settings_file import read_settings
from recipes.runner.launch import is_rank_zero

__all__ = ["ResumePoint", "find_resume_point", "locked", "start_from"]

log = logging.getLogger("lightning_recipes.resume")

# Lightning's launcher starts the other ranks with rank 0's variables.
_VARIABLE = "LIGHTNING_RECIPES_RESUME_POINT"
# The loader workers of a run that was killed hold its lock for a while.
_LOCK_TIMEOUT = 20.0


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts or resumes.

    Args:
        folder: the run's folder, which may exist; None for a new one, named by --name or the time.
        checkpoint: the checkpoint to resume from.
        finished: the run has been trained and tested.
    """

    folder: str | None = None
    checkpoint: str | None = None
    finished: bool = False


_LENGTHS = ("max_epochs", "max_steps", "max_time")
_PATIENCE = ("early_stopping", "patience")


def _settings_of(folder: Path) -> dict[str, Any]:
    try:
        settings = read_settings(folder / "config.yaml")
    except UserError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _is_finished(folder: Path, run: SavedRun, typed: Mapping[str, Any]) -> bool:
    """Whether a run has its results, and what was typed asks for no more than it has trained.

    Args:
        run: its newest checkpoint.
        typed: the settings that were typed. Where the length of the run is not among them, its own holds.
    """
    if not (folder / RESULTS).is_file():
        return False
    epochs, steps, _ = (run.config.get(name) if typed.get(name) is None else typed[name] for name in _LENGTHS)
    if run.is_finished(epochs, -1 if steps is None else steps):
        return True
    try:
        stopped_early = read_results(folder).get("stopped_early")
    except UserError:
        stopped_early = None
    # It has ended before that: by early stopping or its time, and would again with these settings.
    names = _PATIENCE if stopped_early else _LENGTHS
    return all(typed.get(name) in (None, run.config.get(name)) for name in names)


def _resume_in(folder: Path, typed: Mapping[str, Any]) -> ResumePoint:
    """Resume in a run's folder, or start in it where it has no valid checkpoint."""
    checkpoint = newest_valid_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        return ResumePoint(str(folder))
    return ResumePoint(str(folder), str(checkpoint), _is_finished(folder, read_run(checkpoint), typed))


def _numbered(folder: Path) -> Iterator[Path]:
    """The existing folders NAME, NAME-2, ..., then the first that does not exist: a job may make several runs."""
    number, name = 1, folder.name
    while folder.exists():
        yield folder
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    yield folder


def _of_this_job(
    parent: Path, name: str, config: Mapping[str, Any], typed: Mapping[str, Any], free: Collection[str]
) -> ResumePoint:
    """The run that this job has made with these settings."""
    for folder in _numbered(parent / name):
        if folder.exists() and not describe_differences(_settings_of(folder), config, free):
            return _resume_in(folder, typed)
    return ResumePoint(str(folder))


def _job(name: str | None) -> str | None:
    """The name that restarts of this launch share, at least that of the run; None without restarts."""
    try:
        return launch_name(os.environ)
    except UserError:
        if name is None:
            raise
        return name


def _unfinished(
    parent: Path, config: Mapping[str, Any], typed: Mapping[str, Any], free: Collection[str]
) -> ResumePoint:
    """The newest unfinished run with these settings."""
    folders = [path.parent for path in parent.glob("*/config.yaml")]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        if describe_differences(_settings_of(folder), config, free):
            continue
        point = _resume_in(folder, typed)
        if point.checkpoint and not point.finished:
            return point
    return ResumePoint()


def find_resume_point(
    resume: str | None,
    name: str | None,
    parent: Path,
    config: Mapping[str, Any],
    typed: Mapping[str, Any],
    free: Collection[str],
) -> ResumePoint:
    """Decide where this command trains; the same on all ranks that share the folder.

    Args:
        resume: a checkpoint, "auto", "none", or None: "auto" where the launcher restarts the run, else "none".
        name: the name of the run.
        parent: the folder of the recipe's runs.
        config: the settings of this command.
        typed: those of them that were typed, or stand in a file that was.
        free: settings that do not make the experiment.

    Raises:
        UserError: `resume` is not a valid checkpoint.
    """
    if _VARIABLE in os.environ and not is_rank_zero():
        return ResumePoint(**json.loads(os.environ[_VARIABLE]))
    point = _find(resume, name, parent, config, typed, free)
    os.environ[_VARIABLE] = json.dumps(vars(point))
    return point


def _find(
    resume: str | None,
    name: str | None,
    parent: Path,
    config: Mapping[str, Any],
    typed: Mapping[str, Any],
    free: Collection[str],
) -> ResumePoint:
    if resume not in (None, "auto", "none"):
        return _from_file(resume, name, parent, typed)
    if resume == "none" or (resume is None and not is_restarted(os.environ)):
        return ResumePoint()
    if name is not None:
        return _resume_in(parent / name, typed)
    job = launch_name(os.environ)
    return _of_this_job(parent, job, config, typed, free) if job else _unfinished(parent, config, typed, free)


def _from_file(resume: str, name: str | None, parent: Path, typed: Mapping[str, Any]) -> ResumePoint:
    """Resume from this checkpoint, or from a later one of the same job, if the job was restarted."""
    home = Path(resume).resolve().parent
    in_run = home.name == "checkpoints" and (home.parent / "config.yaml").is_file()
    folder = home.parent if in_run else None
    if job := _job(name):
        for folder in [home.parent] if in_run else _numbered(parent / (name or job)):
            if was_started_from(folder, job, resume):
                point = _resume_in(folder, typed)
                if point.checkpoint:
                    return point
                break
    try:
        read_run(resume)
    except UserError as error:
        valid = newest_valid_checkpoint(home) if home.name == "checkpoints" else None
        newest = f"{error}; the newest valid checkpoint is {valid}: pass --resume auto"
        raise UserError(newest if valid else str(error)) from error
    return ResumePoint(str(folder) if folder else None, resume)


def start_from(checkpoint: str, folder: Path, name: str | None) -> list[Path]:
    """Start a run in a folder from the checkpoint of ``--resume FILE``; on rank 0, right before training.

    Args:
        name: ``--name``.

    Returns:
        The checkpoints of the folder with more updates, by their new names: see `abandon_later_checkpoints`.
    """
    if not is_rank_zero():
        return []
    # First, so that a job that is restarted in between does not find them.
    renamed = abandon_later_checkpoints(folder / "checkpoints", Path(checkpoint))
    if job := _job(name):
        record_start(folder, job, checkpoint)
    return renamed


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; on rank 0 only.

    Raises:
        UserError: another process trains in it.
    """
    lock = FileLock(folder / ".lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("%s is in use; waiting up to %.0f s for its process to end", folder, _LOCK_TIMEOUT)
            lock.acquire(timeout=_LOCK_TIMEOUT, poll_interval=0.2)
    except Timeout as error:
        raise UserError(f"another process is training in {folder}; wait for it, or pass another --name") from error
    except (NotImplementedError, OSError):
        pass  # The file system has no locks.
    try:
        yield
    finally:
        lock.release()
