"""Files that are either complete or as they were before."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_or_nothing"]


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a loss of power."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders.
        return
    try:
        os.fsync(descriptor)
    except OSError:  # Some network file systems.
        pass
    finally:
        os.close(descriptor)


@contextmanager
def whole_or_nothing(path: Path) -> Iterator[Path]:
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
