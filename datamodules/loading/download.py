"""Downloads with a checksum and a timeout, once per node. A partial file never has the final name."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from datamodules.errors import UserError
from datamodules.notes import waiting_for

_CHUNK = 1 << 18


class DownloadError(UserError):
    """Error of a download: no URL delivered the file with the expected digest."""


def digest_of(path: Path, algorithm: str = "md5") -> str:
    """Return the hexadecimal digest of a file, for any algorithm of `hashlib`."""
    # Systems in FIPS mode reject MD5, unless it is declared not to be used for security.
    new_hash = partial(hashlib.new, algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_hash).hexdigest()


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock that processes acquire in turn. A line is logged if a process waits for long."""
    lock = FileLock(path)
    # A stopped process and a node that hangs keep their locks.
    with waiting_for(path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(url: str, partial_file: Path, digest: str | None, algorithm: str, timeout: float) -> None:
    """Download a URL into `partial_file` and verify its length and digest.

    Raises:
        OSError: the server cannot be reached, or the file is incomplete or has another digest.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Standard output is for results. The bar disappears from a terminal; a log file gets one line.
    console = Console(stderr=True)
    # Removed first: in a shared folder this name may be a link to another file.
    partial_file.unlink(missing_ok=True)
    with (
        urllib.request.urlopen(url, timeout=timeout) as response,
        partial_file.open("xb") as file,
        Progress(*columns, console=console, transient=console.is_terminal) as progress,
    ):
        length = int(response.headers.get("Content-Length") or 0)
        task = progress.add_task(Path(urlsplit(url).path).name, total=length or None)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            progress.advance(task, len(chunk))
        received = file.tell()
        file.flush()
        os.fsync(file.fileno())
    if received < length:
        raise OSError(f"it ended after {received:,} of {length:,} bytes")
    if digest:
        # Of the file on disk, not of the received bytes: the file is what will be read.
        actual_digest = digest_of(partial_file, algorithm)
        if not actual_digest.startswith(digest):
            raise OSError(f"its {algorithm.upper()} is {actual_digest}, expected {digest}")


def download(
    urls: Sequence[str], path: Path, digest: str | None, timeout: float = 10.0, algorithm: str = "md5"
) -> None:
    """Download a file from the first URL that delivers it, unless it exists.

    Processes that call this concurrently take turns, and all but the first find the file. The file gets its name when
    it is complete. A killed process leaves a hidden partial file, which the next download overwrites.

    Args:
        urls: URLs to try in turn.
        digest: hexadecimal prefix of the expected digest; None checks only the length.
        timeout: seconds without a response or data, after which the next URL is tried.
        algorithm: algorithm of the digest, by its name in `hashlib`.

    Raises:
        DownloadError: every URL failed; the message holds the reason of each.
        OSError: the folder cannot be written.
    """
    if path.exists():
        return
    new_folders = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    partial_file = path.with_name(f".{path.name}.part")
    reasons = []
    with file_lock(lock):
        try:
            if path.exists():
                return
            for url in urls:
                try:
                    _fetch(url, partial_file, digest, algorithm, timeout)
                except (OSError, http.client.HTTPException) as error:
                    # URLError wraps the cause in `reason`. The text of an HTTPError also has the status.
                    reason = error if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
                    reasons.append(f"{urlsplit(url).netloc}: {reason or type(error).__name__}")
                else:
                    partial_file.replace(path)
                    return
        finally:
            partial_file.unlink(missing_ok=True)
            # While the lock is held, so that the next process creates a new file. On Windows, filelock removes it.
            with contextlib.suppress(OSError):
                lock.unlink()

    with contextlib.suppress(OSError):
        for folder in new_folders:
            folder.rmdir()
    raise DownloadError(f"could not download {path.name} ({'; '.join(reasons)})")
