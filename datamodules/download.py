"""Files from the network: verified, with a time limit, once per node, never half a file."""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from datamodules.errors import UserError

__all__ = ["DownloadError", "download", "md5_of"]

_CHUNK = 1 << 18


class DownloadError(UserError):
    """No address delivered the file, or what came was not the file."""


def md5_of(path: Path) -> str:
    """The MD5 checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(url: str, part: Path, md5: str, timeout: float) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        urllib.request.urlopen(url, timeout=timeout) as response,
        part.open("wb") as file,
        Progress(*columns, transient=True) as progress,
    ):
        length = response.headers.get("Content-Length")
        task = progress.add_task(Path(url).name, total=int(length) if length else None)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            progress.advance(task, len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != md5:
        raise OSError(f"its MD5 is {digest.hexdigest()}, expected {md5}")


def download(urls: Sequence[str], path: Path, md5: str, timeout: float = 10.0) -> None:
    """Fetch a file from the first address that delivers it, unless it is there already.

    Processes that ask at the same time take turns, and the later ones find the file. It appears under its name only
    when it is whole.

    Args:
        urls: addresses to try in turn.
        md5: the expected checksum in hexadecimal.
        timeout: seconds without an answer or without data before the next address is tried.

    Raises:
        DownloadError: every address failed; the message holds the reason of each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / ".download.lock"):
        if path.exists():
            return
        part = path.with_name(f".{path.name}.part")
        reasons = []
        for url in urls:
            try:
                _fetch(url, part, md5, timeout)
                part.replace(path)
                return
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                reasons.append(f"{url}: {reason}")
            finally:
                part.unlink(missing_ok=True)
    raise DownloadError(f"could not download {path.name}: " + "; ".join(reasons))
