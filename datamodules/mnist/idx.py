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
from datamodules.loading.unpacking import refusal, unpacked_limit

__all__ = ["check_images_and_labels", "read_idx"]

_UINT8 = 0x08
_ALWAYS = 1 << 28  # Bytes that a compressed file of any size may unpack to: labels in order compress a thousandfold.
_RATIO = 100


def _content(path: Path, header: int, always: int) -> tuple[bytearray, int | None]:
    """The bytes of a file, and how many its header says; of a compressed one no more than the header says.

    A bytearray, since torch warns of memory that it may not write.

    Raises:
        UserError: the header says more than a compressed file of this size may unpack to.
    """
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            return bytearray(file.read()), None
        file.seek(0)
        packed, stream = path.stat().st_size, gzip.GzipFile(fileobj=file)
        data = bytearray(stream.read(header))
        if len(data) < header or data[:4] != bytes((0, 0, _UINT8, header // 4 - 1)):
            return data, None
        expected = math.prod(struct.unpack(f">{header // 4 - 1}I", data[4:]))
        if expected > (limit := unpacked_limit(packed, expected, always, _RATIO)):
            raise refusal(path, packed, f"{expected:,} by its header", limit)
        data += stream.read(expected + 1)
        return data, expected


def read_idx(path: Path, dimensions: int, always: int = _ALWAYS) -> Tensor:
    """The uint8 tensor in an idx or idx.gz file.

    Args:
        dimensions: how many are expected: 1 for labels, 3 for images (n, height, width).
        always: bytes that a compressed file of any size may unpack to; a larger one to 100 times its size.

    Raises:
        UserError: the file is damaged, cut short, too long, of another kind, or unpacks to too much.
    """
    header = 4 + 4 * dimensions
    try:
        data, announced = _content(path, header, always)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}; delete it and run again to download it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    kinds = {1: "labels", 3: "images"}
    if len(data) > 3 and data[:3] == bytes((0, 0, _UINT8)) and data[3] != dimensions and data[3] in kinds:
        raise UserError(f"{path} holds {kinds[data[3]]}, expected {kinds[dimensions]}; are two files swapped?")
    if len(data) < header or data[:2] != b"\0\0" or data[2] != _UINT8 or data[3] != dimensions:
        raise UserError(
            f"{path} is no idx file of bytes in {dimensions} dimensions: it starts with {data[:4].hex() or 'nothing'}, "
            f"expected 000008{dimensions:02x}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    row = math.prod(shape[1:])
    found, expected = len(data) - header, shape[0] * row
    if found != expected:
        where = f"it ends in row {found // max(1, row)}" if found < expected else "there is more after the last row"
        more = " or more" if announced is not None and found > expected else ""
        raise UserError(
            f"{path} has a header of {shape[0]:,} rows of {row:,} bytes, {expected:,} in all; found {found:,}{more}:"
            f" {where}"
        )
    if expected == 0:
        raise UserError(f"{path} is empty: its header says {' x '.join(map(str, shape))}")
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
