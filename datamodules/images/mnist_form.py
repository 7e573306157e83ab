"""Photographs and drawings of digits in MNIST's form: resized, light on dark, and centred."""

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
_READ_AT = 56  # Pixels of the short side: twice MNIST's.


def grey_image(source: str | bytes | Image.Image, name: str = "") -> Tensor:
    """An image of any mode, upright and on white: uint8 of shape (height, width), its short side 56 pixels at most.

    Args:
        source: a file, its content, or an image in memory.
        name: of the image, in messages; by default the file's.

    Raises:
        UnreadableImage: the file is missing, damaged, not an image, or one of more than 8 bits.
    """
    with open_image(source, name or str(source)) as (image, _):
        grey = without_alpha(ImageOps.exif_transpose(image)).convert("L")
    factor = _READ_AT / min(grey.size)
    if factor < 1:
        size = [max(1, round(length * factor)) for length in grey.size]
        grey = grey.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    return torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(grey.height, grey.width)


def _border_of(images: Tensor) -> Tensor:
    """The pixels along the border of images of shape (..., height, width)."""
    return torch.cat((images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]), -1)


def as_mnist(grey: Tensor) -> Tensor:
    """A grey image in MNIST's form: light on dark, the digit 20 pixels high or wide and centred by mass.

    What is light along its border is inverted. An image of 28 x 28 pixels stays as it is otherwise; a smaller one is
    enlarged to 20 pixels.

    Args:
        grey: uint8 of shape (height, width).

    Returns:
        uint8 of shape (28, 28); all 0 where the image has one shade.
    """
    light = grey
    if _border_of(grey).median() > 127:
        # Ink on paper.
        light = 255 - grey
    if light.shape == (_SIDE, _SIDE):
        return light
    if light.max() < light.min() + 16:
        return torch.zeros(_SIDE, _SIDE, dtype=torch.uint8)
    if max(light.shape) < _SIDE:
        digit = _resized(light.float())
        return _on_black(digit, [(_SIDE - length) // 2 for length in digit.shape])
    digit = _resized(_foreground(light.float()))
    digit = digit * (255 / digit.max())
    return _on_black(digit, [_begin(digit.sum(1 - axis)) for axis in (0, 1)])


def _in_mnist_form(images: Sequence[Tensor]) -> Tensor:
    """A set of images in MNIST's form, uint8 of shape (n, 28, 28).

    Where those of 28 x 28 are light on dark, they stay as they are; all others are prepared by `as_mnist`.
    """
    same = [image for image in images if image.shape == (28, 28)]
    # Of the set and not of each image: a bag may touch the border where digits do not.
    ready = bool(same) and bool(_border_of(torch.stack(same)).median() < 128)
    return torch.stack([image if ready and image.shape == (28, 28) else as_mnist(image) for image in images])


def _resized(image: Tensor) -> Tensor:
    """An image whose longer side is 20 pixels."""
    size = [max(1, round(length * 20 / max(image.shape))) for length in image.shape]
    return F.interpolate(image[None, None], size=size, mode="bilinear", antialias=True)[0, 0]


def _on_black(digit: Tensor, corner: Sequence[int]) -> Tensor:
    """A digit on 28 x 28 pixels, its top and left at `corner`."""
    canvas = torch.zeros(_SIDE, _SIDE, dtype=torch.uint8)
    top, left = corner
    height, width = digit.shape
    canvas[top : top + height, left : left + width] = digit.round().to(torch.uint8)
    return canvas


def _foreground(light: Tensor) -> Tensor:
    """What is lighter than its surroundings, from 0 to 1, cut out."""
    window = min(light.shape) // 4 * 2 + 3
    around = F.pad(light[None, None], (window // 2,) * 4, mode="replicate")
    ink = (light - F.avg_pool2d(around, window, stride=1)[0, 0]).clamp(min=0)
    ink = (ink / ink.max() - 0.2).clamp(min=0) / 0.8  # Without the noise of paper.
    rows, columns = ((ink > 0.5).any(1 - axis).nonzero().flatten() for axis in (0, 1))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _begin(along: Tensor) -> int:
    """Where an axis begins whose centre of mass is to be in the middle, as MNIST's are (LeCun et al., 1998)."""
    centre = float((along * torch.arange(len(along))).sum() / along.sum())
    return min(max(0, round(_SIDE / 2 - centre)), _SIDE - len(along))


def read_set(images: Images) -> Tensor:
    """A set of images in MNIST's form, uint8 of shape (n, 28, 28).

    Raises:
        UserError: some cannot be read; the message names five of them.
    """
    if isinstance(images, ArrayImages) and images.pixels.shape[1:] == (_SIDE, _SIDE):
        return _in_mnist_form(list(torch.tensor(images.pixels)))
    found: list[Tensor] = []
    faults: list[str] = []
    for row in range(len(images)):
        try:
            found.append(grey_image(images.read(row), images[row]))
        except (UserError, OSError) as error:
            faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - 5:,} more" * (len(faults) > 5)
        raise UserError(
            f"{len(faults):,} of {len(images):,} images cannot be used: {'; '.join(faults[:5])}{more}; correct or"
            " delete them"
        )
    return _in_mnist_form(found)


class ReadDigits(NamedTuple):
    """Digits to predict."""

    pixels: Tensor
    """uint8 of shape (n, 1, 28, 28), without images that cannot be read or are blank."""
    numbers: Tensor
    """Their places among the images that were given, int64 of shape (n,)."""
    unreadable: dict[int, str]
    """Why others cannot be read, by place."""
    unclear: dict[int, str]
    """What is unclear, by place."""


def read_digits(images: Sequence[str | Image.Image]) -> ReadDigits:
    """Images of a digit each in MNIST's form, as `as_mnist` makes them of files and of images in memory."""
    pixels: dict[int, Tensor] = {}
    unreadable: dict[int, str] = {}
    unclear: dict[int, str] = {}
    for number, image in enumerate(images):
        try:
            digit = as_mnist(grey_image(image))
        except UserError as error:
            unreadable[number] = str(error)
            continue
        if digit.max() < digit.min() + 16:
            unclear[number] = "unclear: the image is blank"
        else:
            pixels[number] = digit.unsqueeze(0)
    found = torch.empty(0, 1, _SIDE, _SIDE, dtype=torch.uint8)
    if pixels:
        found = torch.stack(list(pixels.values()))
    return ReadDigits(found, torch.tensor(list(pixels), dtype=torch.int64), unreadable, unclear)
