"""Converts photographs and drawings of digits to the form of MNIST: 28 x 28 pixels, light on dark, centred."""

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


def grey_image(source: str | bytes | Image.Image, name: str = "") -> Tensor:
    """Load an image of any mode in grey, upright and on white: uint8 (height, width), short side of at most 56 pixels.

    Args:
        source: path of a file, content of a file, or an image in memory.
        name: name of the image, for messages; by default that of the file.

    Raises:
        UnreadableImage: the file is missing, damaged, not an image, or has more than 8 bits.
    """
    with open_image(source, name or str(source)) as (image, _):
        grey = without_alpha(ImageOps.exif_transpose(image)).convert("L")
    factor = _READ_AT / min(grey.size)
    if factor < 1:
        size = [max(1, round(length * factor)) for length in grey.size]
        grey = grey.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    return torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(grey.height, grey.width)


def _border_of(images: Tensor) -> Tensor:
    """Return the pixels along the border of images of shape (..., height, width), in one dimension."""
    return torch.cat((images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]), -1)


def as_mnist(grey: Tensor) -> Tensor:
    """Convert a grey image to MNIST's form: light on dark, the digit 20 pixels high or wide and centred by mass.

    An image with a light border is inverted. Apart from that, an image of 28 x 28 pixels stays as it is. A smaller one
    is enlarged to 20 pixels.

    Args:
        grey: uint8 of shape (height, width).

    Returns:
        uint8 of shape (28, 28); all 0 if the image has one shade only.
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
    """Convert a data set of images to MNIST's form, uint8 of shape (n, 28, 28).

    Images of 28 x 28 pixels stay as they are if most of them are light on dark. `as_mnist` converts all others.
    """
    mnist_sized = [image for image in images if image.shape == (_SIDE, _SIDE)]
    # One decision for the whole set: unlike a digit, an image such as a bag of Fashion-MNIST may touch the border.
    keep = bool(mnist_sized) and bool(_border_of(torch.stack(mnist_sized)).median() < 128)
    converted = []
    for image in images:
        if keep and image.shape == (_SIDE, _SIDE):
            converted.append(image)
        else:
            converted.append(as_mnist(image))
    return torch.stack(converted)


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


def read_set(images: Images) -> Tensor:
    """Read a data set of images in MNIST's form, uint8 of shape (n, 28, 28).

    Raises:
        UserError: some images cannot be read; the message names five of them.
    """
    if isinstance(images, ArrayImages) and images.pixels.shape[1:] == (_SIDE, _SIDE):
        return _in_mnist_form(list(torch.tensor(images.pixels)))
    grey_images: list[Tensor] = []
    faults: list[str] = []
    for row in range(len(images)):
        try:
            grey_images.append(grey_image(images.read(row), images[row]))
        except (UserError, OSError) as error:
            faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - 5:,} more" * (len(faults) > 5)
        raise UserError(
            f"{len(faults):,} of {len(images):,} images cannot be used: {'; '.join(faults[:5])}{more}; correct or"
            " delete them"
        )
    return _in_mnist_form(grey_images)


class ReadDigits(NamedTuple):
    """Digits to predict, and remarks on images that have no prediction."""

    pixels: Tensor
    """Images, uint8 of shape (n, 1, 28, 28), without those that cannot be read or are blank."""
    numbers: Tensor
    """Index of each image in the input, int64 of shape (n,)."""
    unreadable: dict[int, str]
    """Reasons why images cannot be read, by index."""
    unclear: dict[int, str]
    """Remarks on doubtful images, by index."""


def read_digits(images: Sequence[str | Image.Image]) -> ReadDigits:
    """Read images of one digit each, from files or from memory, and convert them by `as_mnist`."""
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
    digits = torch.empty(0, 1, _SIDE, _SIDE, dtype=torch.uint8)
    if pixels:
        digits = torch.stack(list(pixels.values()))
    return ReadDigits(digits, torch.tensor(list(pixels), dtype=torch.int64), unreadable, unclear)
