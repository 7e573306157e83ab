"""Numbered files, on disk or in an archive, and the folder trees that contain them.

An archive is not unpacked: Python's `zipfile` and `tarfile` list it once. Then `os.pread` reads its files, without a
file position that processes or threads would share.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import struct
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.loading.download import file_lock

# In a zip archive a local header of 30 bytes, the name and an extra field precede each file. The last four bytes of the
# header are the lengths of the name and the extra field.
_LOCAL = struct.Struct("<26xHH")
_IN_TAR = -1
"""Compression method of files in a tar archive: not compressed, without a checksum."""
_PACKED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def cache_folder(*names: str) -> Path:
    """Return a folder in the user's cache folder, ``$XDG_CACHE_HOME`` or ``~/.cache``. It may not exist yet."""
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        # The user has no home, as in some containers. No folder can be created below this path: nothing is cached.
        cache_home = Path(os.devnull)
    return cache_home.joinpath("lightning-recipes", *names)


def is_archive(file: str | Path) -> bool:
    """Return whether a file is a supported archive, by its suffix."""
    return str(file).lower().endswith((".zip", ".tar", *_PACKED_TARS))


def unpacked(path: Path, cache: Path) -> Path | None:
    """Unpack a compressed tar archive once, and return the folder; None for other archives.

    Such an archive is compressed as a whole, so reading a file requires reading all files before it.

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
        # Other ranks wait here, and then find the folder.
        with file_lock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():
                return folder
            # The leftover of a killed process.
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
    """Files of an archive by number. Each process opens the archive when it reads its first file.

    Args:
        path: path of the archive.
        members: int64 of shape (n, 5), one row per file: byte offset of its header (in a tar archive, of its content),
            compressed size in bytes, uncompressed size in bytes, CRC-32, and compression method.
        state: size in bytes and modification time in nanoseconds of the archive when it was listed.
    """

    def __init__(self, path: str, members: Tensor, state: tuple[int, int]) -> None:
        self.path = path
        self.members = members
        self.state = state
        self._open_descriptor: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A file descriptor is not valid in another process.
        return {**self.__dict__, "_open_descriptor": None}

    def _descriptor(self) -> int:
        """Return the file descriptor of the archive, opened on first use."""
        if self._open_descriptor is None:
            descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            # The offsets would be wrong in a changed archive.
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
            OSError: the archive is missing, has changed, or is damaged at this file.
        """
        start, compressed_size, _, crc, method = self.members[row].tolist()
        if method == _IN_TAR:
            data = os.pread(self._descriptor(), compressed_size, start)
            # tar has no checksum of the content, so only the length is verified.
            if len(data) < compressed_size:
                raise OSError(f"{self.path} is truncated there; copy or download it again")
            return data
        # The local header is read, because the extra field in the archive's directory may have another length.
        header = os.pread(self._descriptor(), _LOCAL.size, start).ljust(_LOCAL.size)
        name_size, extra_size = _LOCAL.unpack(header)
        data = os.pread(self._descriptor(), compressed_size, start + _LOCAL.size + name_size + extra_size)
        if method == zipfile.ZIP_DEFLATED:
            try:
                # Negative window size: zip stores raw deflate data, without zlib's header.
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
    """Return the path of a member with corrected encoding and separators."""
    name = member.filename
    # Bit 11 says that the name is UTF-8. Info-ZIP on Linux writes UTF-8 without it, and zipfile then decodes cp437.
    if not member.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    # Some Windows programs separate folders by backslashes. In a name with slashes, a backslash is part of the name.
    if "/" not in name:
        name = name.replace("\\", "/")
    return name


