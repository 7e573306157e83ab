"""The class `Source`, a data set of images: the samples of each part, and the classes.

`from_folder`, `from_tables`, `from_arrays` and `from_idx` return a `Source`. Decoding, crops and augmentation use only
the names and contents of its samples.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

from datamodules.images.labels import check_classes, class_order
from datamodules.lightning import rank_zero_only
from datamodules.loading.file_table import FileTable, Folder
from datamodules.loading.randomness import permutation
from datamodules.loading.sampling import split_indices

# Limits of the check for images that training shares with another part: the number of files whose size is read, and
# the bytes read from files of equal size. Both take seconds on a local disk.
_MAX_FILES = 100_000
_MAX_BYTES = 2**28

PARTS = ("train", "val", "test")
PART_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Part of each recognized folder name, in any case."""
PART_WORDS = {**PART_FOLDERS, "training": "train", "dev": "val", "testing": "test"}
"""Part of each word that ``{split}`` in a layout matches, and that a cell of a column "split" may hold."""


def part_folders(folder: Folder) -> list[Folder]:
    """Return the folders of the parts; an empty list if `folder` holds the classes."""
    return [inner for inner in folder.folders.values() if inner.name.lower() in PART_FOLDERS and inner.folders]


class Images(Protocol):
    """Interface of a sequence of images, each with a name and an undecoded content."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> str:
        """Return the name of an image, for messages."""

    def read(self, row: int) -> Any:
        """Return the path of an image, the content of its file, or a PIL image.

        Raises:
            OSError: the image cannot be read.
        """


class ArrayImages(Sequence[str]):
    """Sequence of the names of images in memory; `read` returns an image.

    Args:
        pixels: uint8 of shape (n, height, width), or (n, height, width, channels) with 3 or 4 channels.
        called: name of the set of images, for messages, such as "the train images".
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
    """Sequence of the names of files whose contents are in memory, as from a Parquet table.

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
        left_out: number of unused files or rows, by reason.
        labels_from: name of the labels of a part in messages; by default "the PART labels".
    """

    classes: tuple[str, ...]
    parts: Mapping[str, Samples]
    title: str = ""
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    labels_from: Mapping[str, str] = field(default_factory=dict)


