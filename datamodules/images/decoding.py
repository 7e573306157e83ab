"""Decodes image files of any format to uint8 tensors, equal in every process, or raises an error with the reason."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from datamodules.errors import UserError

Source = str | Path | bytes | Image.Image

# Version of the rules in this file. A change of them that changes pixels has to raise it, since it is part of the names
# of caches.
_RULES = 5
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES: tuple[str, ...] = (
    *_JPEG,
    *(".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".tga", ".avif"),
)
_HEIC = (".heic", ".heif")
with suppress(ImportError):
    # Photographs of phones, if the library is installed.
    import pillow_heif

    pillow_heif.register_heif_opener()
    _SUFFIXES += _HEIC


class UnreadableImage(UserError):
    """Error of an image that cannot be decoded. The message names the image."""


def unreadable(name: str, reason: str) -> UnreadableImage:
    """Return the error for an image, with the reason."""
    return UnreadableImage(f"{name} cannot be read as an image: {reason}")


def ending(file: str | Path) -> str:
    """Return the suffix of a file in lower case. `pathlib.Path` takes several times longer."""
    return os.path.splitext(file)[1].lower()  # noqa: PTH122


def is_image(file: str | Path) -> bool:
    """Return whether a file is an image of a supported format, by its suffix."""
    return ending(file) in _SUFFIXES


# Numbers of tags in the specification of TIFF, and a value of the last one.
_BITS_PER_SAMPLE = 258
_SAMPLES_PER_PIXEL = 277
_SAMPLE_FORMAT = 339
_SIGNED = 2


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a TIFF tag, whose value is a number or a tuple."""
    return tuple(value) if isinstance(value, tuple) else (value,)


def _refuse_other_pixels(image: Image.Image) -> None:
    """Raise an error for pixels of more than 8 bits or with a sign, for further bands, and for several pages.

    An image that is scaled by its own range could not be compared with the other images of the set. Of colours with 16
    bits, Pillow would cut the lower bits off.
    """
    bits = 8
    if image.mode[:4] in ("I;16", "I", "F") or any(";16" in str(tile.args) for tile in getattr(image, "tile", ())):
        bits = 16
    elif image.format == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        bits = max(_numbers(tags.get(_BITS_PER_SAMPLE, 8)))
        if _SIGNED in _numbers(tags.get(_SAMPLE_FORMAT, 1)):
            raise UnreadableImage("its pixels are signed; shift all images of the set to 0 to 255, and save them so")
        # Pillow reads three colours and transparency only, and would drop further bands.
        if tags.get(_SAMPLES_PER_PIXEL, 1) > len(image.getbands()) or image.mode == "RGBX":
            raise UnreadableImage(
                f"it has {tags.get(_SAMPLES_PER_PIXEL)} bands, expected 1 or 3; save those that are meant as an image"
            )
        pages = getattr(image, "n_frames", 1)
        if pages > 1:
            raise UnreadableImage(f"it has {pages} pages; save the one that is meant, or each as a file")
    elif image.format in ("JPEG2000", "PPM"):
        # Pillow scales deeper pixels of these formats to 8 bits, each image by its own header.
        raise UnreadableImage(f"its format is {image.format}; save all images of the set as PNG, with 8 bits")
    if bits > 8:
        raise UnreadableImage(
            f"its pixels have more than 8 bits (mode {image.mode}); scale all images of the set by one number, and save"
            " them with 8 bits"
        )


def _other_kind(content: bytes) -> str:
    """Return why Pillow cannot open a file, by the first bytes of the file."""
    if content[4:8] == b"ftyp" and content[8:12] in (b"heic", b"heix", b"mif1", b"hevc", b"heim"):
        return "it is a HEIC photograph: pip install pillow-heif, or save it as JPEG"
    if content[:2] == b"\xff\x0a" or content[4:8] == b"JXL ":
        return "it is JPEG XL, which Pillow does not read; save it as PNG"
    if content[128:132] == b"DICM":
        return "it is DICOM; save the set with 8 bits, as PNG"
    if content[:2] == b"\xff\xd8":
        return "it is a JPEG that Pillow does not read, as of 12 bits, or damaged; save it with 8 bits"
    if content[:4] in (b"II*\0", b"MM\0*"):
        return "it is a TIFF of pixels that Pillow does not read, such as floats or many bands; save it with 8 bits"
    return "its content is not an image" if content else "the file is empty"


