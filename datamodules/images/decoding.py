"""An image file of any kind as bytes of pixels: the same in every process, or refused with the reason."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from datamodules.errors import UserError

Source = str | Path | bytes | Image.Image

_RULES = 4  # Of this file, by which the same content has the same pixels.
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES = (*_JPEG, *(".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".tga", ".avif"))


class UnreadableImage(UserError):
    """A file that cannot be decoded; the message names it."""


def unreadable(name: str, reason: str) -> UnreadableImage:
    """The error about an image and the reason."""
    return UnreadableImage(f"{name} cannot be read as an image: {reason}")


def ending(file: str | Path) -> str:
    """The ending of a file's name, in small letters; a pathlib.Path takes several times longer."""
    return os.path.splitext(file)[1].lower()  # noqa: PTH122


def is_image(file: str | Path) -> bool:
    """Whether a file is an image that can be read, by its ending."""
    return ending(file) in _SUFFIXES


def _refuse_more_than_8_bits(image: Image.Image) -> None:
    """Scaled by its own range, an image could not be compared with the others; of colours Pillow cuts bits off."""
    if image.mode[:4] in ("I;16", "I", "F") or any(";16" in str(tile.args) for tile in getattr(image, "tile", ())):
        raise UnreadableImage(
            f"its pixels have more than 8 bits (mode {image.mode}); scale all images of the set by one number, and save"
            " them with 8 bits"
        )


def without_alpha(image: Image.Image) -> Image.Image:
    """An image on white where it is transparent."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image


@contextmanager
def open_image(source: Source, name: str) -> Iterator[tuple[Image.Image, bytes]]:
    """Open an image, and give it with its content, which is empty for one in memory.

    What fails in the ``with`` block is told with the image's name and the reason, too.

    Args:
        source: a file, its content, or an image in memory.
        name: of the image, in messages.

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, not an image, or one of more than 8 bits.
    """
    content = b""
    try:
        if isinstance(source, Image.Image):
            _refuse_more_than_8_bits(source)
            yield source, content
            return
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        with Image.open(BytesIO(content)) as image:
            _refuse_more_than_8_bits(image)
            yield image, content
        return
    except UnidentifiedImageError:
        reason = "its content is not an image" if content else "the file is empty"
    except OSError as error:
        reason = error.strerror or str(error)
    # On damaged files Pillow's decoders raise exceptions of many kinds, from SyntaxError to zlib.error.
    except Exception as error:
        reason = str(error) or type(error).__name__
    raise unreadable(name, reason)


@cache
def decoders() -> str:
    """What the pixels of an image depend on besides its file, for the names of caches."""
    return " ".join([str(_RULES), *map(version, ("pillow", "torch", "torchvision"))])


def _reduced(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Width and height in proportion, with a short side of `short_side` at most."""
    scale = short_side / min(size)
    return size if scale >= 1 else (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


def is_small(size: int) -> bool:
    """Whether images of `size` pixels are treated as CIFAR's are: kept in memory, shifted, and not cropped."""
    return size < 64


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """An image scaled, without jagged edges: uint8 of shape (3, any, any) to (3, height, width).

    It is computed in integers, the same on any number of threads, and fastest where the channels are innermost, as
    decoders write them.
    """
    # A batch of one by strides that say so: those of unsqueeze(0) would have it copied first.
    batch = image.permute(1, 2, 0).unsqueeze(0).permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode="bilinear", antialias=True)[0]


def _as_tensor(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def _decode_jpeg(content: bytes) -> Tensor | None:
    """All pixels of a JPEG file in colour, as Pillow decodes them, but faster; None for files that it fails on."""
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        pixels: Tensor = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError:
        return None
    return pixels


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    """Pixels turned and mirrored as EXIF's orientation says."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 2)
    mirrored = [axis for axis, which in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if orientation in which]
    return pixels.flip(mirrored) if mirrored else pixels


def load_image(source: Source, short_side: int, name: str = "") -> Tensor:
    """An image of any size and mode, upright, in colour and on white, its short side reduced to `short_side` at most.

    Args:
        source: a file, its content, or an image in memory.
        name: of the image, in messages; by default the file's.

    Returns:
        uint8 of shape (3, height, width).

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, or not an image.
    """
    name = name or (str(source) if isinstance(source, (str, Path)) else "the image")
    pixels = None
    with open_image(source, name) as (image, content):
        whole = image.size
        size = _reduced(whole, short_side)
        if size != whole:
            # JPEG decodes to an eighth, a quarter or half of its size in a fraction of the time.
            image.draft(None, size)
        if (image.format, image.size) == ("JPEG", whole) and image.mode in ("RGB", "L") and content:
            pixels = _decode_jpeg(content)
        if pixels is None:
            image.load()
        # A broken orientation tag does not make an image unreadable.
        try:
            orientation = image.getexif().get(0x0112, 1)
        except Exception:
            orientation = 1
        if pixels is None:
            pixels = _as_tensor(without_alpha(image).convert("RGB"))
    if pixels.shape[1:] != (size[1], size[0]):
        pixels = resized(pixels, size[1], size[0])
    return _upright(pixels, orientation)
