"""What some of a folder's files say about all: the size of the images, and the mean of their pixels."""

from io import BytesIO
from statistics import median

import torch
from PIL import Image

from datamodules.errors import UserError
from datamodules.images.augmentation import centre_square
from datamodules.images.files import ImageFiles
from datamodules.loading.file_table import FileTable
from datamodules.loading.open_image import UnreadableImage

__all__ = ["check_variety", "pixel_statistics", "usual_size"]

_LOOKED_AT = 100
_MEASURED = 1000
_LARGEST = 224
_SMALL = 64


def _evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spaced."""
    return list(range(0, count, -(-count // most)))


def usual_size(files: FileTable) -> int | None:
    """The median of the short sides of some files, rounded up to a multiple of 8; None from 224 pixels on.

    Files that cannot be read are left out; the loaders report them.
    """
    sides = []
    for row in _evenly(len(files), _LOOKED_AT):
        try:
            with Image.open(BytesIO(files.read(row))) as image:
                sides.append(min(image.size))
        except Exception:
            continue
    size = int(median(sides)) if sides else _LARGEST
    # Those of a little less than 224 are photographs that are scaled up a little.
    return None if size >= _LARGEST * 7 / 8 else max(8, -(-size // 8) * 8)


def check_variety(files: FileTable, title: str) -> None:
    """Refuse files whose pixels are all alike: of a hundred, only as many are read as it takes to find two shades.

    Files that cannot be read are left out; the loaders report them.

    Raises:
        UserError: there is one shade.
    """
    images, shades = ImageFiles(files, _SMALL), set[int]()
    for row in _evenly(len(images), _LOOKED_AT):
        try:
            shades.update(images[row].unique().tolist())
        except UnreadableImage:
            continue
        if len(shades) > 1:
            return
    if shades and len(files) > 1:
        raise UserError(
            f"all pixels of {title} are {shades.pop()} of 255, as of {files[0]}; expected images with contents: look at"
            " them, and scale them to 0 to 255 before they are saved with 8 bits"
        )


def pixel_statistics(files: FileTable, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of the pixels, from 0 to 1, of some images, by channel, to 4 digits.

    Args:
        files: those that cannot be read are left out.
        size: of the square in the middle that evaluation sees.
    """
    images = ImageFiles(files, size)
    total = torch.zeros(3, dtype=torch.int64)
    squares, count = total.clone(), 0
    for row in _evenly(len(images), _MEASURED):
        try:
            pixels = centre_square(images[row], size).flatten(1).long()
        except UnreadableImage:
            continue
        total += pixels.sum(1)
        squares += (pixels * pixels).sum(1)
        count += pixels.shape[1]
    mean = total.double() / max(1, count)
    std = (squares.double() / max(1, count) - mean * mean).clamp(min=1).sqrt()
    return tuple((mean / 255).round(decimals=4).tolist()), tuple((std / 255).round(decimals=4).tolist())