def without_alpha(image: Image.Image) -> Image.Image:
    """Return an image on a white background if it has transparency."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image


@contextmanager
def open_image(source: Source, name: str) -> Iterator[tuple[Image.Image, bytes]]:
    """Open an image and yield it with the content of the file, which is empty for an image in memory.

    An error in the ``with`` block is raised with the name of the image and the reason.

    Args:
        source: path of a file, content of a file, or an image in memory.
        name: name of the image, for messages.

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, not an image, or has more than 8 bits.
    """
    content = b""
    try:
        if isinstance(source, Image.Image):
            _refuse_other_pixels(source)
            yield source, content
            return
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        with Image.open(BytesIO(content)) as image:
            _refuse_other_pixels(image)
            yield image, content
        return
    except UnidentifiedImageError:
        reason = _other_kind(content)
    except OSError as error:
        reason = error.strerror or str(error)
    # On damaged files Pillow's decoders raise exceptions of many kinds, from SyntaxError to zlib.error.
    except Exception as error:
        reason = str(error) or type(error).__name__
    raise unreadable(name, reason)


@cache
def decoders() -> str:
    """Return the versions that decoded pixels depend on, besides the file, for the names of caches."""
    return " ".join([str(_RULES), *map(version, ("pillow", "torch", "torchvision"))])


def _reduced(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Return width and height in proportion, with a short side of at most `short_side`."""
    scale = short_side / min(size)
    if scale >= 1:
        return size
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def is_small(size: int) -> bool:
    """Return whether images are treated as CIFAR's: kept in memory, and translated instead of cropped."""
    return size < 64


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """Resize an image with antialiasing: uint8 of shape (3, any, any) to (3, height, width).

    torch computes it in integers, with equal results on any number of threads. It is fastest with the channels last, as
    decoders write them.
    """
    # The strides of this batch of one are those of channels_last. With unsqueeze(0) torch would copy the image first.
    batch = image.permute(1, 2, 0).unsqueeze(0).permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode="bilinear", antialias=True)[0]


def _as_tensor(image: Image.Image) -> Tensor:
    """Convert an RGB image to uint8 of shape (3, height, width)."""
    # A bytearray, since torch warns of memory that it may not write to.
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def _decode_jpeg(content: bytes) -> Tensor | None:
    """Decode a JPEG file to the same RGB pixels as Pillow, but faster; None if torchvision fails."""
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        pixels: Tensor = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError:
        return None
    return pixels


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    """Rotate and mirror pixels according to the EXIF orientation."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 2)
    axes = []
    if orientation in (3, 4, 7, 8):
        axes.append(1)
    if orientation in (2, 3, 6, 7):
        axes.append(2)
    return pixels.flip(axes) if axes else pixels


def load_image(source: Source, short_side: int, name: str = "") -> Tensor:
    """Load an image of any size and mode: upright, RGB, on white, with a short side of at most `short_side`.

    Args:
        source: path of a file, content of a file, or an image in memory.
        short_side: greatest length of the short side, in pixels. Smaller images keep their size.
        name: name of the image, for messages; by default that of the file.

    Returns:
        uint8 of shape (3, height, width).

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, or not an image.
    """
    if not name:
        name = str(source) if isinstance(source, (str, Path)) else "the image"
    pixels = None
    with open_image(source, name) as (image, content):
        full_size = image.size
        size = _reduced(full_size, short_side)
        if size != full_size:
            # A JPEG is decoded to an eighth, a quarter or half of its size in a fraction of the time.
            image.draft(None, size)
        # Torchvision decodes to the full size only. CMYK has to be converted by Pillow.
        is_full_jpeg = image.format == "JPEG" and image.size == full_size
        if is_full_jpeg and image.mode in ("RGB", "L") and content:
            pixels = _decode_jpeg(content)
        if pixels is None:
            image.load()
        # A damaged EXIF tag does not make the pixels unreadable, so any error of the tag is ignored.
        try:
            orientation = image.getexif().get(0x0112, 1)
        except Exception:
            orientation = 1
        if pixels is None:
            pixels = _as_tensor(without_alpha(image).convert("RGB"))
    if pixels.shape[1:] != (size[1], size[0]):
        pixels = resized(pixels, size[1], size[0])
    return _upright(pixels, orientation)
