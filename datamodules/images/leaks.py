"""Images that are in two parts of a set: what is scored on them says little."""

import hashlib
from collections.abc import Hashable, Mapping

from lightning.pytorch.utilities import rank_zero_only

from datamodules.images.source import Samples
from datamodules.loading.file_table import FileTable

# Files on disk whose size is looked at, and bytes of those of one size that are read: seconds on a local disk.
_MOST_FILES = 100_000
_MOST_BYTES = 2**28


def _keys(files: FileTable) -> list[Hashable] | None:
    """What equal files have in common: size and CRC-32 of those in an archive, and the size of others."""
    checksums = files.checksums()
    if checksums is not None:
        return [tuple(pair) for pair in checksums.tolist()]
    if len(files) > _MOST_FILES:
        return None
    try:
        return [files.stamp(row)[0] for row in range(len(files))]
    except OSError:
        return None


def _contents(files: FileTable, rows: list[int], hashes: dict[str, int]) -> dict[str, int]:
    """The rows of some files by the hash of their content."""
    for row in rows:
        hashes.setdefault(hashlib.blake2b(files.read(row), digest_size=16).hexdigest(), row)
    return hashes


def note_shared_images(parts: Mapping[str, Samples]) -> list[str]:
    """How many files of "val" and "test" are also in "train", by their content: a line for each part, on rank 0."""
    train = parts["train"].images
    # Rank 0 logs the lines, and the files need not be read by each rank.
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
        keys = _keys(images) if part != "train" and isinstance(images, FileTable) else None
        if keys is None:
            continue
        alike = [row for row, key in enumerate(keys) if key in by_key]
        shared = {row: by_key[keys[row]][0] for row in alike}
        if images.checksums() is None:
            shared = _equal_files(train, images, by_key, keys, alike)
        if shared:
            row, other = next(iter(shared.items()))
            notes.append(
                f"{len(shared):,} images of {part} are also in train, such as {images[row]} and {train[other]}"
            )
    return notes


def _equal_files(
    train: FileTable, images: FileTable, by_key: Mapping[Hashable, list[int]], keys: list[Hashable], alike: list[int]
) -> dict[int, int]:
    """The files with an equal one in training, and which that is; of those whose size a training file has."""
    sizes = {keys[row] for row in alike}
    beside = [row for size in sizes for row in by_key[size]]
    try:
        if sum(images.stamp(row)[0] for row in alike) + sum(train.stamp(row)[0] for row in beside) > _MOST_BYTES:
            return {}
        known = _contents(train, beside, {})
        found = {}
        for row in alike:
            (digest,) = _contents(images, [row], {})
            if digest in known:
                found[row] = known[digest]
        return found
    except OSError:
        # The loaders report what cannot be read.
        return {}
