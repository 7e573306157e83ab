"""An image file of any kind as bytes of pixels: the same in every process, or refused with the reason."""

import os
import re
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

_RULES = 5  # Of this file, by which the same content has the same pixels.
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES: tuple[str, ...] = (
    *_JPEG,
    *(".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".tga", ".avif"),
)
_HEIC = (".heic", ".heif")
with suppress(ImportError):
    # Telephones' photographs, where the library is installed.
    import pillow_heif

    pillow_heif.register_heif_opener()
    _SUFFIXES += _HEIC


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


_BITS_PER_SAMPLE = 258  # TIFF's tags, by their numbers in its specification.
_SAMPLES_PER_PIXEL = 277
_SAMPLE_FORMAT = 339
_SIGNED = 2


def _numbers(value: Any) -> tuple[int, ...]:
    """A tag's value, which is a number or several."""
    return tuple(value) if isinstance(value, tuple) else (value,)


def _jpeg_2000_bits(content: bytes) -> int:
    """Bits of a sample, by the codestream's header: the highest of its components."""
    start = content.find(b"\xff\x4f\xff\x51")
    if start < 0:
        return 8
    components = int.from_bytes(content[start + 40 : start + 42], "big")
    # Three bytes for each component, of which the first is its depth; its highest bit says that samples are signed.
    depths = content[start + 42 : start + 42 + 3 * components : 3]
    return max((1 + (depth & 127) for depth in depths), default=8)


def _netpbm_bits(content: bytes) -> int:
    """Bits of a sample, by the greatest value in the header of a PGM or PPM; comments begin with #."""
    words = re.sub(rb"#[^\n]*", b" ", content[:1024]).split(None, 4)
    if len(words) < 4 or words[0] not in (b"P2", b"P3", b"P5", b"P6") or not words[3].isdigit():
        return 8
    return int(words[3]).bit_length()


def _refuse_other_pixels(image: Image.Image, content: bytes = b"") -> None:
    """Refuse pixels of more than 8 bits, signed ones, further bands, and files of several pages, by the file's header.

    Scaled by its own range, an image could not be compared with the others; of colours Pillow cuts bits off.
    """
    bits = 8
    if image.mode[:4] in ("I;16", "I", "F") or any(";16" in str(tile.args) for tile in getattr(image, "tile", ())):
        bits = 16
    elif image.format == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        bits = max(_numbers(tags.get(_BITS_PER_SAMPLE, 8)))
        if _SIGNED in _numbers(tags.get(_SAMPLE_FORMAT, 1)):
            raise UnreadableImage("its pixels are signed; shift all images of the set to 0 to 255, and save them so")
        # An image has three colours, and perhaps one band more for its transparency.
        if tags.get(_SAMPLES_PER_PIXEL, 1) > len(image.getbands()) or image.mode == "RGBX":
            raise UnreadableImage(
                f"it has {tags.get(_SAMPLES_PER_PIXEL)} bands, expected 1 or 3; save those that are meant as an image"
            )
        pages = getattr(image, "n_frames", 1)
        if pages > 1:
            raise UnreadableImage(f"it has {pages} pages; save the one that is meant, or each as a file")
    elif image.format == "JPEG2000":
        bits = _jpeg_2000_bits(content)
    elif image.format == "PPM":
        bits = _netpbm_bits(content)
    if bits > 8:
        raise UnreadableImage(
            f"its pixels have more than 8 bits (mode {image.mode}); scale all images of the set by one number, and save"
            " them with 8 bits"
        )


def _other_kind(content: bytes) -> str:
    """What a file is by its first bytes that Pillow does not open as an image."""
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
    """An image on white where it is transparent."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image


@contextmanager
def open_image(source: Source, name: str) -> Iterator[tuple[Image.Image, bytes]]:
    """Open an image, and give it with its content, which is empty for one in memory.

    An error in the ``with`` block also names the image and the reason.

    Args:
        source: a file, its content, or an image in memory.
        name: of the image, in messages.

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, not an image, or one of more than 8 bits.
    """
    content = b""
    try:
        if isinstance(source, Image.Image):
            _refuse_other_pixels(source)
            yield source, content
            return
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        with Image.open(BytesIO(content)) as image:
            _refuse_other_pixels(image, content)
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
    """What the pixels of an image depend on besides its file, for the names of caches."""
    return " ".join([str(_RULES), *map(version, ("pillow", "torch", "torchvision"))])


def _reduced(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Width and height in proportion, with a short side of `short_side` at most."""
    scale = short_side / min(size)
    if scale >= 1:
        return size
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


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
    if not name:
        name = str(source) if isinstance(source, (str, Path)) else "the image"
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
