"""MNIST's file format: a header of big-endian sizes, then the bytes (LeCun, Cortes and Burges, 1998)."""

import gzip
import math
import string
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.labels import check_labels

__all__ = ["EMNIST", "check_images_and_labels", "file_names", "files_in", "read_idx", "read_part"]

_UINT8, _INT32 = 0x08, 0x0C
_MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
EMNIST = {
    "emnist-balanced": _MERGED,
    "emnist-bymerge": _MERGED,
    "emnist-byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "emnist-letters": string.ascii_lowercase,
    "emnist-digits": string.digits,
    "emnist-mnist": string.digits,
}
"""The classes of EMNIST's sets (Cohen et al., 2017)."""


def file_names(name: str) -> dict[str, tuple[str, str]]:
    """The published names of a set's images and labels, by part, without .gz."""
    if name in EMNIST or name == "qmnist":
        labels = "labels-idx2-int" if name == "qmnist" else "labels-idx1-ubyte"
        return {part: (f"{name}-{part}-images-idx3-ubyte", f"{name}-{part}-{labels}") for part in ("train", "test")}
    prefixes = {"train": "train", "test": "t10k"}
    return {part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte") for part, stem in prefixes.items()}


def files_in(folder: Path, name: str) -> dict[str, Path]:
    """Those of a set's four files that a folder holds, by published name; as packed, and as Kaggle names them, too."""
    found: dict[str, Path] = {}
    for stem in (stem for pair in file_names(name).values() for stem in pair):
        dotted = stem.replace("-idx", ".idx")
        places = (f"{stem}.gz", stem, f"{dotted}.gz", dotted, f"{stem}/{stem}", f"{stem}/{dotted}")
        if file := next((folder / place for place in places if (folder / place).is_file()), None):
            found[stem] = file
    return found


def read_part(name: str, images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    """A part of a set as the set means it: images upright, uint8 of shape (n, height, width), and labels from 0.

    EMNIST writes columns for rows, and counts letters from 1. The first of QMNIST's eight columns is the class.

    Returns:
        The images, and labels of shape (n,).

    Raises:
        UserError: see `read_idx`.
    """
    pixels = read_idx(images, 3)
    if name == "qmnist":
        return pixels, read_idx(labels, 2)[:, 0]
    numbers = read_idx(labels, 1)
    if name in EMNIST:
        pixels = pixels.transpose(1, 2).contiguous()
    return pixels, numbers.long() - 1 if name == "emnist-letters" else numbers


def read_idx(path: Path, dimensions: int) -> Tensor:
    """What is in an idx or idx.gz file.

    Args:
        dimensions: how many are expected: 1 for labels, 2 for rows of whole numbers, 3 for images (n, height, width).

    Returns:
        uint8; int64 of shape (n, columns) for 2 dimensions, which are of 32 bits in the file.

    Raises:
        UserError: the file is damaged, cut short, too long or of another kind.
    """
    try:
        content = path.read_bytes()
        # A bytearray, since torch warns of memory that it may not write.
        data = bytearray(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}; delete it and run again to download it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    kind, size = (_INT32, 4) if dimensions == 2 else (_UINT8, 1)
    header, magic = 4 + 4 * dimensions, bytes((0, 0, kind, dimensions))
    if len(data) < header or data[:4] != magic:
        raise UserError(
            f"{path} is no idx file of {'whole numbers' if size == 4 else 'bytes'} in {dimensions} dimensions: it "
            f"starts with {data[:4].hex() or 'nothing'}, expected {magic.hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    found, expected = len(data) - header, size * math.prod(shape)
    if found != expected or not expected:
        raise UserError(f"{path} holds {found:,} bytes, and its header says {' x '.join(map(str, shape))}")
    if size == 4:
        return torch.from_numpy(np.frombuffer(data, ">i4", offset=header).astype(np.int64)).reshape(shape)
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).reshape(shape)


def check_images_and_labels(
    images: Tensor, labels: Tensor, num_classes: int, images_from: str, labels_from: str, image_size: int = 28
) -> None:
    """Check images and labels before training.

    Args:
        images: uint8 of shape (n, height, width).
        labels: uint8 of shape (n,).

    Raises:
        UserError: with the file, the row and the reason.
    """
    if len(images) != len(labels):
        raise UserError(f"{images_from} holds {len(images):,} images and {labels_from} {len(labels):,} labels")
    if tuple(images.shape[1:]) != (image_size, image_size):
        height, width = images.shape[1:]
        raise UserError(f"{images_from} holds images of {height} x {width}, expected {image_size} x {image_size}")
    # As int64: uint8 wraps the number it is compared with, and 256 classes would be none.
    check_labels(labels.long(), num_classes, labels_from)
