"""Defines `Source`, a data set of images: samples of each part, classes, and how an image is read.

`from_folder`, `from_tables`, `from_arrays` and `from_idx` return a `Source`. The code that decodes, crops and augments
uses only the names and contents of its samples.
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
PART_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Part of each folder name that is recognized, in any case."""
PART_WORDS = {**PART_FOLDERS, "training": "train", "dev": "val", "testing": "test"}
"""Part of each word that a declared ``{split}`` stands for, and that a cell of a column "split" may hold."""


class Images(Protocol):
    """Interface of images by index, with a name and an undecoded content each."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> str:
        """Return the name of an image, as it is written in messages."""

    def read(self, row: int) -> Any:
        """Return the path of an image, the content of its file, or a PIL image.

        Raises:
            OSError: the image cannot be read.
        """


class ArrayImages(Sequence[str]):
    """Sequence of the names of images in memory, which reads an image by its index.

    Args:
        pixels: uint8 of shape (n, height, width), or (n, height, width, channels) with 3 or 4 channels.
        called: name of the images, for messages, such as "the train images".
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
        """Return an image."""
        return Image.fromarray(np.ascontiguousarray(self.pixels[row]))

    def select(self, rows: Tensor) -> "ArrayImages":
        """Return the images at `rows`, int64 of shape (m,), in this order."""
        return ArrayImages(self.pixels[rows.numpy()], self.called)


class BytesImages(Sequence[str]):
    """Sequence of the names of files whose contents are in memory, as in a Parquet table.

    Args:
        contents: content of each file, by name.
        names: names of the files of this sequence, in order.
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
        """Return the content of a file."""
        return self._contents[self._names[row]]

    def select(self, rows: Tensor) -> "BytesImages":
        """Return the files at `rows`, int64 of shape (m,), in this order."""
        return BytesImages(self._contents, [self._names[row] for row in rows.tolist()])


class Samples(NamedTuple):
    """Samples of a part."""

    images: Any
    """`Images` with a method `select`: a `FileTable`, `ArrayImages` or `BytesImages`."""
    labels: Tensor
    """Class numbers, int64 of shape (n,)."""


@dataclass(frozen=True)
class Source:
    """Data set of images.

    Attributes:
        classes: names of the classes, in the order of their numbers.
        parts: samples of "train", and of "val" and "test" if the data set has them.
        title: name of the data set.
        notes: remarks for the user, one line each.
        left_out: number of files or rows that are not used, by reason.
        labels_from: name of the labels of each part in messages, if it is not "the PART labels".
    """

    classes: tuple[str, ...]
    parts: Mapping[str, Samples]
    title: str = ""
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    labels_from: Mapping[str, str] = field(default_factory=dict)


class PartsOnDemand(Mapping[str, Samples]):
    """Mapping of parts that reads a part on first access, for data sets with files of their own for each part."""

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
    """Split samples into "train" and the parts in `fractions`, each with its share of every class.

    The split is a function of the seed, the names of the classes and the order of their samples. A class with several
    samples is in each part as far as they suffice. Training keeps at least one sample of each class.

    Args:
        targets: class numbers, int64 of shape (n,).
        classes: names of the classes.
        fractions: share of each held-out part.
        seed: seed of the split.

    Returns:
        Sorted sample numbers of each part, int64 of shape (samples,).
    """
    parts: dict[str, list[Tensor]] = {"train": []}
    for part in fractions:
        parts[part] = []
    numbers, counts = targets.unique(return_counts=True)
    for number, rows in zip(numbers.tolist(), targets.argsort(stable=True).split(counts.tolist())):
        # The order is drawn for each class by its name, so that adding a class changes no other class.
        order = rows[permutation(len(rows), seed, f"split {classes[number]}")]
        for part, fraction in fractions.items():
            count = max(round(len(rows) * fraction), 1) if fraction else 0
            held_out = min(count, len(order) - 1)
            parts[part].append(order[:held_out])
            order = order[held_out:]
        parts["train"].append(order)
    return {part: torch.cat(rows).sort().values for part, rows in parts.items()}
