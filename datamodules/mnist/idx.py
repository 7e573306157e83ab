"""MNIST's file format: a header of big-endian sizes, then the bytes (LeCun, Cortes and Burges, 1998)."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.labels import check_labels

__all__ = ["check_images_and_labels", "read_idx"]

_UINT8 = 0x08


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 tensor in an idx or idx.gz file.

    Args:
        dimensions: how many are expected: 1 for labels, 3 for images (n, height, width).

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
    header, magic = 4 + 4 * dimensions, bytes((0, 0, _UINT8, dimensions))
    if len(data) < header or data[:4] != magic:
        raise UserError(
            f"{path} is no idx file of bytes in {dimensions} dimensions: it starts with {data[:4].hex() or 'nothing'}, "
            f"expected {magic.hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    found, expected = len(data) - header, math.prod(shape)
    if found != expected or not expected:
        raise UserError(f"{path} holds {found:,} bytes, and its header says {' x '.join(map(str, shape))}")
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