class PartsOnDemand(Mapping[str, Samples]):
    """Mapping that reads a part on first access, for data sets with separate files for each part."""

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
    """Split samples into "train" and the parts in `fractions`, with the same share of every class.

    The split is a function of the seed, the names of the classes and the order of their samples. Each part gets at
    least one sample of each class, as long as there are enough. Training keeps at least one sample of each class.

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
        # The order of a class is drawn by its name, so another class does not change it.
        order = rows[permutation(len(rows), seed, f"split {classes[number]}")]
        for part, fraction in fractions.items():
            count = max(round(len(rows) * fraction), 1) if fraction else 0
            held_out = min(count, len(order) - 1)
            parts[part].append(order[:held_out])
            order = order[held_out:]
        parts["train"].append(order)
    return {part: torch.cat(rows).sort().values for part, rows in parts.items()}


def held_out(
    labels: Tensor, classes: Sequence[str], fractions: Mapping[str, float], seed: int, by_class: bool
) -> dict[str, Tensor]:
    """Split the training part of a data set, and return the sample numbers of "train" and of each held-out part.

    Args:
        labels: class numbers, int64 of shape (n,).
        classes: names of the classes.
        fractions: share of each part that the data set lacks.
        seed: seed of the split.
        by_class: whether a part is a share of each class, see `split_by_class`; otherwise "val" is a share of all
            samples.

    Returns:
        Sorted sample numbers of each part, int64 of shape (samples,).
    """
    shares = {part: share for part, share in fractions.items() if share}
    if by_class:
        return split_by_class(labels.cpu(), classes, shares, seed)
    # At least one sample, even if the share rounds to 0.
    count = max(round(len(labels) * shares["val"]), 1) if "val" in shares else 0
    train, val = split_indices(len(labels), count, seed)
    return {"train": train, "val": val}


def named_source(
    parts: Mapping[str, tuple[Any, Sequence[str]]],
    title: str,
    where: str,
    expected: str,
    notes: Sequence[str] = (),
    left_out: Mapping[str, int] | None = None,
) -> Source:
    """Make a data set from images and their class names, which are numbered in the order of `class_order`.

    Args:
        parts: images, as in `Samples`, and the class name of each, for "train" and optionally "val" and "test".
        title: name of the data set.
        where: beginning of a message, see `check_classes`.
        expected: end of a message, see `check_classes`.
        notes: remarks for the user.
        left_out: number of unused files or rows, by reason.

    Raises:
        UserError: see `check_classes`.
    """
    by_part = {part: class_order(names) for part, (_, names) in parts.items()}
    class_notes = check_classes({"train": (), **by_part}, where, expected)
    numbers = {name: number for number, name in enumerate(by_part["train"])}
    samples = {}
    for part, (images, names) in parts.items():
        samples[part] = Samples(images, torch.tensor([numbers[name] for name in names]))
    all_notes = [*notes, *class_notes, *note_shared_images(samples)]
    return Source(by_part["train"], samples, title, all_notes, dict(left_out or {}))


def _keys(files: FileTable) -> list[Hashable] | None:
    """Return a key for each file, equal for equal files: size and CRC-32 in a zip archive, otherwise the size."""
    checksums = files.checksums()
    if checksums is not None:
        return [tuple(pair) for pair in checksums.tolist()]
    if len(files) > _MAX_FILES:
        return None
    try:
        return [files.stamp(row)[0] for row in range(len(files))]
    except OSError:
        return None


def _digest(files: FileTable, row: int) -> str:
    """Return a hash of the content of a file."""
    return hashlib.blake2b(files.read(row), digest_size=16).hexdigest()


def note_shared_images(parts: Mapping[str, Samples]) -> list[str]:
    """Return a line for each part that shares files with "train", compared by content, on rank 0."""
    train = parts["train"].images
    # Only rank 0 logs the lines, so only rank 0 reads the files.
    is_rank_zero = getattr(rank_zero_only, "rank", 0) == 0
    if len(parts) < 2 or not isinstance(train, FileTable) or not is_rank_zero:
        return []
    train_keys = _keys(train)
    if train_keys is None:
        return []
    by_key: dict[Hashable, list[int]] = {}
    for row, key in enumerate(train_keys):
        by_key.setdefault(key, []).append(row)
    notes = []
    for part, (images, _) in parts.items():
        if part == "train" or not isinstance(images, FileTable):
            continue
        keys = _keys(images)
        if keys is None:
            continue
        candidates = [row for row, key in enumerate(keys) if key in by_key]
        shared = {row: by_key[keys[row]][0] for row in candidates}
        # An equal size proves nothing; an equal size with an equal CRC-32 is taken as proof.
        if images.checksums() is None:
            shared = _equal_files(train, images, by_key, keys, candidates)
        if shared:
            row, train_row = next(iter(shared.items()))
            shared_images = f"{len(shared):,} images of {part} are" if len(shared) > 1 else f"1 image of {part} is"
            notes.append(f"{shared_images} also in train, such as {images[row]} and {train[train_row]}")
    return notes


def _equal_files(
    train: FileTable,
    images: FileTable,
    by_key: Mapping[Hashable, list[int]],
    keys: list[Hashable],
    candidates: list[int],
) -> dict[int, int]:
    """Return the row of an equal training file for each candidate that has one, by the candidate's row.

    Args:
        train: training files.
        images: files of another part.
        by_key: rows of the training files by size.
        keys: sizes of the files of the other part.
        candidates: rows of the other part with the size of a training file.
    """
    sizes = {keys[row] for row in candidates}
    train_rows = [row for size in sizes for row in by_key[size]]
    try:
        total_bytes = sum(images.stamp(row)[0] for row in candidates)
        total_bytes += sum(train.stamp(row)[0] for row in train_rows)
        if total_bytes > _MAX_BYTES:
            return {}
        by_digest: dict[str, int] = {}
        for row in train_rows:
            by_digest.setdefault(_digest(train, row), row)
        equal = {}
        for row in candidates:
            digest = _digest(images, row)
            if digest in by_digest:
                equal[row] = by_digest[digest]
        return equal
    except OSError:
        # The loaders report unreadable files.
        return {}
