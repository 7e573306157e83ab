"""Files in zip and tar archives, each read in place by its number.

The bytes of a file are taken from the archive where the index says, by any number of processes and threads at once.
Nothing is unpacked.
"""

import os
import struct
import weakref
import zlib
from typing import Any, NamedTuple

from torch import Tensor

from datamodules.loading.unpacking import MOST_UNPACKED

__all__ = ["AGAIN", "DEFLATED", "IN_TAR", "STORED", "Archive", "Member"]

IN_TAR, STORED, DEFLATED = -1, 0, 8
"""How a file is kept: in a tar archive, or in a zip archive by the numbers of its specification."""
AGAIN = "copy or download it again"

_LOCAL = struct.Struct("<4s22xHH")
_MARGIN = 512  # Bytes for the name of a file and other fields, which mostly suffice.


class Member(NamedTuple):
    """A file in an archive, in the order of the columns of `Archive.members`."""

    start: int
    """The byte where its content begins, or the header before it in a zip archive."""
    packed: int
    """Bytes in the archive."""
    size: int
    """Bytes that it holds."""
    check: int
    """The CRC-32 of what it holds, in a zip archive."""
    method: int
    """How it is kept."""


class Archive:
    """Files in an archive by number; the archive is opened once in each process, when one is read.

    Args:
        path: of the archive.
        members: int64 of shape (n, 5), see `Member`.
        state: its size in bytes and the time of its last change in nanoseconds, when it was indexed.
    """

    def __init__(self, path: str, members: Tensor, state: tuple[int, int]) -> None:
        self.path, self.members, self.state = path, members, state
        self._opened: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _descriptor(self) -> int:
        if self._opened is None:
            opened = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, opened)
            status = os.fstat(opened)
            if (found := (status.st_size, status.st_mtime_ns)) != self.state:
                raise OSError(
                    f"{self.path} has changed since it was listed, from {self.state[0]:,} to {found[0]:,} bytes; start"
                    " the run again"
                )
            self._opened = opened
        return self._opened

    def size(self, row: int) -> int:
        """Bytes that a file holds."""
        return int(self.members[row, 2])

    def read(self, row: int) -> bytes:
        """What a file holds.

        Raises:
            OSError: the archive is missing, has changed or is damaged, or the file is too large.
        """
        member = Member(*self.members[row].tolist())
        if member.size > MOST_UNPACKED:
            raise OSError(f"it has {member.size:,} bytes, and the limit is {MOST_UNPACKED:,}; unpack {self.path}")
        if member.method == IN_TAR:
            return self._exactly(member.start, member.packed)
        data = self._zipped(member)
        if member.method == DEFLATED:
            try:
                data = zlib.decompressobj(-15).decompress(data, member.size + 1)
            except zlib.error as error:
                raise OSError(f"{self.path} is damaged there ({error}); {AGAIN}") from error
        if len(data) != member.size:
            raise OSError(f"{self.path} holds {len(data):,} of its {member.size:,} bytes; {AGAIN}")
        if (found := zlib.crc32(data)) != member.check:
            raise OSError(
                f"{self.path} is damaged there: the CRC-32 is {found:08x}, expected {member.check:08x}; {AGAIN}"
            )
        return data

    def _zipped(self, member: Member) -> bytes:
        """The bytes behind a file's own header, whose length only that header says."""
        block = os.pread(self._descriptor(), _LOCAL.size + _MARGIN + member.packed, member.start)
        signature, name, extra = _LOCAL.unpack(block[: _LOCAL.size].ljust(_LOCAL.size))
        if signature != b"PK\3\4":
            raise OSError(f"{self.path} is damaged there: no file begins at byte {member.start:,}; {AGAIN}")
        start = _LOCAL.size + name + extra
        if start > _LOCAL.size + _MARGIN:
            return self._exactly(member.start + start, member.packed)
        return block[start : start + member.packed]

    def _exactly(self, start: int, size: int) -> bytes:
        data = os.pread(self._descriptor(), size, start)
        if len(data) != size:
            raise OSError(f"{self.path} ends after {len(data):,} of its {size:,} bytes; {AGAIN}")
        return data
