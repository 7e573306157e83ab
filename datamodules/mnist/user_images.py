"""Photographs and drawings of digits in MNIST's form."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.heic import prepare_to_read
from datamodules.loading.unpacking import check_pixels
from datamodules.mnist.strokes import CLOSE, SEARCHED, Strokes, find_strokes, mnist_form

__all__ = ["NOTHING_FOUND", "ReadDigits", "as_mnist", "open_image", "read_digit", "read_digits"]

NOTHING_FOUND = "no strokes found"

_MOST_PIXELS = 50_000_000  # A photograph of a telephone; in float32, several times, half a gibibyte.


def _in_grey(image: Image.Image) -> Image.Image:
    """An image upright and in grey; transparency is white unless the opaque part is itself light."""
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # A broken orientation tag does not make an image unreadable.
        image = image.copy()
    if image.mode.startswith("I"):
        # Pillow clips 16 bits to 255 instead of scaling them.
        image = image.convert("F").point(lambda value: value * (1 / 257) + 0)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        opaque, alpha = _pixels(rgba.convert("L")), _pixels(rgba.getchannel("A"))
        ink = opaque[alpha > 127]
        background = 0 if len(ink) and ink.mean() > 127 else 255
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (background,) * 3 + (255,)), rgba)
    return image.convert("L")


def _pixels(grey: Image.Image) -> Tensor:
    """Float32 of shape (height, width)."""
    return torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(grey.height, grey.width).float()


def _as_it_is(pixels: Tensor) -> Tensor | None:
    """Pixels of shape (28, 28) light on dark, where they have MNIST's form already; else None."""
    if pixels.shape != (28, 28):
        return None
    border = torch.cat((pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])).median()
    if border < 64:
        return pixels
    pixels = 255 - pixels
    ink, places = pixels > 64, torch.arange(28.0)
    centre = torch.stack([(pixels.sum(1 - axis) * places).sum() for axis in (0, 1)]) / pixels.sum().clamp(min=1)
    fills = int(max(ink.any(0).sum(), ink.any(1).sum())) in (18, 19, 20, 21)
    return pixels if border >= 192 and fills and ((centre - 14).abs() < 1).all() else None


