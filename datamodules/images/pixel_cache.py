"""Cache of decoded images in memory-mapped files on disk, which processes and runs share.

An entry that was not completely written, or whose image file has changed, counts as missing.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from datamodules.notes import waiting_for

log = logging.getLogger("lightning_recipes")

# Byte offset of an image, its shape, the stamp of its file, and the checksum of its bytes.
_ENTRY = np.dtype([("start", "<i8"), ("height", "<i4"), ("width", "<i4"), ("stamp", "<u8"), ("sum", "<u8")])
_FILES = ("lock", "pixels", "index")
_NAME = re.compile(r"[0-9a-f]{24}-\d+")
_UNUSED = 30 * 24 * 3600  # Seconds.


def _open_to_write(path: Path) -> BinaryIO:
    """Open a file for reading and writing. A missing file is created; an existing file keeps its content."""
    return cast("BinaryIO", os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b"))


def _sum(content: np.ndarray[Any, Any]) -> int:
    """Return the sum of the 64-bit words as a checksum, at the speed of memory. A CRC takes as long as decoding."""
    words = len(content) // 8 * 8
    total = np.add.reduce(content[:words].view("<u8"), dtype=np.uint64)
    return (int(total) + int.from_bytes(content[words:].tobytes(), "little") + len(content)) % 2**64


def delete_unused(folder: Path) -> None:
    """Delete the caches in a folder that no process has opened for 30 days. Entries with other names stay."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if _NAME.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - _UNUSED:
                shutil.rmtree(entry, ignore_errors=True)


class PixelCache:
    """Cache of uint8 images by row. Each process opens the files itself, even after a fork.

    Args:
        folder: folder of the cache, created if missing.
        rows: number of rows.
        limit: maximum total size of the cached images, in bytes.
    """

    def __init__(self, folder: Path, rows: int, limit: int) -> None:
        self.folder = folder
        self.rows = rows
        self.limit = limit
        self._process = 0
        self._files: contextlib.ExitStack | None = None
        self._full = False
        # Offset of each row's image when this process verified the checksum, which is verified once.
        self._verified = np.full(rows, -1, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        plain = {"folder", "rows", "limit", "_full", "_verified"}
        return {**{name: self.__dict__[name] for name in plain}, "_process": 0, "_files": None}

    def _open(self) -> bool:
        """Open the files, unless this process has opened them, and return whether they are open."""
        if self._process == os.getpid():
            return self._files is not None
        # Opened again after a fork: a lock belongs to the open file, so both processes would hold it.
        self._process = os.getpid()
        self._files = None
        stack = contextlib.ExitStack()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.utime(self.folder)
            self._lock, self._pixels, index = (
                stack.enter_context(_open_to_write(self.folder / name)) for name in _FILES
            )
            size = self.rows * _ENTRY.itemsize
            with self._locked():
                if os.fstat(index.fileno()).st_size != size:
                    index.truncate(size)
                    if hasattr(os, "posix_fallocate"):
                        # Without reserved blocks, writing to mapped memory on a full disk kills the process by SIGBUS.
                        os.posix_fallocate(index.fileno(), 0, size)
            self._index = np.memmap(index, _ENTRY, "r+", shape=(self.rows,))
            self._map: mmap.mmap | None = None
        except (OSError, ValueError) as error:
            stack.close()
            log.info("decoded images are not kept: %s cannot be written (%s)", self.folder, error)
            return False
        self._files = stack
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that serializes the writers of all processes."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting_for(self.folder / "lock"):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def get(self, row: int, stamp: int) -> Tensor | None:
        """Return the image of a row, uint8 of shape (3, height, width), or None. Do not change the image.

        Args:
            row: row of the image.
            stamp: current stamp of its file, below 2^64. If it is not the stamp of `put`, the result is None.
        """
        if not self._open():
            return None
        entry = self._index[row]
        start = int(entry["start"])
        height = int(entry["height"])
        width = int(entry["width"])
        size = 3 * height * width
        if start < 0 or height <= 0 or width <= 0 or int(entry["stamp"]) != stamp:
            return None
        if self._map is None or start + size > len(self._map):
            # Another process may have appended since the file was mapped.
            length = os.fstat(self._pixels.fileno()).st_size
            if start + size > length:
                return None
            self._map = mmap.mmap(self._pixels.fileno(), length, access=mmap.ACCESS_COPY)
        content = np.frombuffer(self._map, np.uint8, size, start)
        if self._verified[row] != start:
            if _sum(content) != int(entry["sum"]):
                return None
            self._verified[row] = start
        return torch.from_numpy(content).view(height, width, 3).permute(2, 0, 1)

    def put(self, row: int, stamp: int, image: Tensor) -> None:
        """Store the image of a row, if there is room for it.

        Args:
            row: row of the image.
            stamp: stamp of its file, below 2^64.
            image: uint8 of shape (3, height, width).
        """
        if self._full or not self._open():
            return
        _, height, width = image.shape
        content = image.permute(1, 2, 0).contiguous().view(-1).numpy()
        try:
            with self._locked():
                # The file grows under the lock, so two processes never write to the same bytes. The slow write is
                # outside the lock.
                start = os.fstat(self._pixels.fileno()).st_size
                self._full = start + len(content) > self.limit
                if self._full:
                    return
                os.ftruncate(self._pixels.fileno(), start + len(content))
            written = os.pwrite(self._pixels.fileno(), content.data, start)
            if written != len(content):
                return
        except OSError as error:
            self._full = True
            log.info("no more decoded images are kept in %s: %s", self.folder, error.strerror or error)
            return
        # After the pixels, so that a reader never finds an entry without pixels.
        self._index[row] = (start, height, width, stamp, _sum(content))
