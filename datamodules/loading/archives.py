"""Reads single files of zip and tar archives by number, in any process, without unpacking the archive.

Python's `zipfile` and `tarfile` list an archive once. Files are then read with `os.pread`, which needs no file position
that processes or threads would have to share.
"""

import contextlib
import os
import shutil
import stat
import struct
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from datamodules.errors import UserError

# A zip archive has a local header of 30 bytes before each file, then its name and an extra field. The last four bytes
# of the header are the lengths of these two.
_LOCAL = struct.Struct("<26xHH")
_IN_TAR = -1
"""Compression method that marks a file of a tar archive: not compressed, without checksum."""
_PACKED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_archive(file: str | Path) -> bool:
    """Return whether a file is a supported archive, by its suffix."""
    return str(file).lower().endswith((".zip", ".tar", *_PACKED_TARS))


def unpacked(path: Path, cache: Path) -> Path | None:
    """Unpack a compressed tar archive, unless done before, and return the folder; None for other archives.

    Such an archive is compressed as a whole, so that a single file cannot be read without all files before it.

    Args:
        cache: parent folder of the unpacked archives.

    Raises:
        UserError: the archive is missing or damaged, or the disk has no room.
    """
    if not str(path).lower().endswith(_PACKED_TARS):
        return None
    try:
        status = path.stat()
        folder = cache / f"{path.name}-{status.st_size}-{status.st_mtime_ns}"
        cache.mkdir(parents=True, exist_ok=True)
        partial_folder = folder.with_name(f".{folder.name}.part")
        # Other ranks wait, and find the folder.
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():
                return folder
            # What a killed process has left.
            shutil.rmtree(partial_folder, ignore_errors=True)
            try:
                with tarfile.open(path) as archive:
                    archive.extractall(partial_folder, filter="data")
                partial_folder.rename(folder)
            finally:
                shutil.rmtree(partial_folder, ignore_errors=True)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be unpacked into {cache}: {error}") from error
    return folder


class Archive:
    """Files of an archive by number. Each process opens the archive when it reads the first file.

    Args:
        path: path of the archive.
        members: int64 of shape (n, 5), with a row for each file: byte offset of its header in the archive, compressed
            size in bytes, uncompressed size in bytes, CRC-32, and compression method. Files in a tar archive have the
            offset of their content.
        state: size of the archive in bytes and its modification time in nanoseconds, when it was listed.
    """

    def __init__(self, path: str, members: Tensor, state: tuple[int, int]) -> None:
        self.path = path
        self.members = members
        self.state = state
        self._open_descriptor: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The number of a file descriptor means nothing in another process.
        return {**self.__dict__, "_open_descriptor": None}

    def _descriptor(self) -> int:
        """Return the file descriptor of the archive, opened on first use."""
        if self._open_descriptor is None:
            descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            # In a changed archive the offsets would point to other files.
            if _state(descriptor) != self.state:
                raise OSError(f"{self.path} has changed since it was listed; start the run again")
            self._open_descriptor = descriptor
        return self._open_descriptor

    @property
    def has_checksums(self) -> bool:
        """Whether the archive holds a CRC-32 of each file."""
        return bool((self.members[:, 4] != _IN_TAR).all())

    def size(self, row: int) -> int:
        """Return the uncompressed size of a file in bytes."""
        return int(self.members[row, 2])

    def read(self, row: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: the archive is missing, has changed or is damaged at this file.
        """
        start, compressed_size, _, crc, method = self.members[row].tolist()
        if method == _IN_TAR:
            data = os.pread(self._descriptor(), compressed_size, start)
            # tar has no checksum of the content, so only the length can be verified.
            if len(data) < compressed_size:
                raise OSError(f"{self.path} is truncated there; copy or download it again")
            return data
        # The archive's directory repeats the name but may have an extra field of another length than the local header.
        header = os.pread(self._descriptor(), _LOCAL.size, start).ljust(_LOCAL.size)
        name_size, extra_size = _LOCAL.unpack(header)
        data = os.pread(self._descriptor(), compressed_size, start + _LOCAL.size + name_size + extra_size)
        if method == zipfile.ZIP_DEFLATED:
            try:
                # A negative window size: zip stores raw deflate data without zlib's header.
                data = zlib.decompress(data, -15)
            except zlib.error as error:
                raise OSError(f"{self.path} is damaged there ({error}); copy or download it again") from error
        if zlib.crc32(data) != crc:
            raise OSError(f"{self.path} is damaged there, by its CRC-32; copy or download it again")
        return data


def _state(descriptor: int) -> tuple[int, int]:
    """Return the size in bytes and the modification time in nanoseconds of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _zip_name(member: zipfile.ZipInfo) -> str:
    """Return the path of a member with its encoding and its separators corrected."""
    name = member.filename
    # Bit 11 says that the name is UTF-8. Info-ZIP on Linux writes UTF-8 without it, and zipfile then decodes cp437.
    if not member.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    # Some programs of Windows separate folders by backslashes. Beside a slash, a backslash is part of a name.
    if "/" not in name:
        name = name.replace("\\", "/")
    return name


def _zip_members(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each member and its row of `Archive.members`, which is empty for a folder."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir():
                yield _zip_name(member), ()
            # Links are left out: the content of a link is the path of another file.
            elif not stat.S_ISLNK(member.external_attr >> 16):
                if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise UserError(
                        f"{path}: {member.filename} is encrypted or not compressed by deflate; unpack the archive, and"
                        " pass its folder"
                    )
                row = (
                    member.header_offset,
                    member.compress_size,
                    member.file_size,
                    member.CRC,
                    member.compress_type,
                )
                yield _zip_name(member), row


def _tar_members(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each member and its row of `Archive.members`, which is empty for a folder."""
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isdir():
                yield f"{member.name}/", ()
            elif member.isreg():
                yield member.name, (member.offset_data, member.size, member.size, 0, _IN_TAR)


def list_archive(path: Path) -> tuple[list[str], Archive]:
    """List an archive: the names of its files and folders, and the files by their index among these names.

    Names of folders end with a slash. Links are left out.

    Raises:
        UserError: the archive is missing, damaged or truncated, or holds encrypted files.
    """
    try:
        # Before the listing, so that an archive that is written meanwhile has another state when it is read.
        with path.open("rb") as file:
            state = _state(file.fileno())
        list_members = _tar_members if path.suffix.lower() == ".tar" else _zip_members
        members = list(list_members(path))
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be read: {error}; copy or download it again") from error
    # Folders have a row of zeros, so that a row has the same index as its name.
    rows = [row or (0,) * 5 for _, row in members]
    names = [name for name, _ in members]
    return names, Archive(str(path), torch.tensor(rows, dtype=torch.int64).view(-1, 5), state)
