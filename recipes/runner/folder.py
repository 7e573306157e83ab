"""Create and lock the folder of a run."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from datamodules.errors import UserError
from recipes.runner.loggers import METRICS
from recipes.runner.printing import is_rank_zero, print_error, rank_zero_print
from recipes.runner.results import write_text
from recipes.runner.resume import ResumePoint, numbered

# Seconds: the loader workers of a killed run inherit its lock, and hold it for a while.
_LOCK_TIMEOUT = 20.0


@contextmanager
def run_folder(parent: Path, name: str | None, start: ResumePoint) -> Iterator[Path]:
    """Yield the run's folder, locked for this process.

    A new folder in which nothing was logged or saved is removed when a `UserError` ends the run.

    Args:
        parent: the folder of the recipe's runs.
        name: ``--name``.
    """
    folder = Path(start.folder) if start.folder else None
    if folder is None and start.checkpoint:
        rank_zero_print(f"{start.checkpoint} is not in the folder of a run: resuming in a new folder")
    if not is_rank_zero():
        # Only rank 0 writes here; Lightning broadcasts the paths of its checkpoints to the other ranks.
        yield folder or parent / "unknown"
        return
    if folder:
        is_new = _make(folder)
    else:
        folder = _new_folder(parent, name)
        is_new = True
    _refuse_links(folder)
    with locked(folder):
        try:
            yield folder
        except UserError:
            if is_new and not (folder / METRICS).exists() and not any(folder.glob("checkpoints/*.ckpt")):
                shutil.rmtree(folder, ignore_errors=True)
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
                " replace the link by what it names, or pass another `name`; `run_dir` chooses the disk"
            )


def _make(folder: Path) -> bool:
    """Make a folder; return False where it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"cannot make the run's folder {folder}: {error.strerror}; pass `run_dir`") from error
    return True


def _new_folder(parent: Path, name: str | None) -> Path:
    """Make a new folder; if the name exists, a number is added."""
    unnumbered = parent / (name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    folder = next(path for path in numbered(unnumbered) if _make(path))
    if name and folder != unnumbered:
        print_error(f"note: {unnumbered} exists, so this run is {folder}; to go on in the first, resume it")
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; called on rank 0 only.

    Raises:
        UserError: another process trains in it.
    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=_LOCK_TIMEOUT, poll_interval=0.2)
    except Timeout as error:
        raise UserError(f"another process is training in {folder}; wait for it, or pass another `name`") from error
    except (NotImplementedError, OSError):
        pass  # The file system has no locks.
    try:
        yield
    finally:
        lock.release()


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the settings of a run, as ``--config`` reads them."""
    try:
        write_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    except OSError as error:
        raise UserError(
            f"cannot write {folder / 'config.yaml'}: {error.strerror or error}; make room, or pass `run_dir` with a"
            " folder on another disk"
        ) from error
