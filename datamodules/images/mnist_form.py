"""Converts photographs and drawings of digits to the form of MNIST: 28 x 28 pixels, light on dark, centered."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.decoding import open_image, without_alpha
from datamodules.images.source import ArrayImages, Images

_SIDE = 28
# Short side, in pixels, to which larger images are reduced first: twice that of MNIST.
_READ_AT = 56


def gray_image(source: str | bytes | Image.Image, name: str = "", invert: bool = False) -> Tensor:
    """Load an image of any mode in gray, upright and on white: uint8 (height, width), short side of at most 56 pixels.

    Args:
        source: path of a file, content of a file, or an image in memory.
        name: name of the image, for messages; by default that of the file.
        invert: whether to invert the shades.

    Raises:
        UnreadableImage: the file is missing, damaged, not an image, or has more than 8 bits.
    """
    with open_image(source, name or str(source)) as (image, _):
        gray = without_alpha(ImageOps.exif_transpose(image)).convert("L")
    factor = _READ_AT / min(gray.size)
    if factor < 1:
        size = [max(1, round(length * factor)) for length in gray.size]
        gray = gray.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    pixels = torch.frombuffer(bytearray(gray.tobytes()), dtype=torch.uint8).view(gray.height, gray.width)
    return 255 - pixels if invert else pixels


def border_levels(images: Tensor) -> Tensor:
    """Return the mean brightness of the border of each image, from 0 to 255.

    Args:
        images: uint8 of shape (n, height, width).

    Returns:
        float32 of shape (n,).
    """
    borders = torch.cat((images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]), -1)
    return borders.float().mean(-1)


def _is_blank(image: Tensor) -> bool:
    """Return whether an image has one shade only, or nearly so."""
    return int(image.max()) < int(image.min()) + 16


def as_mnist(light: Tensor) -> Tensor:
    """Convert a gray image, light on dark, to MNIST's form: the digit 20 pixels high or wide and centered by mass.

    An image of 28 x 28 pixels stays as it is. A smaller one is enlarged to 20 pixels.

    Args:
        light: uint8 of shape (height, width).

    Returns:
        uint8 of shape (28, 28); all 0 if a larger or smaller image has one shade only.
    """
    if light.shape == (_SIDE, _SIDE):
        return light
    if _is_blank(light):
        return torch.zeros(_SIDE, _SIDE, dtype=torch.uint8)
    if max(light.shape) < _SIDE:
        digit = _resized(light.float())
        return _on_black(digit, [(_SIDE - length) // 2 for length in digit.shape])
    digit = _resized(_foreground(light.float()))
    digit = digit * (255 / digit.max())
    return _on_black(digit, [_begin(digit.sum(1 - axis)) for axis in (0, 1)])


def _resized(image: Tensor) -> Tensor:
    """Resize an image to a longer side of 20 pixels."""
    size = [max(1, round(length * 20 / max(image.shape))) for length in image.shape]
    return F.interpolate(image[None, None], size=size, mode="bilinear", antialias=True)[0, 0]


def _on_black(digit: Tensor, corner: Sequence[int]) -> Tensor:
    """Place a digit on 28 x 28 black pixels, with its top and left at `corner`."""
    canvas = torch.zeros(_SIDE, _SIDE, dtype=torch.uint8)
    top, left = corner
    height, width = digit.shape
    canvas[top : top + height, left : left + width] = digit.round().to(torch.uint8)
    return canvas


def _foreground(light: Tensor) -> Tensor:
    """Crop an image to the strokes that are lighter than their surroundings, with values from 0 to 1."""
    # An odd window, so that the average has the size of the image.
    window = min(light.shape) // 4 * 2 + 3
    around = F.pad(light[None, None], (window // 2,) * 4, mode="replicate")
    ink = (light - F.avg_pool2d(around, window, stride=1)[0, 0]).clamp(min=0)
    # The threshold removes the texture of paper.
    ink = (ink / ink.max() - 0.2).clamp(min=0) / 0.8
    rows = (ink > 0.5).any(1).nonzero().flatten()
    columns = (ink > 0.5).any(0).nonzero().flatten()
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _begin(along: Tensor) -> int:
    """Return the start of a digit along an axis, with its centre of mass at 14 as in MNIST (LeCun et al., 1998)."""
    centre = float((along * torch.arange(len(along))).sum() / along.sum())
    return min(max(0, round(_SIDE / 2 - centre)), _SIDE - len(along))


class ReadSet(NamedTuple):
    """Data set of images in MNIST's form."""

    images: Tensor
    """uint8 of shape (n, 28, 28)."""
    borders: Tensor
    """Brightness of the border of each image before it was converted, see `border_levels`."""


def read_set(images: Images, invert: bool) -> ReadSet:
    """Read a data set of images, and convert them by `as_mnist`.

    Args:
        images: the images.
        invert: whether they are dark on light, and are inverted.

    Raises:
        UserError: some images cannot be read; the message names five of them.
    """
    if isinstance(images, ArrayImages) and images.pixels.shape[1:] == (_SIDE, _SIDE):
        pixels = torch.tensor(images.pixels)
        pixels = 255 - pixels if invert else pixels
        return ReadSet(pixels, border_levels(pixels))
    converted: list[Tensor] = []
    borders: list[Tensor] = []
    faults: list[str] = []
    for row in range(len(images)):
        try:
            gray = gray_image(images.read(row), images[row], invert)
        except (UserError, OSError) as error:
            faults.append(str(error))
            continue
        converted.append(as_mnist(gray))
        borders.append(border_levels(gray[None]))
    if faults:
        more = f"; and {len(faults) - 5:,} more" * (len(faults) > 5)
        raise UserError(
            f"{len(faults):,} of {len(images):,} images cannot be used: {'; '.join(faults[:5])}{more}; correct or"
            " delete them"
        )
    return ReadSet(torch.stack(converted), torch.cat(borders))


class ReadDigits(NamedTuple):
    """Digits to predict, and remarks on images that have no prediction."""

    pixels: Tensor
    """Images, uint8 of shape (n, 1, 28, 28), without those that cannot be read or are blank."""
    numbers: Tensor
    """Index of each image in the input, int64 of shape (n,)."""
    borders: Tensor
    """Brightness of the border of each image before it was converted, float32 of shape (n,)."""
    unreadable: dict[int, str]
    """Reasons why images cannot be read, by index."""
    unclear: dict[int, str]
    """Remarks on doubtful images, by index."""


def read_digits(images: Sequence[str | Image.Image], invert: bool = False) -> ReadDigits:
    """Read images of one digit each, from files or from memory, and convert them by `as_mnist`.

    Args:
        images: files or images.
        invert: whether they are dark on light, and are inverted.
    """
    pixels: dict[int, Tensor] = {}
    borders: list[Tensor] = []
    unreadable: dict[int, str] = {}
    unclear: dict[int, str] = {}
    for number, image in enumerate(images):
        try:
            gray = gray_image(image, invert=invert)
        except UserError as error:
            unreadable[number] = str(error)
            continue
        digit = as_mnist(gray)
        if _is_blank(digit):
            unclear[number] = "unclear: the image is blank"
        else:
            pixels[number] = digit.unsqueeze(0)
            borders.append(border_levels(gray[None]))
    digits = torch.empty(0, 1, _SIDE, _SIDE, dtype=torch.uint8)
    if pixels:
        digits = torch.stack(list(pixels.values()))
    levels = torch.cat(borders) if borders else torch.empty(0)
    return ReadDigits(digits, torch.tensor(list(pixels), dtype=torch.int64), levels, unreadable, unclear)
