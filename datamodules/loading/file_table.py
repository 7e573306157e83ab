"""Files by number, on disk or in an archive: their names, what they hold, and the tree of folders that they are in."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.loading.archives import Archive, list_archive


class FileTable(Sequence[str]):
    """Files by number.

    Args:
        names: of the files; what they begin with in common may be left to `root`.
        root: the beginning of each name, such as a folder with its slash.
        archive: that holds files of these names; without one they are on disk.
    """

    def __init__(self, names: Iterable[str] = (), root: str = "", archive: Archive | None = None) -> None:
        self._names, self._root, self._archive = list(names), root, archive
        self._rows = torch.arange(len(self._names))

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, row: Any) -> Any:
        """The name of a file, as it is shown to people."""
        return self._root + self._names[self._rows[row]]

    @override
    def __iter__(self) -> Iterator[str]:
        return (self._root + self._names[row] for row in self._rows.tolist())

    def select(self, rows: Tensor) -> "FileTable":
        """Some of the files, in the order of `rows`, int64 of shape (m,); the names are shared, not copied."""
        return self._with_places(self._rows[rows])

    def _with_places(self, places: Tensor) -> "FileTable":
        chosen = object.__new__(FileTable)
        chosen.__dict__ = {**self.__dict__, "_rows": places}
        return chosen

    @property
    def is_archived(self) -> bool:
        """Whether the files lie in an archive."""
        return self._archive is not None

    def whole(self) -> "FileTable":
        """The table that this one was selected from."""
        return self._with_places(torch.arange(len(self._names)))

    def place(self, row: int) -> int:
        """Where a file stands in the whole table."""
        return int(self._rows[row])

    def read(self, row: int) -> bytes:
        """What a file holds.

        Raises:
            OSError: it is missing or cannot be read.
        """
        if self._archive is not None:
            return self._archive.read(int(self._rows[row]))
        # Twice as fast as a Path, which counts where an image takes less than a millisecond.
        with open(self[row], "rb") as file:  # noqa: PTH123
            return file.read()

    def stamp(self, row: int) -> tuple[int, int]:
        """The size of a file in bytes and the time of its last change in nanoseconds, as they are now.

        The time of a file in an archive is that of the archive when it was listed; `read` refuses one that has changed.

        Raises:
            OSError: it is missing.
        """
        if self._archive is not None:
            return self._archive.size(int(self._rows[row])), self._archive.state[1]
        status = os.stat(self[row])  # noqa: PTH116
        return status.st_size, status.st_mtime_ns

    def checksums(self) -> Tensor | None:
        """Of files in a zip archive their sizes and CRC-32, int64 of shape (n, 2); None where they are not known."""
        if self._archive is None or not self._archive.has_checksums:
            return None
        return self._archive.members[self._rows][:, 2:4]

    def digest(self) -> str:
        """A hash of the whole table's names and of which of them are taken, for the keys of caches; 64 letters."""
        names = "\0".join([self._root, *self._names, ""])
        found = hashlib.sha256(names.encode("utf-8", "surrogateescape"))
        found.update(self._rows.numpy().data)
        return found.hexdigest()


class Folder:
    """A folder and what it holds, without hidden entries.

    Args:
        path: as it is shown to people.

    Attributes:
        folders: by name.
        files: their numbers, by name.
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
        """What the paths of its entries begin with."""
        return os.path.join(self.path, "")  # noqa: PTH118 - a Path has no slash at its end.


def _is_hidden(name: str) -> bool:
    """Whether an entry is not looked at: hidden, or written by macOS, by Windows or by Synology's file server."""
    return name.startswith((".", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir"))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link that leads to itself: as a file it is named.
        return False


def list_folder(place: Path) -> tuple[Folder, FileTable]:
    """A folder on disk with all that is below it, through links too, and the files by their numbers.

    Raises:
        UserError: a folder cannot be listed.
    """
    top, names = Folder(str(place)), list[str]()

    def add_entries(folder: Folder, above: tuple[str, ...]) -> None:
        real = os.path.realpath(folder.path)
        if real in above:  # A link to a folder that it is in.
            return
        prefix = folder.prefix[len(top.prefix) :]
        try:
            # Sorted, so that the files of equal folders have equal numbers.
            entries = sorted(os.scandir(folder.path), key=lambda entry: entry.name)
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
            add_entries(inner, (*above, real))

    add_entries(top, ())
    return top, FileTable(names, top.prefix)


def open_archive(path: Path) -> tuple[Folder, FileTable]:
    """The folders in an archive, and its files; the last of several files with the same name counts.

    Raises:
        UserError: see `list_archive`.
    """
    names, archive = list_archive(path)
    top = Folder(str(path))
    for number, name in enumerate(names):
        *folders, base = (part for part in name.split("/") if part != ".")
        if any(map(_is_hidden, (*folders, base))):
            continue
        here = top
        for part in filter(None, folders):
            here = here.folders.setdefault(part, Folder(here.prefix + part))
        if base:
            here.files[base] = number
    # A name is that of the tree, whichever way the archive spells it.
    spelled = ("/".join(part for part in name.split("/") if part not in ("", ".")) for name in names)
    return top, FileTable(spelled, top.prefix, archive)


def files_below(folder: Folder) -> dict[str, int]:
    """The numbers of the files in a folder and its subfolders, by sorted path."""
    stack, found = [folder], dict[str, int]()
    while stack:
        here = stack.pop()
        found |= {here.prefix + name: number for name, number in here.files.items()}
        stack += here.folders.values()
    return dict(sorted(found.items()))
