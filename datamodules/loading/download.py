"""Files from the network: verified, with a time limit, once per node, never half a file."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from datamodules.errors import UserError

_CHUNK = 1 << 18


class DownloadError(UserError):
    """No address delivered the file with the expected digest."""


def digest_of(path: Path, algorithm: str = "md5") -> str:
    """The digest of a file in hexadecimal, by any algorithm of hashlib."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.new, algorithm, usedforsecurity=False)).hexdigest()


def _fetch(url: str, part: Path, digest: str | None, algorithm: str, timeout: float) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # A bar that vanishes in a terminal, one line in a log file; standard output is for results.
    console = Console(stderr=True)
    # A new file, and not what a link in somebody else's folder names.
    part.unlink(missing_ok=True)
    with (
        urllib.request.urlopen(url, timeout=timeout) as response,
        part.open("xb") as file,
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
    # Of the file on the disk, which is what will be read.
    if digest and not (found := digest_of(part, algorithm)).startswith(digest):
        raise OSError(f"its {algorithm.upper()} is {found}, expected {digest}")


def download(
    urls: Sequence[str], path: Path, digest: str | None, timeout: float = 10.0, algorithm: str = "md5"
) -> None:
    """Download a file from the first address that delivers it, unless it exists.

    Processes that call it at the same time take turns, and the later ones find the file. It appears under its name only
    when it is complete; nothing else stays behind, save after a kill a hidden part that the next download overwrites.

    Args:
        urls: addresses to try in turn.
        digest: what the file's digest has to begin with, in hexadecimal; None checks only its length.
        timeout: seconds without an answer or without data before the next address is tried.
        algorithm: of the digest, by hashlib's name.

    Raises:
        DownloadError: every address failed; the message holds the reason of each.
        OSError: the folder cannot be written.
    """
    if path.exists():
        return
    new_folders = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    part = path.with_name(f".{path.name}.part")
    reasons = []
    with FileLock(lock):
        try:
            if path.exists():
                return
            for url in urls:
                try:
                    _fetch(url, part, digest, algorithm, timeout)
                except (OSError, http.client.HTTPException) as error:
                    # URLError wraps the reason; HTTPError's own text holds the status as well.
                    reason = error if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
                    reasons.append(f"{urlsplit(url).netloc}: {reason or type(error).__name__}")
                else:
                    part.replace(path)
                    return
        finally:
            part.unlink(missing_ok=True)
            # While it is held, so that the next process makes a new one; Windows removes it by itself.
            with contextlib.suppress(OSError):
                lock.unlink()
    with contextlib.suppress(OSError):
        for folder in new_folders:
            folder.rmdir()
    raise DownloadError(f"could not download {path.name} ({'; '.join(reasons)})")