def _enlarged(grey: Image.Image) -> Tensor:
    """A clean image of fewer pixels than MNIST's, such as scikit-learn's digits: 20 pixels high or wide, on 28 x 28.

    The background is that of the corners; the strokes of so small an image touch its borders.

    Returns:
        float32 of shape (28, 28), light on dark; all 0 where the image has one shade.
    """
    pixels = _pixels(grey)
    if pixels.max() - pixels.min() < 16:
        return torch.zeros(28, 28)
    if pixels[[0, 0, -1, -1], [0, -1, 0, -1]].quantile(0.5) > 127:
        grey = ImageOps.invert(grey)
    factor = 20 / max(grey.size)
    grey = grey.resize([max(1, round(side * factor)) for side in grey.size], Image.Resampling.BILINEAR)
    canvas = Image.new("L", (28, 28))
    canvas.paste(grey, ((28 - grey.width) // 2, (28 - grey.height) // 2))
    return _pixels(canvas)


def _strokes_in(grey: Image.Image) -> Strokes | None:
    """The strokes of the digit, looked at closely where it is small."""
    strokes, factor = _strokes_at(grey)
    if strokes is None or strokes.at_border:
        strokes = _strokes_in_cutting(grey) or strokes
    if strokes is None:
        return None
    top, bottom, left, right = (round(side / factor) for side in strokes.box)
    size = max(bottom - top, right - left)
    if factor < 1 and size * factor < CLOSE:
        box = (max(0, left - size), max(0, top - size), min(grey.width, right + size), min(grey.height, bottom + size))
        closer, _ = _strokes_at(grey.crop(box))
        if closer is not None:
            return replace(closer, others=strokes.others)
    return strokes


def _strokes_in_cutting(grey: Image.Image) -> Strokes | None:
    """The strokes of an image that was cut out around a digit; None where it was not."""
    pixels = _pixels(grey)
    border = torch.cat((pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])).median()
    margin = max(2, max(grey.size) // 4)
    strokes, factor = _strokes_at(ImageOps.expand(grey, margin, int(border)))
    if strokes is None:
        return None
    top, bottom, left, right = strokes.box
    whole = bottom - top > 0.9 * factor * grey.height and right - left > 0.9 * factor * grey.width
    return strokes if whole else None


def _strokes_at(grey: Image.Image) -> tuple[Strokes | None, float]:
    """The strokes of an image at the size in which they are searched for, and the factor to it."""
    factor = SEARCHED / max(grey.size)
    size = [max(1, round(side * factor)) for side in grey.size]
    return find_strokes(_pixels(grey.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0))), factor


def read_digit(image: Image.Image) -> tuple[Tensor, str]:
    """An image of one digit in MNIST's form, and why it is unclear, if so.

    An image of 28 x 28 that is light on dark, or as MNIST's but inverted, is taken to be prepared already. A smaller
    one is enlarged to 20 pixels. In any other the strokes are searched for (`datamodules.mnist.strokes`).

    Args:
        image: any size and mode; transparency counts as background.

    Returns:
        uint8 of shape (1, 28, 28), which is all 0 where nothing was found, and a reason such as "no strokes found".
    """
    grey = _in_grey(image)
    ready = _enlarged(grey) if max(grey.size) < 28 else _as_it_is(_pixels(grey))
    if ready is not None:
        return ready.to(torch.uint8)[None], "" if ready.max() - ready.min() >= 16 else NOTHING_FOUND
    strokes = _strokes_in(grey)
    if strokes is None:
        return torch.zeros(1, 28, 28, dtype=torch.uint8), NOTHING_FOUND
    form = mnist_form(strokes)
    return form, f"{strokes.others + 1} digits or more" if strokes.others else ""


def as_mnist(image: Image.Image) -> Tensor:
    """The first value of `read_digit`: uint8 of shape (1, 28, 28), all 0 where there are no strokes."""
    return read_digit(image)[0]


def open_image(
    file: str | Path, most_pixels: int = _MOST_PIXELS, read: Callable[[], bytes] | None = None
) -> Image.Image:
    """A decoded image file.

    Args:
        most_pixels: of the image.
        read: returns the content of a file that is not on disk.

    Raises:
        UserError: the file is missing, too large or not an image.
    """
    content = b""
    try:
        prepare_to_read(file)
        content = read() if read else Path(file).read_bytes()
        with Image.open(BytesIO(content)) as image:
            check_pixels(image.size, most_pixels)
            image.load()
    except FileNotFoundError as error:
        raise UserError(f"{file} does not exist") from error
    except UnidentifiedImageError as error:
        reason = "its content is not an image" if content else "the file is empty"
        raise UserError(f"{file} cannot be read as an image: {reason}") from error
    # Pillow's decoders raise all of these for damaged files; DecompressionBombError is no OSError either.
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"{file} cannot be read as an image: {reason}") from error
    return image


class ReadDigits(NamedTuple):
    """Digits to predict."""

    pixels: Tensor
    """uint8 of shape (n, 1, 28, 28), without images that cannot be read or show nothing."""
    numbers: Tensor
    """Their places among the images that were given, int64 of shape (n,)."""
    unreadable: dict[int, str]
    """Why others cannot be read, by place."""
    unclear: dict[int, str]
    """What is unclear, by place."""


def read_digits(images: Sequence[str | Image.Image], most_pixels: int = _MOST_PIXELS) -> ReadDigits:
    """Images of a digit each in MNIST's form, as `read_digit` makes them of files and of images in memory.

    Args:
        most_pixels: of each file.
    """
    pixels: dict[int, Tensor] = {}
    unreadable: dict[int, str] = {}
    unclear: dict[int, str] = {}
    for number, image in enumerate(images):
        try:
            opened = image if isinstance(image, Image.Image) else open_image(image, most_pixels)
            pixels[number], reason = read_digit(opened)
        except UserError as error:
            unreadable[number] = str(error)
            continue
        if reason:
            unclear[number] = f"unclear: {reason}"
        if reason == NOTHING_FOUND:
            del pixels[number]
    found = torch.stack(list(pixels.values())) if pixels else torch.empty(0, 1, 28, 28, dtype=torch.uint8)
    return ReadDigits(found, torch.tensor(list(pixels), dtype=torch.int64), unreadable, unclear)
