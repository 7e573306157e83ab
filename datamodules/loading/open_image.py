"""Opening of images of any kind, with the reason where one cannot be read, and the scale of pixels with many bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from datamodules.errors import UserError
from datamodules.loading.heic import prepare_to_read, why_no_image

__all__ = ["Source", "UnreadableImage", "open_image", "unreadable", "without_alpha"]

Source = str | Path | bytes | Image.Image


class UnreadableImage(UserError):
    """A file that cannot be decoded; the message names it."""


def unreadable(name: str, reason: str) -> UnreadableImage:
    """The error about an image and the reason."""
    return UnreadableImage(f"{name} cannot be read as an image: {reason}")


_RANGES = {"I;16": (65535,), "I": (255, 65535), "F": (1, 255)}
"""The full ranges that pixels of 16 bits, of whole numbers of 32 bits and of floats are known to have."""


def _in_bytes(image: Image.Image) -> Image.Image:
    """Pixels of more than 8 bits scaled to 0 to 255, by a known full range and never by the image's own.

    Raises:
        UnreadableImage: the brightest pixel is below a quarter of each known range, or others are outside.
    """
    tops = _RANGES.get(image.mode[:4])
    if tops is None:
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    # NaN fails each comparison.
    top = next((top for top in tops if high <= top), 0)
    if not (low >= 0 and (top / 4 < high <= top or high == 0)):
        known = " or ".join(f"0 to {top}" for top in tops)
        raise UnreadableImage(
            f"its pixels are {values.dtype} from {low:g} to {high:g}, expected most of {known}; scale all images of the"
            " set alike and save them with 8 bits"
        )
    return image.convert("F").point(lambda value: value * (255 / top) + 0)


def _check_high_bytes(image: Image.Image) -> None:
    """Refuse colours of 16 bits, of which Pillow keeps the high byte, where it holds little or nothing."""
    if image.mode in ("RGB", "RGBA", "LA") and any(";16" in str(tile.args) for tile in getattr(image, "tile", ())):
        bands = image.split()[: len(image.mode.rstrip("A"))]
        high = max(int(np.asarray(band).max()) for band in bands)
        if high < 64:
            raise UnreadableImage(
                f"its pixels have 16 bits and are below {256 * (high + 1)}, expected most of 0 to 65535; scale all"
                " images of the set alike and save them with 8 bits"
            )


def without_alpha(image: Image.Image) -> Image.Image:
    """An image of any mode with bytes or whole numbers from 0 to 255 as pixels, on white where it is transparent.

    Raises:
        UnreadableImage: the pixels have more than 8 bits and fill no known range.
    """
    image = _in_bytes(image)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("L") if image.mode == "F" else image


def _why_unidentified(content: bytes) -> str:
    """Why Pillow does not open a content: the reason of the format whose signature it has."""
    for kind in Image.ID if content else ():
        factory, accept = Image.OPEN[kind]
        if accept is not None and accept(content[:16]) is True:
            try:
                factory(BytesIO(content), "")
            # Plugins raise exceptions of many kinds.
            except Exception as error:
                return f"it is a {kind} file that is damaged or of a kind that Pillow does not read ({error})"
    return why_no_image(content)


@contextmanager
def open_image(source: Source, name: str) -> Iterator[tuple[Image.Image, bytes]]:
    """Open an image, and give it with its content, which is empty for one in memory.

    What fails in the ``with`` block is told with the image's name and the reason, too.

    Args:
        source: a file, its content, or an image in memory.
        name: of the image, in messages.

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, not an image, or one of another range.
    """
    content = b""
    try:
        prepare_to_read(name)
        if isinstance(source, Image.Image):
            yield source, content
            return
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        with Image.open(BytesIO(content)) as image:
            _check_high_bytes(image)
            yield image, content
        return
    except UnidentifiedImageError:
        reason = _why_unidentified(content)
    except OSError as error:
        reason = error.strerror or str(error)
    # On damaged files Pillow's decoders raise exceptions of many kinds, from SyntaxError to zlib.error.
    except Exception as error:
        reason = str(error) or type(error).__name__
    raise unreadable(name, reason)
