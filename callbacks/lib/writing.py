"""Files that are either complete or as they were before, and writes that a run can do without."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datamodules.notes import log


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # Some network file systems.
        pass
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name beside `path` that takes its place at the end, and is gone if that is never reached.

    Folders that are missing are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


_unsaved: dict[str, str] = {}


def unsaved() -> dict[str, str]:
    """What could not be written in this process, and why."""
    return dict(_unsaved)


def forget_failures(what: str | None = None) -> None:
    """Take back that something could not be written, because it was later; without a name, everything."""
    if what is None:
        _unsaved.clear()
    else:
        _unsaved.pop(what, None)


@contextmanager
def best_effort(what: str, kinds: type[Exception] = Exception) -> Iterator[None]:
    """Continue after the block where it raises; the first failure is a warning, and `unsaved` holds the last one.

    As a decorator, ``best_effort("the image")(write)``, it gives a function that returns None where `write` raises.

    Args:
        what: names what the block writes.
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
