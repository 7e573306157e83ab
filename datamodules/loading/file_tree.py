"""The folders and files below a folder: on disk, or in an archive."""

import os
from pathlib import Path

from datamodules.errors import UserError
from datamodules.loading.archives import list_archive
from datamodules.loading.file_table import FileTable

__all__ = ["Folder", "files_below", "list_folder", "open_archive"]


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
