"""Decoded images in a file on disk, mapped to memory, that processes and runs share.

What was not written to its end, or belongs to a file that has changed since, is decoded again.
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

log = logging.getLogger("lightning_recipes")

# Where an image lies, its shape, which file it is of, and the sum of its bytes.
_ENTRY = np.dtype([("start", "<i8"), ("height", "<i4"), ("width", "<i4"), ("stamp", "<u8"), ("sum", "<u8")])
_FILES = ("lock", "pixels", "index")
_NAME = re.compile(r"[0-9a-f]{24}-\d+")
_UNUSED = 30 * 24 * 3600  # Seconds.


def _open_to_write(path: Path) -> BinaryIO:
    """A file to read and write at any place, made where there is none, and not emptied where there is."""
    return cast("BinaryIO", os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b"))


def _sum(content: np.ndarray[Any, Any]) -> int:
    """The sum of bytes in 64-bit words: at the speed of memory, where a CRC would cost as much as the decoding."""
    words = len(content) // 8 * 8
    total = np.add.reduce(content[:words].view("<u8"), dtype=np.uint64)
    return (int(total) + int.from_bytes(content[words:].tobytes(), "little") + len(content)) % 2**64


def delete_unused(folder: Path) -> None:
    """Delete the caches in a folder, by their names, that no process has opened for 30 days; all else stays."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if _NAME.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - _UNUSED:
                shutil.rmtree(entry, ignore_errors=True)


class PixelCache:
    """Images of bytes by row, as far as they have been kept.

    Args:
        folder: of this cache; it is made where there is none.
        rows: how many images there may be.
        limit: bytes of images that are kept.

    Copies in other processes, forked or not, open the files for themselves.
    """

    def __init__(self, folder: Path, rows: int, limit: int) -> None:
        self.folder, self.rows, self.limit = folder, rows, limit
        self._process = 0
        self._files: contextlib.ExitStack | None = None
        self._full = False
        # Where the image of a row lay when its bytes were last verified in this process.
        self._verified = np.full(rows, -1, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        plain = {"folder", "rows", "limit", "_full", "_verified"}
        return {**{name: self.__dict__[name] for name in plain}, "_process": 0, "_files": None}

    def _open(self) -> bool:
        """Whether the files are open in this process."""
        if self._process == os.getpid():
            return self._files is not None
        # A lock belongs to an open file, which a forked process would share.
        self._process, self._files = os.getpid(), None
        stack = contextlib.ExitStack()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.utime(self.folder)
            self._lock, self._pixels, index = (
                stack.enter_context(_open_to_write(self.folder / name)) for name in _FILES
            )
            with self._locked():
                if os.fstat(index.fileno()).st_size != (size := self.rows * _ENTRY.itemsize):
                    index.truncate(size)
                    if hasattr(os, "posix_fallocate"):
                        # A write to memory for which the disk has no room would kill the process.
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
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def get(self, row: int, stamp: int) -> Tensor | None:
        """The image of a row, uint8 of shape (3, height, width), not to be changed; None where it is not kept.

        Args:
            stamp: of the file now, below 2^64.
        """
        if not self._open():
            return None
        entry = self._index[row]
        start, height, width = int(entry["start"]), int(entry["height"]), int(entry["width"])
        size = 3 * height * width
        if start < 0 or height <= 0 or width <= 0 or int(entry["stamp"]) != stamp:
            return None
        if self._map is None or start + size > len(self._map):
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
        """Keep the image of a row, where there is room for it.

        Args:
            image: uint8 of shape (3, height, width).
        """
        if self._full or not self._open():
            return
        _, height, width = image.shape
        content = image.permute(1, 2, 0).contiguous().view(-1).numpy()
        try:
            with self._locked():
                # Appended, so that two processes never write to the same place.
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
        self._index[row] = (start, height, width, stamp, _sum(content))
