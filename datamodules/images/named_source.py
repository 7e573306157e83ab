"""Makes a data set of named classes, and finds images that are in training and in another part: a leak."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from datamodules.images.labels import check_classes, class_order
from datamodules.images.source import Samples, Source
from datamodules.lightning import rank_zero_only
from datamodules.loading.file_table import FileTable

# Limits of the check: the number of files whose size is read, and the bytes of files of equal size that are read. Both
# take seconds on a local disk.
_MOST_FILES = 100_000
_MOST_BYTES = 2**28


def named_source(
    parts: Mapping[str, tuple[Any, Sequence[str]]],
    title: str,
    where: str,
    expected: str,
    notes: Sequence[str] = (),
    left_out: Mapping[str, int] | None = None,
) -> Source:
    """Make a data set of images with the names of their classes, which are numbered in the order of `class_order`.

    Args:
        parts: images, as in `Samples`, and the class of each, for "train" and optionally "val" and "test".
        title: name of the data set.
        where: beginning of a message, see `check_classes`.
        expected: end of a message.
        notes: remarks for the user.
        left_out: number of files or rows that are not used, by reason.

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
    """Return a key for each file, equal for equal files: size and CRC-32 in a zip archive, the size of other files."""
    checksums = files.checksums()
    if checksums is not None:
        return [tuple(pair) for pair in checksums.tolist()]
    if len(files) > _MOST_FILES:
        return None
    try:
        return [files.stamp(row)[0] for row in range(len(files))]
    except OSError:
        return None


def _digest(files: FileTable, row: int) -> str:
    """Return a hash of the content of a file."""
    return hashlib.blake2b(files.read(row), digest_size=16).hexdigest()


def note_shared_images(parts: Mapping[str, Samples]) -> list[str]:
    """Return a line for each of "val" and "test" that shares files with "train", by their content, on rank 0."""
    train = parts["train"].images
    # Only rank 0 logs the lines, so the other ranks need not read the files.
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
        # An equal size does not prove equal content, unlike an equal CRC-32.
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
        candidates: rows of the other part's files whose size a training file has.
    """
    sizes = {keys[row] for row in candidates}
    train_rows = [row for size in sizes for row in by_key[size]]
    try:
        total_bytes = sum(images.stamp(row)[0] for row in candidates)
        total_bytes += sum(train.stamp(row)[0] for row in train_rows)
        if total_bytes > _MOST_BYTES:
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
        # The loaders report files that cannot be read.
        return {}
