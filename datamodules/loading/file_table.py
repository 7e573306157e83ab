"""Tables of numbered files, on disk or in an archive, and the folder trees that contain them."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.loading.archives import Archive, list_archive


class FileTable(Sequence[str]):
    """Sequence of file names that reads files by index, on disk or in an archive.

    Selections share one list of names, and differ in a tensor of indices.

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
        """Return the path of a file, as it is written in messages."""
        return self._root + self._names[self._rows[row]]

    @override
    def __iter__(self) -> Iterator[str]:
        return (self._root + self._names[row] for row in self._rows.tolist())

    def select(self, rows: Tensor) -> "FileTable":
        """Return a table of the files at `rows`, int64 of shape (m,), in this order. It shares the list of names."""
        return self._with_rows(self._rows[rows])

    def _with_rows(self, rows: Tensor) -> "FileTable":
        selection = object.__new__(FileTable)
        selection.__dict__ = {**self.__dict__, "_rows": rows}
        return selection

    @property
    def is_archived(self) -> bool:
        """Whether the files are in an archive."""
        return self._archive is not None

    def whole(self) -> "FileTable":
        """Return the full table that this table was selected from."""
        return self._with_rows(torch.arange(len(self._names)))

    def place(self, row: int) -> int:
        """Return the index of a file in the full table."""
        return int(self._rows[row])

    def read(self, row: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: the file is missing or cannot be read.
        """
        if self._archive is not None:
            return self._archive.read(int(self._rows[row]))
        # `open` is twice as fast as `Path.open`, which matters where an image takes less than a millisecond.
        with open(self[row], "rb") as file:  # noqa: PTH123
            return file.read()

    def stamp(self, row: int) -> tuple[int, int]:
        """Return the current size of a file in bytes and its modification time in nanoseconds.

        A file in an archive has the time of the archive when it was listed. If the archive changes, `read` fails.

        Raises:
            OSError: the file is missing.
        """
        if self._archive is not None:
            return self._archive.size(int(self._rows[row])), self._archive.state[1]
        status = os.stat(self[row])  # noqa: PTH116
        return status.st_size, status.st_mtime_ns

    def checksums(self) -> Tensor | None:
        """Return size in bytes and CRC-32 of each file, int64 of shape (n, 2); None if not all are in a zip archive."""
        if self._archive is None or not self._archive.has_checksums:
            return None
        return self._archive.members[self._rows][:, 2:4]

    def digest(self) -> str:
        """Return a SHA-256 hash of all names and of the selected rows, for the keys of caches."""
        names = "\0".join([self._root, *self._names, ""])
        # Linux allows any bytes in a name. Python decodes those that are not UTF-8 as surrogates.
        sha256 = hashlib.sha256(names.encode("utf-8", "surrogateescape"))
        sha256.update(self._rows.numpy().data)
        return sha256.hexdigest()


class Folder:
    """Folder of a tree, without hidden entries.

    Args:
        path: path of the folder, as it is written in messages.

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
        """Path of the folder with a slash at its end."""
        return os.path.join(self.path, "")  # noqa: PTH118 - a Path has no slash at its end.


def _is_hidden(name: str) -> bool:
    """Return whether an entry is ignored: hidden, or written by macOS, Windows or Synology's file server."""
    return name.startswith((".", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir"))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself. Listed as a file, it is reported as unreadable instead of disappearing.
        return False


def list_folder(path: Path) -> tuple[Folder, FileTable]:
    """List a folder on disk with its subfolders, following links, and return the tree and the table of its files.

    Raises:
        UserError: a folder cannot be listed.
    """
    top = Folder(str(path))
    names: list[str] = []

    def add_entries(folder: Folder, parents: tuple[str, ...]) -> None:
        real_path = os.path.realpath(folder.path)
        # A link to one of the folders that contain it would be followed forever.
        if real_path in parents:
            return
        prefix = folder.prefix[len(top.prefix) :]
        try:
            # Sorted, since the file system's order differs between machines, and sample numbers decide the random
            # numbers.
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
            # Of several files with the same name the last one counts, as when an archive is unpacked.
            parent.files[base] = number
    # Archives write "./a", "a" or "a//b" for the same files. Equal folders have to give equal names.
    normalised = []
    for name in names:
        normalised.append("/".join(component for component in name.split("/") if component not in ("", ".")))
    return top, FileTable(normalised, top.prefix, archive)


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
