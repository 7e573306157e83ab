"""A data set of images, wherever it comes from: its samples by part, how each is read, and of which class it is.

`from_folder`, `from_table`, `from_arrays` and `from_idx` make one. What reads, crops and augments asks a source for the
names and the contents of its samples, and for nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

from datamodules.loading.randomness import permutation

PARTS = ("train", "val", "test")


class Images(Protocol):
    """Images by number: what each is called, and its content, which is decoded elsewhere."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> str:
        """The name of an image, as it is shown to people."""

    def read(self, row: int) -> Any:
        """A file, the content of one, or an image of PIL.

        Raises:
            OSError: it cannot be read.
        """


class ArrayImages(Sequence[str]):
    """Images in memory by number.

    Args:
        pixels: bytes of shape (n, height, width), or (n, height, width, channels) with 3 or 4 channels.
        called: what they are, for messages, such as "the train images".
    """

    def __init__(self, pixels: npt.NDArray[np.uint8], called: str) -> None:
        self.pixels = pixels
        self.called = called

    @override
    def __len__(self) -> int:
        return len(self.pixels)

    @override
    def __getitem__(self, row: Any) -> Any:
        return f"row {row} of {self.called}"

    def read(self, row: int) -> Image.Image:
        """One of the images."""
        return Image.fromarray(np.ascontiguousarray(self.pixels[row]))

    def select(self, rows: Tensor) -> "ArrayImages":
        """Some of the images, in the order of `rows`, int64 of shape (m,)."""
        return ArrayImages(self.pixels[rows.numpy()], self.called)


class BytesImages(Sequence[str]):
    """Files whose contents lie in memory, such as those in a table.

    Args:
        contents: by name.
        names: of those that are meant, in their order.
    """

    def __init__(self, contents: Mapping[str, bytes], names: Sequence[str]) -> None:
        self._contents = contents
        self._names = names

    @override
    def __len__(self) -> int:
        return len(self._names)

    @override
    def __getitem__(self, row: Any) -> Any:
        return self._names[row]

    def read(self, row: int) -> bytes:
        """What one of the files holds."""
        return self._contents[self._names[row]]

    def select(self, rows: Tensor) -> "BytesImages":
        """Some of the files, in the order of `rows`, int64 of shape (m,)."""
        return BytesImages(self._contents, [self._names[row] for row in rows.tolist()])


class Samples(NamedTuple):
    """The samples of a part."""

    images: Any
    """`Images` of which some can be selected: a `FileTable`, `ArrayImages` or `BytesImages`."""
    labels: Tensor
    """The classes' numbers, int64 of shape (n,)."""


@dataclass(frozen=True)
class Source:
    """A data set of images.

    Attributes:
        classes: names of the classes, in the order of their numbers.
        parts: the samples of "train", and of "val" and "test" where the set has them.
        title: what the set is called.
        notes: remarks for the user, a line each.
        left_out: how many files or rows are not used, by reason.
        labels_from: by part, what its labels are called in messages, where that is not "the PART labels".
    """

    classes: tuple[str, ...]
    parts: Mapping[str, Samples]
    title: str = ""
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    labels_from: Mapping[str, str] = field(default_factory=dict)


class PartsOnDemand(Mapping[str, Samples]):
    """Parts that lie in files of their own: one is read when it is first asked for."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Samples]) -> None:
        self._names = names
        self._read = read
        self._samples: dict[str, Samples] = {}

    @override
    def __getitem__(self, part: str) -> Samples:
        if part not in self._names:
            raise KeyError(part)
        if part not in self._samples:
            self._samples[part] = self._read(part)
        return self._samples[part]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


def split_by_class(
    targets: Tensor, classes: Sequence[str], fractions: Mapping[str, float], seed: int
) -> dict[str, Tensor]:
    """Sorted sample numbers of "train" and of each part in `fractions`, which takes its share of every class.

    A function of the seed, the classes' names and the order of their samples. A class with two samples or more is in
    each part, as far as they suffice; training keeps one at least.

    Args:
        targets: the classes' numbers, int64 of shape (n,).

    Returns:
        int64 of shape (samples,) by part.
    """
    parts: dict[str, list[Tensor]] = {"train": []}
    for part in fractions:
        parts[part] = []
    numbers, counts = targets.unique(return_counts=True)
    for number, rows in zip(numbers.tolist(), targets.argsort(stable=True).split(counts.tolist())):
        # Each class has an order of its own, so that another class changes nothing in it.
        order = rows[permutation(len(rows), seed, f"split {classes[number]}")]
        for part, fraction in fractions.items():
            wanted = max(round(len(rows) * fraction), 1) if fraction else 0
            held_out = min(wanted, len(order) - 1)
            parts[part].append(order[:held_out])
            order = order[held_out:]
        parts["train"].append(order)
    return {part: torch.cat(rows).sort().values for part, rows in parts.items()}
