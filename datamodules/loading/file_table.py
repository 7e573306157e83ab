"""The names of a million files in a few tensors, and what each file holds."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.loading.archives import Archive

__all__ = ["FileTable"]

_AT_ONCE = 1 << 16  # Names that are decoded together.


def _zero_terminated(names: Iterable[str]) -> bytes:
    """The bytes of names, a zero behind each, which no name of a file holds."""
    return "".join(f"{name}\0" for name in names).encode("utf-8", "surrogateescape")


class FileTable(Sequence[str]):
    """Files by number: their names, and what they hold.

    The names are the bytes of a tensor, so that forked workers share them: nothing counts references to them. Where
    workers are not forked, torch moves the tensor to shared memory. A million names of 30 letters take 50 MB.

    Args:
        names: of the files; what they begin with in common may be left to `root`.
        root: the beginning of each name, such as a folder with its slash.
        archive: that holds files of these names; without one they are on disk.

    Example:
        >>> table = FileTable(["ant/1.jpg", "bee/1.jpg", "bee/2.jpg"], root="images/")
        >>> table[1], list(table.select(torch.tensor([2, 0])))
        ('images/bee/1.jpg', ['images/bee/2.jpg', 'images/ant/1.jpg'])
    """

    def __init__(self, names: Iterable[str] = (), root: str = "", archive: Archive | None = None) -> None:
        joined = bytearray(_zero_terminated(names))
        self._root, self._archive = root, archive
        self._bytes = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        self._ends = (self._bytes == 0).nonzero().flatten()
        self._rows = torch.arange(len(self._ends))

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> "FileTable": ...

    @override
    def __getitem__(self, row: int | slice) -> "str | FileTable":
        """The name of a file, as it is shown to people."""
        if isinstance(row, slice):
            return self.select(torch.arange(len(self))[row])
        place = int(self._rows[row])
        start = int(self._ends[place - 1]) + 1 if place else 0
        name = self._bytes.numpy().data[start : int(self._ends[place])]
        return self._root + str(name, "utf-8", "surrogateescape")

    @override
    def __iter__(self) -> Iterator[str]:
        for rows in self._rows.split(_AT_ONCE):
            yield from self._names(rows)

    def _names(self, places: Tensor) -> Iterator[str]:
        ends = self._ends[places].tolist()
        starts = (self._ends[places - 1] + 1).where(places > 0, 0).tolist()
        text = self._bytes.numpy().data
        for start, end in zip(starts, ends):
            yield self._root + str(text[start:end], "utf-8", "surrogateescape")

    def select(self, rows: Tensor) -> "FileTable":
        """Some of the files, in the order of `rows`, int64 of shape (m,); the names are shared, not copied."""
        return self._with_places(self._rows[rows])

    def _with_places(self, places: Tensor) -> "FileTable":
        chosen = object.__new__(FileTable)
        chosen.__dict__ = {**self.__dict__, "_rows": places}
        return chosen

    def whole(self) -> "FileTable":
        """The table that this one was selected from."""
        return self._with_places(torch.arange(len(self._ends)))

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

    def digest(self) -> str:
        """A hash of the whole table's names and of which of them are taken, for the keys of caches; 64 letters."""
        found = hashlib.sha256(_zero_terminated([self._root]))
        for part in (self._bytes, self._rows):
            found.update(part.numpy().data)
        return found.hexdigest()
