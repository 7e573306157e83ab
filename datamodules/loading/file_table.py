"""The names of a million files in a few tensors, and what each file holds."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["FileTable"]

_AT_ONCE = 1 << 16  # Names that are decoded together.


class FileTable(Sequence[str]):
    """Files by number: their names, and what they hold.

    The names are the bytes of a tensor, so that forked workers share them: nothing counts references to them. Where
    workers are not forked, torch moves the tensor to shared memory. A million names of 30 letters take 50 MB.

    Args:
        names: of the files; what they begin with in common may be left to `root`.
        root: the beginning of each name, such as a folder with its slash.

    Example:
        >>> table = FileTable(["ant/1.jpg", "bee/1.jpg", "bee/2.jpg"], root="images/")
        >>> table[1], list(table.select(torch.tensor([2, 0])))
        ('images/bee/1.jpg', ['images/bee/2.jpg', 'images/ant/1.jpg'])
    """

    def __init__(self, names: Iterable[str] = (), root: str = "") -> None:
        # No name of a file holds a zero byte.
        joined = bytearray("".join(f"{name}\0" for name in names).encode("utf-8", "surrogateescape"))
        self._root = root
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
        return next(self._names(self._rows[row].view(1)))

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
        return Path(self[row]).read_bytes()

    def stamp(self, row: int) -> tuple[int, int]:
        """The size of a file in bytes and the time of its last change in nanoseconds, as they are now.

        Raises:
            OSError: it is missing.
        """
        status = Path(self[row]).stat()
        return status.st_size, status.st_mtime_ns

    def digest(self) -> str:
        """A hash of the names in their order, for the keys of caches; 64 letters."""
        found = hashlib.sha256()
        for rows in self._rows.split(_AT_ONCE):
            found.update("".join(f"{name}\0" for name in self._names(rows)).encode("utf-8", "surrogateescape"))
        return found.hexdigest()
