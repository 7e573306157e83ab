"""Make and lock the folder of a run."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from filelock import BaseFileLock, FileLock, Timeout

from datamodules.errors import UserError, spelled
from recipes.runner.loggers import METRICS
from recipes.runner.printing import is_rank_zero, print_error, rank_zero_print
from recipes.runner.results import write_text
from recipes.runner.resume import ResumePoint, numbered
from recipes.runner.worker import share

_LOCK = ".lock"
# Seconds: the loader workers of a killed run inherit its lock, and hold it for a while.
_LOCK_TIMEOUT = 20.0


def settle_folder(parent: Path, name: str | None, point: ResumePoint) -> ResumePoint:
    """Return where a run starts, with its folder, which is made where it is new.

    Args:
        parent: the folder of the recipe's runs.
        name: ``--name``.

    Raises:
        UserError: the folder cannot be made, or holds links to what lies outside of it.
    """
    if point.folder:
        folder = Path(point.folder)
        made = _make(folder)
    else:
        if point.checkpoint:
            rank_zero_print(f"{point.checkpoint} is not in the folder of a run: resuming in a new folder")
        folder, made = _new_folder(parent, name)
    _refuse_links(folder)
    return replace(point, folder=str(folder), made=str(made) if made else None)


@contextmanager
def removed_if_unused(point: ResumePoint) -> Iterator[None]:
    """Remove a new folder in which nothing was logged or saved, where an error ends the command; on rank 0."""
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


def _refuse_links(folder: Path) -> None:
    """Refuse a folder with links to what lies outside of it: a run would write and delete there.

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
    """Make a folder; return the first of its parents that was made with it, or None where the folder exists."""
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
    """Make a new folder; if the name exists, a number is added."""
    unnumbered = parent / (name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    folder, made = next((path, made) for path in numbered(unnumbered) if (made := _make(path)))
    if name and folder != unnumbered:
        print_error(f"note: {unnumbered} exists, so this run is {folder}; to go on in the first, resume it")
    return folder, made


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, on rank 0, which alone writes.

    Raises:
        UserError: another process trains in it.
        RankZeroFailed: on the other ranks, if rank 0 has raised this error.
    """
    lock = FileLock(folder / _LOCK)
    share(partial(_acquire, lock, folder))
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
    """Write the settings of a run, as ``--config`` reads them."""
    try:
        write_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    except OSError as error:
        raise UserError(
            f"cannot write {folder / 'config.yaml'}: {error.strerror or error}; make room, or pass"
            f" {spelled('run_dir')} with a folder on another disk"
        ) from error
