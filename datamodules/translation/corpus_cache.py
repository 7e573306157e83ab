"""A packed corpus in a file, so that only the first run reads and packs the text.

The file is memory-mapped: the processes of a node share one copy of it, and what is never used is never read.
"""

import contextlib
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from datamodules.errors import UserError
from datamodules.translation.corpus import Corpus

__all__ = ["cached_corpus", "corpus_key"]

log = logging.getLogger("lightning_recipes")

_FORMAT = 1  # Of the file, and of the rules of reading, normalising, filtering and splitting.


def corpus_key(files: Sequence[str], settings: Mapping[str, Any]) -> str:
    """A name for what a corpus is made of: its files, by place, size and time of their last change, and the settings.

    Args:
        settings: plain values, all that the corpus depends on.

    Raises:
        UserError: there is no such file.
    """
    found = []
    for file in files:
        try:
            status = Path(file).stat()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from error
        found.append([str(Path(file).resolve()), status.st_size, status.st_mtime_ns])
    described = json.dumps([_FORMAT, found, dict(settings)], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends; without locks two runs do the same work at once."""
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process, which packs the same corpus ...")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Corpus | None:
    """The corpus in a file; None where there is none, or its checksums do not fit."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return None
    except (FileNotFoundError, zipfile.BadZipFile, EOFError):
        return None
    return Corpus.from_state(torch.load(path, mmap=True, weights_only=True))


def _write(corpus: Corpus, path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(corpus.state(), file)
        except RuntimeError as error:
            # It is raised while the archive is closed, on top of the error that tells why, as of a full disk.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())


def cached_corpus(folder: Path, key: str, make: Callable[[], Corpus]) -> Corpus:
    """The corpus of that key, from its file in a folder, or made and written there for the next run.

    Several runs may ask for the same corpus at once: one makes it, and the others wait for it. A run that is stopped
    leaves nothing that is taken for a corpus, and a damaged file is made anew.

    Args:
        folder: it is made where there is none.
        key: of `corpus_key`.
        make: reads and packs the corpus.

    Raises:
        UserError: the folder or the file cannot be written.
    """
    target, partial = folder / f"{key}.corpus", folder / f"{key}.{os.getpid()}.partial"
    try:
        if (found := _read(target)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            if (found := _read(target)) is not None:
                return found
            for left in folder.glob(f"{key}.*.partial"):
                left.unlink(missing_ok=True)
            made = make()
            _write(made, partial)
            partial.replace(target)
        log.info("packed the corpus into %s for the next run", target)
        return _read(target) or made
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(
            f"the packed corpus cannot be written to {folder}: {error.strerror or error}; make room, pass another "
            "`cache_dir`, or none"
        ) from error
