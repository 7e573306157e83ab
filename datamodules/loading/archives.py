"""Files in zip archives, listed by `zipfile`, and each read in place by its number, by any number of processes."""

import os
import stat
import struct
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError

_LOCAL = struct.Struct("<26xHH")  # The header before a file in an archive.


def is_archive(file: str | Path) -> bool:
    """Whether a file is an archive that can be read in place, by its ending."""
    return str(file).lower().endswith(".zip")


class Archive:
    """Files in an archive by number; the archive is opened once in each process, when one is read.

    Args:
        path: of the archive.
        members: int64 of shape (n, 5): the byte where a file begins with its header, its bytes in the archive, those
            that it holds, the CRC-32 of these, and the method of compression.
        state: its size in bytes and the time of its last change in nanoseconds, when it was listed.
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
            if _state(opened) != self.state:
                raise OSError(f"{self.path} has changed since it was listed; start the run again")
            self._opened = opened
        return self._opened

    def size(self, row: int) -> int:
        """Bytes that a file holds."""
        return int(self.members[row, 2])

    def read(self, row: int) -> bytes:
        """What a file holds.

        Raises:
            OSError: the archive is missing, has changed or is damaged there.
        """
        start, packed, _, check, method = self.members[row].tolist()
        # How long the header is only the header says.
        header = os.pread(self._descriptor(), _LOCAL.size, start).ljust(_LOCAL.size)
        data = os.pread(self._descriptor(), packed, start + _LOCAL.size + sum(_LOCAL.unpack(header)))
        try:
            data = zlib.decompress(data, -15) if method == zipfile.ZIP_DEFLATED else data
        except zlib.error as error:
            raise OSError(f"{self.path} is damaged there ({error}); copy or download it again") from error
        if zlib.crc32(data) != check:
            raise OSError(f"{self.path} is damaged there, by its CRC-32; copy or download it again")
        return data


def _state(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def _zip_name(member: zipfile.ZipInfo) -> str:
    """A file's name: Info-ZIP on Linux writes UTF-8 without saying so."""
    if not member.flag_bits & 0x800:
        try:
            return member.filename.encode("cp437").decode()
        except UnicodeError:
            pass
    return member.filename


def _zip_members(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir():
                yield _zip_name(member), ()
            # A link's content is the path of another file.
            elif not stat.S_ISLNK(member.external_attr >> 16):
                if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise UserError(
                        f"{path}: {member.filename} is encrypted or not compressed by deflate; unpack the archive, and"
                        " pass its folder"
                    )
                sizes = member.compress_size, member.file_size
                yield _zip_name(member), (member.header_offset, *sizes, member.CRC, member.compress_type)


def list_archive(path: Path) -> tuple[list[str], Archive]:
    """The names of an archive's files, and the files by their place among these; folders end with a slash.

    Links are left out.

    Raises:
        UserError: it is missing, damaged or truncated, or holds files that are encrypted.
    """
    try:
        with path.open("rb") as opened:
            state = _state(opened.fileno())
        found = list(_zip_members(path))
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read: {error}; copy or download it again") from error
    members = torch.tensor([member or (0,) * 5 for _, member in found], dtype=torch.int64).view(-1, 5)
    return [name for name, _ in found], Archive(str(path), members, state)
