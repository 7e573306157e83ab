"""Where a call of the command line trains: in a new folder, or on from the newest good checkpoint of its run."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from datamodules.errors import UserError
from recipes.launch.host import is_rank_zero
from recipes.launch.job_name import is_restarted, launch_name
from recipes.resume.lineage import has_begun, mark_beginning, set_aside
from recipes.resume.saved_run import describe_differences, find_last_good, read_run

__all__ = ["Start", "begin_with", "find_start", "launch_name", "locked"]

log = logging.getLogger("lightning_recipes.resume")

# Lightning's own launcher starts the other ranks with rank 0's variables.
_TOLD = "LIGHTNING_RECIPES_START"
# The loader workers of a run that was killed hold its lock until they notice.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on.

    Args:
        folder: the run's folder, which may exist; None for a new one, named by --name or the time.
        checkpoint: where it goes on from.
        finished: there is nothing left to train.
    """

    folder: str | None = None
    checkpoint: str | None = None
    finished: bool = False


def _bounds(config: Mapping[str, Any]) -> tuple[int | None, int]:
    steps = config.get("max_steps")
    return config.get("max_epochs"), -1 if steps is None else steps


def _settings_of(folder: Path) -> dict[str, Any]:
    try:
        return yaml.safe_load((folder / "config.yaml").read_text()) or {}
    except (OSError, yaml.YAMLError):
        return {}


def _go_on_in(folder: Path, config: Mapping[str, Any]) -> Start:
    """Go on in a run's folder, or begin in it where it has no good checkpoint."""
    checkpoint = find_last_good(folder / "checkpoints")
    if checkpoint is None:
        return Start(str(folder))
    finished = read_run(checkpoint).is_finished(*_bounds(config)) and (folder / "results.json").is_file()
    return Start(str(folder), str(checkpoint), finished)


def _numbered(folder: Path) -> Iterator[Path]:
    """The folders of that name that exist, and at last one that does not: a job may make several runs in turn."""
    number, name = 1, folder.name
    while folder.exists():
        yield folder
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    yield folder


def _of_this_job(parent: Path, name: str, config: Mapping[str, Any]) -> Start:
    """The run of this job with these settings."""
    for folder in _numbered(parent / name):
        if folder.exists() and not describe_differences(_settings_of(folder), config):
            return _go_on_in(folder, config)
    return Start(str(folder))


def _job(name: str | None) -> str | None:
    """What restarts of this launch have in common, be it only the name of the run; None where nobody restarts us."""
    try:
        return launch_name(os.environ)
    except UserError:
        if name is None:
            raise
        return name


def _unfinished(parent: Path, config: Mapping[str, Any]) -> Start:
    """The newest run with these settings that has something left to train."""
    folders = [path.parent for path in parent.glob("*/config.yaml")]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        if describe_differences(_settings_of(folder), config):
            continue
        start = _go_on_in(folder, config)
        if start.checkpoint and not read_run(start.checkpoint).is_finished(*_bounds(config)):
            return start
    return Start()


def find_start(resume: str | None, name: str | None, parent: Path, config: Mapping[str, Any]) -> Start:
    """Decide where this call trains; the same on all ranks that see the same folder.

    Args:
        resume: a checkpoint, "auto", "none", or None for what the launcher makes of it, see `launch_name`.
        name: the name of the run.
        parent: the folder of the recipe's runs.
        config: the settings asked for.

    Raises:
        UserError: `resume` names no checkpoint, or a damaged one.
    """
    if _TOLD in os.environ and not is_rank_zero():
        return Start(**json.loads(os.environ[_TOLD]))
    start = _find(resume, name, parent, config)
    os.environ[_TOLD] = json.dumps(vars(start))
    return start


def _find(resume: str | None, name: str | None, parent: Path, config: Mapping[str, Any]) -> Start:
    if resume not in (None, "auto", "none"):
        return _from_file(resume, name, parent)
    if resume == "none" or (resume is None and not is_restarted(os.environ)):
        return Start()
    if name is not None:
        return _go_on_in(parent / name, config)
    job = launch_name(os.environ)
    return _of_this_job(parent, job, config) if job else _unfinished(parent, config)


def _from_file(resume: str, name: str | None, parent: Path) -> Start:
    """Where a run goes on that begins with this checkpoint: from it, or where a restart of its job has brought it."""
    home = Path(resume).resolve().parent
    in_run = home.name == "checkpoints" and (home.parent / "config.yaml").is_file()
    folder = home.parent if in_run else None
    if job := _job(name):
        for folder in [home.parent] if in_run else _numbered(parent / (name or job)):
            if has_begun(folder, job, resume):
                # The bounds of that run: a checkpoint's settings are not in what was typed.
                start = _go_on_in(folder, _settings_of(folder))
                if start.checkpoint:
                    return start
                break
    try:
        read_run(resume)
    except UserError as error:
        good = find_last_good(home) if home.name == "checkpoints" else None
        raise UserError(f"{error}; the newest good one is {good}: pass --resume auto" if good else error) from error
    return Start(str(folder) if folder else None, resume)


def begin_with(checkpoint: str, folder: Path, name: str | None) -> list[Path]:
    """A run begins in a folder with a checkpoint that the user has named; on rank 0, right before it trains.

    Args:
        name: ``--name``.

    Returns:
        The checkpoints of the folder that are farther on, by their new names: see `set_aside`.
    """
    if not is_rank_zero():
        return []
    # First, so that a job that is started again in between finds none of them.
    renamed = set_aside(folder / "checkpoints", Path(checkpoint))
    if job := _job(name):
        mark_beginning(folder, job, checkpoint)
    return renamed


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a run's folder for this process; on rank 0 only.

    Raises:
        UserError: another process trains in it.
    """
    lock = FileLock(folder / ".lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("%s is in use; waiting up to %.0f s for its process to end", folder, _PATIENCE)
            lock.acquire(timeout=_PATIENCE, poll_interval=0.2)
    except Timeout as error:
        raise UserError(f"another process is training in {folder}; wait for it, or pass another --name") from error
    except (NotImplementedError, OSError):
        pass  # A file system without locks.
    try:
        yield
    finally:
        lock.release()
