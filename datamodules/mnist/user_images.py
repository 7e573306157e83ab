"""Photographs and drawings of digits in MNIST's form."""

import struct
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.heic import prepare_to_read
from datamodules.loading.unpacking import check_pixels

__all__ = ["as_mnist", "load_images", "open_image"]

_MOST_PIXELS = 50_000_000  # A photograph of a telephone; in float32, several times, half a gibibyte.


def as_mnist(image: Image.Image) -> Tensor:
    """An image of one digit prepared as MNIST's are: light on dark, 20 pixels high or wide, centred by mass.

    An image of 28 x 28 that is light on dark is taken to be prepared already. Otherwise the median of
    the border is the background; what differs from it is cropped, scaled to fit 20 x 20 and put with its centre of mass
    in the middle of 28 x 28 (LeCun, Cortes and Burges, 1998).

    Args:
        image: any size and mode; transparency counts as background.

    Returns:
        uint8 of shape (1, 28, 28).
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow clips 16 bits to 255 instead of scaling them.
        image = image.convert("F").point(lambda value: value * (1 / 257) + 0)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        # On white unless the opaque part is itself light.
        opaque = torch.frombuffer(bytearray(rgba.convert("L").tobytes()), dtype=torch.uint8)
        alpha = torch.frombuffer(bytearray(rgba.getchannel("A").tobytes()), dtype=torch.uint8)
        ink = opaque[alpha > 127].float()
        background = 0 if len(ink) and ink.mean() > 127 else 255
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (background,) * 3 + (255,)), rgba)
    grey = image.convert("L")
    pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).reshape(grey.height, grey.width).float()
    border = torch.cat((pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])).median()
    if pixels.shape == (28, 28) and border < 64:
        return pixels.to(torch.uint8).unsqueeze(0)
    ink = (pixels - border).abs()
    # Paper is never even: what is within a fifth of the strongest contrast of the border is background.
    strongest = ink.max()
    if strongest < 16:
        return torch.zeros(1, 28, 28, dtype=torch.uint8)
    ink = ((ink / strongest - 0.2) / 0.8).clamp(0, 1)
    rows, columns = ink.amax(1).nonzero().flatten(), ink.amax(0).nonzero().flatten()
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = 20 / max(ink.shape)
    size = [max(1, round(side * factor)) for side in ink.shape]
    small = F.interpolate(ink[None, None], size=size, mode="bilinear", align_corners=False, antialias=True)[0, 0]
    small = small / small.max()
    mass = small.sum()
    canvas = torch.zeros(28, 28)
    corner = []
    for axis in (0, 1):
        along = small.sum(1 - axis)
        centre = float((along * torch.arange(len(along))).sum() / mass)
        corner.append(min(max(0, round(13.5 - centre)), 28 - small.shape[axis]))
    canvas[corner[0] : corner[0] + small.shape[0], corner[1] : corner[1] + small.shape[1]] = small
    return canvas.mul(255).round().to(torch.uint8).unsqueeze(0)


def open_image(file: str | Path, most_pixels: int = _MOST_PIXELS) -> Image.Image:
    """A decoded image file.

    Args:
        most_pixels: of the image.

    Raises:
        UserError: the file is missing, too large or not an image.
    """
    try:
        prepare_to_read(file)
        with Image.open(Path(file)) as image:
            check_pixels(image.size, most_pixels)
            image.load()
    except FileNotFoundError as error:
        raise UserError(f"{file} does not exist") from error
    # Pillow's decoders raise all of these for damaged files; DecompressionBombError is no OSError either.
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise UserError(f"{file} cannot be read as an image: {error}") from error
    return image


def load_images(files: Sequence[str], most_pixels: int = _MOST_PIXELS) -> Tensor:
    """Image files as a uint8 tensor of shape (n, 1, 28, 28).

    Args:
        most_pixels: of each image.

    Raises:
        UserError: no file was given, or one is missing, too large or not an image.
    """
    if not files:
        raise UserError("no image to predict; pass the names of PNG or JPEG files")
    return torch.stack([as_mnist(open_image(file, most_pixels)) for file in files])
