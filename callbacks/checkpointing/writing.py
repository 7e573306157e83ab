"""Atomic writes of files, and best-effort writes whose failure does not end the run."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datamodules.notes import log


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # Some network file systems cannot flush folders.
        pass
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`: renamed to it on success, removed on an error.

    Creates missing folders.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic within one file system only.
    temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary_path
        temporary_path.replace(path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


_unsaved: dict[str, str] = {}


def unsaved() -> dict[str, str]:
    """Return the failed writes of this process: what was to be written, and the reason."""
    return dict(_unsaved)


def forget_failures(what: str | None = None) -> None:
    """Remove a failure from `unsaved`, because a later write succeeded; without a name, remove all."""
    if what is None:
        _unsaved.clear()
    else:
        _unsaved.pop(what, None)


@contextmanager
def best_effort(what: str, kinds: type[Exception] = Exception) -> Iterator[None]:
    """Continue after an error in the block: the first one is logged as a warning, and `unsaved` holds the last one.

    As a decorator, ``best_effort("the image")(write)`` makes a function that returns None if `write` raises.

    Args:
        what: name of the block's output, for the warning.
        kinds: the exceptions after which to continue.
    """
    try:
        yield
    except kinds as error:
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if what not in _unsaved:
            log.warning("warning: %s cannot be written (%s); the run continues without it", what, reason)
        _unsaved[what] = reason
