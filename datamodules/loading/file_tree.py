"""The folders and files below a folder: on disk, or in an archive."""

import os
import stat
from functools import cached_property
from pathlib import Path

from typing_extensions import override

from datamodules.errors import UserError
from datamodules.loading.file_table import FileTable, zero_terminated

__all__ = ["DiskFolder", "Folder", "Listing", "State", "files_below", "is_hidden", "state_of"]

State = tuple[int, int, int, int]


def state_of(path: str) -> State:
    """What differs after each change of a file's content or of a folder's entries.

    Returns:
        The number of the inode, the times of the last changes of content and status in nanoseconds, and the bytes of
        the file or the number of the folder's entries.

    Raises:
        OSError: there is none, or it cannot be listed.
    """
    status = Path(path).stat()
    size = len(os.listdir(path)) if stat.S_ISDIR(status.st_mode) else status.st_size  # noqa: PTH208 - half the time.
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, size


def is_hidden(name: str) -> bool:
    """Whether an entry is not looked at: as the shadow folder in archives made by macOS."""
    return name.startswith((".", "__MACOSX"))


class Folder:
    """A folder and what it holds, without hidden entries.

    Args:
        path: as it is shown to people.

    Attributes:
        folders: by name.
        files: their numbers, by name.
        real: its path without links.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def folders(self) -> "dict[str, Folder]":
        return {}

    @cached_property
    def files(self) -> dict[str, int]:
        return {}

    @property
    def real(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def prefix(self) -> str:
        """What the paths of its entries begin with."""
        return str(Path(self.path, "x"))[:-1]


class Listing:
    """What has been listed on disk.

    Args:
        place: the folder that the names are relative to.

    Attributes:
        top: the folder itself.
        states: of the folders before they were listed, by path; see `state_of`.
        notes: remarks for the user, a line each.
    """

    def __init__(self, place: Path) -> None:
        self.top = DiskFolder(str(place), self)
        self.states: dict[str, State] = {}
        self.notes: list[str] = []
        self._names, self._count = bytearray(), 0

    def add(self, folder: Folder, names: list[str]) -> dict[str, int]:
        """Number the files of a folder."""
        prefix = folder.prefix[len(self.top.prefix) :]
        self._names += zero_terminated(prefix + name for name in names)
        self._count += len(names)
        return dict(zip(names, range(self._count - len(names), self._count)))

    @cached_property
    def table(self) -> FileTable:
        """The files by their numbers, once all folders have been listed."""
        return FileTable(self._names, self.top.prefix)


class DiskFolder(Folder):
    """A folder on disk, which is listed when it is looked into.

    Raises:
        UserError: it cannot be listed.
    """

    def __init__(self, path: str, listing: Listing) -> None:
        super().__init__(path)
        self._listing = listing

    @cached_property
    def _entries(self) -> tuple[dict[str, Folder], dict[str, int]]:
        folders: dict[str, Folder] = {}
        files: list[str] = []
        special: list[str] = []
        held = 0
        try:
            status = Path(self.path).stat()
            with os.scandir(self.path) as entries:
                # Sorted, so that the files of equal folders have equal numbers.
                for entry in sorted(entries, key=lambda entry: entry.name):
                    held += 1
                    if is_hidden(entry.name):
                        continue
                    if entry.is_dir():
                        folders[entry.name] = DiskFolder(self.prefix + entry.name, self._listing)
                    elif entry.is_file() or entry.is_symlink():  # A link to nothing is found when it is read.
                        files.append(entry.name)
                    else:
                        special.append(entry.name)
        except OSError as error:
            raise UserError(f"{self.path} cannot be listed: {error.strerror or error}") from error
        if special:
            pipes = f"{len(special):,} pipes, sockets and devices, such as {special[0]}"
            self._listing.notes.append(f"{self.path}: left out {pipes}")
        self._listing.states[self.path] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, held)
        return folders, self._listing.add(self, files)

    @cached_property
    @override
    def folders(self) -> dict[str, Folder]:
        return self._entries[0]

    @cached_property
    @override
    def files(self) -> dict[str, int]:
        return self._entries[1]

    @property
    @override
    def real(self) -> str:
        return os.path.realpath(self.path)


def files_below(folder: Folder) -> dict[str, int]:
    """The numbers of the files in a folder and its subfolders, through links too, each folder once; by sorted path."""
    stack, seen = [folder], set()
    found: dict[str, int] = {}
    while stack:
        here = stack.pop()
        if here.real in seen:
            continue
        seen.add(here.real)
        prefix = here.prefix
        found |= {prefix + name: number for name, number in here.files.items()}
        stack += [here.folders[name] for name in sorted(here.folders)]
    return dict(sorted(found.items()))