def _zip_members(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each member and its row in `Archive.members`; the row of a folder is empty."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir():
                yield _zip_name(member), ()
            # Links are left out: their content is the path of another file.
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
    """Yield the name of each member and its row in `Archive.members`; the row of a folder is empty."""
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isdir():
                yield f"{member.name}/", ()
            elif member.isreg():
                yield member.name, (member.offset_data, member.size, member.size, 0, _IN_TAR)


def list_archive(path: Path) -> tuple[list[str], Archive]:
    """List an archive: the names of its files and folders, and the files by the index of their names.

    Names of folders end with a slash. Links are left out.

    Raises:
        UserError: the archive is missing, damaged or truncated, or holds encrypted files.
    """
    try:
        # Read before the listing, so that a write during the listing is detected later.
        with path.open("rb") as file:
            state = _state(file.fileno())
        list_members = _tar_members if path.suffix.lower() == ".tar" else _zip_members
        members = list(list_members(path))
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be read: {error}; copy or download it again") from error
    # Folders have a row of zeros, so that a row and its name have the same index.
    rows = [row or (0,) * 5 for _, row in members]
    names = [name for name, _ in members]
    return names, Archive(str(path), torch.tensor(rows, dtype=torch.int64).view(-1, 5), state)


class FileTable(Sequence[str]):
    """Sequence of file names, on disk or in an archive; `read` returns a file's content.

    Selections share one list of names, and each has a tensor of indices.

    Args:
        names: names of the files, without `root`.
        root: common prefix of the names, such as a folder with its slash.
        archive: archive that holds the files; None for files on disk.
    """

    def __init__(self, names: Iterable[str] = (), root: str = "", archive: Archive | None = None) -> None:
        self._names = list(names)
        self._root = root
        self._archive = archive
        self._rows = torch.arange(len(self._names))

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, row: Any) -> Any:
        """Return the path of a file, for messages."""
        return self._root + self._names[self._rows[row]]

    @override
    def __iter__(self) -> Iterator[str]:
        return (self._root + self._names[row] for row in self._rows.tolist())

    def select(self, rows: Tensor) -> "FileTable":
        """Return a table of the files at `rows`, int64 of shape (m,), in this order."""
        return self._with_rows(self._rows[rows])

    def _with_rows(self, rows: Tensor) -> "FileTable":
        selection = object.__new__(FileTable)
        selection.__dict__ = {**self.__dict__, "_rows": rows}
        return selection

    @property
    def is_archived(self) -> bool:
        """Whether the files are in an archive."""
        return self._archive is not None

    def base_table(self) -> "FileTable":
        """Return the full table from which this table was selected."""
        return self._with_rows(torch.arange(len(self._names)))

    def base_row(self, row: int) -> int:
        """Return the index of a file in the full table."""
        return int(self._rows[row])

    def read(self, row: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: the file is missing or cannot be read.
        """
        if self._archive is not None:
            return self._archive.read(int(self._rows[row]))
        # `open` is twice as fast as `Path.open`, which matters if an image takes less than a millisecond.
        with open(self[row], "rb") as file:  # noqa: PTH123
            return file.read()

    def stamp(self, row: int) -> tuple[int, ...]:
        """Return the current size of a file in bytes, and its modification and change times in nanoseconds.

        tar and rsync set the modification time. The change time (`st_ctime_ns`) shows that a file was replaced. A file
        in an archive has the archive's time when it was listed. If the archive changes, `read` fails.

        Raises:
            OSError: the file is missing.
        """
        if self._archive is not None:
            return self._archive.size(int(self._rows[row])), self._archive.state[1]
        status = os.stat(self[row])  # noqa: PTH116
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def checksums(self) -> Tensor | None:
        """Return size in bytes and CRC-32 of each file, int64 of shape (n, 2); None outside of zip archives."""
        if self._archive is None or not self._archive.has_checksums:
            return None
        return self._archive.members[self._rows][:, 2:4]

    def digest(self) -> str:
        """Return a SHA-256 hash of all names and of the selected rows, for the keys of caches."""
        names = "\0".join([self._root, *self._names, ""])
        # Linux allows any bytes in a name. Python decodes bytes that are not UTF-8 as surrogates.
        sha256 = hashlib.sha256(names.encode("utf-8", "surrogateescape"))
        sha256.update(self._rows.numpy().data)
        return sha256.hexdigest()


class Folder:
    """Folder of a tree, without hidden entries.

    Args:
        path: path of the folder, for messages.

    Attributes:
        folders: subfolders by name.
        files: indices of the files in the `FileTable`, by name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.folders: dict[str, Folder] = {}
        self.files: dict[str, int] = {}

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def prefix(self) -> str:
        """Path of the folder with a trailing slash."""
        return os.path.join(self.path, "")  # noqa: PTH118 - a Path has no trailing slash.


def _is_hidden(name: str) -> bool:
    """Return whether an entry is ignored: hidden, or created by macOS, Windows or Synology's file server."""
    return name.startswith((".", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir"))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself. As a file, it is reported as unreadable instead of disappearing.
        return False


def list_folder(path: Path) -> tuple[Folder, FileTable]:
    """List a folder and its subfolders, following links, and return the tree and the table of its files.

    Raises:
        UserError: a folder cannot be listed.
    """
    top = Folder(str(path))
    names: list[str] = []

    def add_entries(folder: Folder, parents: tuple[str, ...]) -> None:
        real_path = os.path.realpath(folder.path)
        # A link to a parent folder would be followed forever.
        if real_path in parents:
            return
        prefix = folder.prefix[len(top.prefix) :]
        try:
            # Sorted, because the order of the file system differs between machines, and the random numbers are a
            # function of the sample numbers.
            entries = sorted(os.scandir(folder.path), key=attrgetter("name"))
        except OSError as error:
            raise UserError(f"{folder.path} cannot be listed: {error.strerror or error}") from error
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if _is_folder(entry):
                folder.folders[entry.name] = Folder(folder.prefix + entry.name)
            else:
                folder.files[entry.name] = len(names)
                names.append(prefix + entry.name)
        for inner in folder.folders.values():
            add_entries(inner, (*parents, real_path))

    add_entries(top, ())
    return top, FileTable(names, top.prefix)


def open_archive(path: Path) -> tuple[Folder, FileTable]:
    """List an archive and return its folder tree and the table of its files.

    Raises:
        UserError: see `list_archive`.
    """
    names, archive = list_archive(path)
    top = Folder(str(path))
    for number, name in enumerate(names):
        *folders, base = (component for component in name.split("/") if component != ".")
        if any(map(_is_hidden, (*folders, base))):
            continue
        parent = top
        for component in filter(None, folders):
            parent = parent.folders.setdefault(component, Folder(parent.prefix + component))
        if base:
            # The last of several files with the same name wins, as when an archive is unpacked.
            parent.files[base] = number
    # Archives write "./a/b", "a/b" or "a//b" for the same file. Equal folders must give equal names.
    normalized = []
    for name in names:
        normalized.append("/".join(component for component in name.split("/") if component not in ("", ".")))
    return top, FileTable(normalized, top.prefix, archive)


def files_below(folder: Folder) -> dict[str, int]:
    """Return the indices of the files in a folder and its subfolders by path, sorted by path."""
    numbers: dict[str, int] = {}
    stack = [folder]
    while stack:
        current = stack.pop()
        for name, number in current.files.items():
            numbers[current.prefix + name] = number
        stack += current.folders.values()
    return dict(sorted(numbers.items()))
