"""Files in zip and tar archives, listed by Python's modules, and read in place by their numbers, by any process."""

import contextlib
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError

_LOCAL = struct.Struct("<26xHH")  # The header before a file in a zip archive.
_IN_TAR = -1
"""The method of compression of files in a tar archive: none, without a header of their own."""
_PACKED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_archive(file: str | Path) -> bool:
    """Whether a file is an archive that can be read, by its ending."""
    return str(file).lower().endswith((".zip", ".tar", *_PACKED_TARS))


def unpacked(path: Path, cache: Path) -> Path | None:
    """The folder in which a compressed tar archive has been unpacked, once; None for an archive that is read in place.

    Its files cannot be read one by one where they are.

    Args:
        cache: the folder of such folders.

    Raises:
        UserError: the archive is missing or damaged, or the disk has no room.
    """
    if not str(path).lower().endswith(_PACKED_TARS):
        return None
    try:
        status = path.stat()
        folder = cache / f"{path.name}-{status.st_size}-{status.st_mtime_ns}"
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        # Other ranks may do the same: whoever is first gives the folder its name.
        made = Path(tempfile.mkdtemp(dir=cache))
        try:
            with tarfile.open(path) as archive:
                archive.extractall(made, filter="data")
            if not folder.is_dir():
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be unpacked into {cache}: {error}") from error
    return folder


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

    @property
    def has_checksums(self) -> bool:
        """Whether the archive holds a CRC-32 of each file."""
        return bool((self.members[:, 4] != _IN_TAR).all())

    def size(self, row: int) -> int:
        """Bytes that a file holds."""
        return int(self.members[row, 2])

    def read(self, row: int) -> bytes:
        """What a file holds.

        Raises:
            OSError: the archive is missing, has changed or is damaged there.
        """
        start, packed, _, check, method = self.members[row].tolist()
        if method == _IN_TAR:
            data = os.pread(self._descriptor(), packed, start)
            if len(data) < packed:
                raise OSError(f"{self.path} is truncated there; copy or download it again")
            return data
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
    """A file's name: Info-ZIP on Linux writes UTF-8 without saying so, and some programs of Windows backslashes."""
    name = member.filename
    if not member.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return name if "/" in name else name.replace("\\", "/")


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


def _tar_members(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isdir():
                yield f"{member.name}/", ()
            elif member.isreg():
                yield member.name, (member.offset_data, member.size, member.size, 0, _IN_TAR)


def list_archive(path: Path) -> tuple[list[str], Archive]:
    """The names of an archive's files, and the files by their place among these; folders end with a slash.

    Links are left out.

    Raises:
        UserError: it is missing, damaged or truncated, or holds files that are encrypted.
    """
    try:
        with path.open("rb") as opened:
            state = _state(opened.fileno())
        list_members = _tar_members if path.suffix.lower() == ".tar" else _zip_members
        found = list(list_members(path))
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be read: {error}; copy or download it again") from error
    members = torch.tensor([member or (0,) * 5 for _, member in found], dtype=torch.int64).view(-1, 5)
    return [name for name, _ in found], Archive(str(path), members, state)
