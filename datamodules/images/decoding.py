"""Decoding of images to uint8 pixels, equal in every process, and crops to the size of the network's inputs.

Validation, test, prediction and export use `evaluation_pixels`. Training decodes photographs at a reduced size
(`load_image`), which is faster and gives slightly different pixels. An unreadable image raises an error with the
reason.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from datamodules.loading.randomness import uniform

Source = str | Path | bytes | Image.Image

# Share of the short side that evaluation keeps. Small images are not cropped, since every pixel counts.
_KEPT = 7 / 8
# Smallest share of the area in a random crop. The usual 0.08 is for runs of a hundred epochs.
_LEAST_AREA = 0.25
_LEAST_AREA_SMALL = 0.64
_TRIES = 10

# Version of the rules in this file, which is part of the names of caches. Increase it with every change of the pixels.
_RULES = 6
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
    """Error of an image that cannot be decoded. Its subject is the name of the image."""


def unreadable(name: str, reason: str) -> UnreadableImage:
    """Return the error for an unreadable image."""
    return UnreadableImage(f"cannot be read as an image: {reason}", subject=name)


def ending(file: str | Path) -> str:
    """Return the suffix of a file in lower case, several times faster than `pathlib.Path`."""
    return os.path.splitext(file)[1].lower()  # noqa: PTH122


def is_image(file: str | Path) -> bool:
    """Return whether a file is an image of a supported format, by its suffix."""
    return ending(file) in _SUFFIXES


# Numbers of TIFF tags, and a value of the tag SampleFormat.
_BITS_PER_SAMPLE = 258
_SAMPLES_PER_PIXEL = 277
_SAMPLE_FORMAT = 339
_SIGNED = 2


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a TIFF tag, whose value is a number or a tuple."""
    return tuple(value) if isinstance(value, tuple) else (value,)


def _reject_other_pixels(image: Image.Image) -> None:
    """Raise a ValueError for pixels with more than 8 bits or a sign, extra bands, or several pages.

    Scaling each image by its own range would make the images of a set incomparable. Pillow would drop the lower bits of
    16-bit colors.
    """
    bits = 8
    if image.mode[:4] in ("I;16", "I", "F") or any(";16" in str(tile.args) for tile in getattr(image, "tile", ())):
        bits = 16
    elif image.format == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        bits = max(_numbers(tags.get(_BITS_PER_SAMPLE, 8)))
        if _SIGNED in _numbers(tags.get(_SAMPLE_FORMAT, 1)):
            raise ValueError("its pixels are signed; shift all images of the set to 0 to 255, and save them so")
        # Pillow reads three colors and transparency, and would drop other bands.
        if tags.get(_SAMPLES_PER_PIXEL, 1) > len(image.getbands()) or image.mode == "RGBX":
            raise ValueError(
                f"it has {tags.get(_SAMPLES_PER_PIXEL)} bands, expected 1 or 3; save the bands of the image alone"
            )
        pages = getattr(image, "n_frames", 1)
        if pages > 1:
            raise ValueError(f"it has {pages} pages; save the one that is meant, or each as a file")
    elif image.format in ("JPEG2000", "PPM"):
        # In these formats Pillow scales deeper pixels to 8 bits, by the header of each image.
        raise ValueError(f"its format is {image.format}; save all images of the set as PNG, with 8 bits")
    if bits > 8:
        raise ValueError(
            f"its pixels have more than 8 bits (mode {image.mode}); scale all images of the set by one number, and save"
            " them with 8 bits"
        )


_JPEG_XL = "it is JPEG XL, which Pillow does not read; save it as PNG"
_TIFF = "it is a TIFF of pixels that Pillow does not read, such as floats or many bands; save it with 8 bits"
_OTHER_KINDS = (
    (rb".{4}ftyp(heic|heix|mif1|hevc|heim)", "it is a HEIC photograph: pip install pillow-heif, or save it as JPEG"),
    (rb"\xff\x0a|.{4}JXL ", _JPEG_XL),
    (rb".{128}DICM", "it is DICOM; save the set with 8 bits, as PNG"),
    (rb"\xff\xd8", "it is a JPEG that Pillow does not read, as of 12 bits, or damaged; save it with 8 bits"),
    (rb"II\*\0|MM\0\*", _TIFF),
    (rb".", "its content is not an image"),
    (rb"", "the file is empty"),
)
"""Why Pillow cannot open a file, by a pattern of its first bytes."""


def _other_kind(content: bytes) -> str:
    """Return why Pillow cannot open a file."""
    return next(reason for start, reason in _OTHER_KINDS if re.match(start, content, re.DOTALL))


def without_alpha(image: Image.Image) -> Image.Image:
    """Return an image on a white background, if it has transparency."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image


def _undecoded(image: Image.Image) -> bytes:
    """Return the file content of an image that is opened but not decoded, without decoding it; else b"".

    An image that the caller has reduced (``draft``) or moved to another frame also gives b"", since its pixels are the
    caller's choice.
    """
    file = getattr(image, "fp", None)
    if file is None or not getattr(image, "tile", ()) or image.tell():
        return b""
    position = file.tell()
    file.seek(0)
    content: bytes = file.read()
    file.seek(position)
    with Image.open(BytesIO(content)) as again:
        is_same = (again.format, again.mode, again.size) == (image.format, image.mode, image.size)
    return content if is_same else b""


@contextmanager
def open_image(source: Source, name: str) -> Iterator[tuple[Image.Image, bytes]]:
    """Open an image, and yield it with its file content, which is empty for a decoded image in memory.

    A PIL image that is not decoded yet is read from its file, so the caller's object does not change. An error in the
    ``with`` block is raised with the name of the image and the reason.

    Args:
        source: path of a file, content of a file, or an image in memory.
        name: name of the image, for messages.

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, not an image, or has more than 8 bits.
    """
    content = b""
    try:
        if isinstance(source, Image.Image):
            content = _undecoded(source)
            if not content:
                _reject_other_pixels(source)
                yield source, content
                return
        else:
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
        with Image.open(BytesIO(content)) as image:
            _reject_other_pixels(image)
            yield image, content
        return
    except UnidentifiedImageError:
        reason = _other_kind(content)
    except OSError as error:
        reason = error.strerror or str(error)
    # Pillow's decoders raise many kinds of exceptions for damaged files, from SyntaxError to zlib.error.
    except Exception as error:
        reason = str(error) or type(error).__name__
    raise unreadable(name, reason)


@cache
def decoders() -> str:
    """Return the versions on which decoded pixels depend, for the names of caches."""
    return " ".join([str(_RULES), *map(version, ("pillow", "torch", "torchvision"))])


def _reduced(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Scale width and height down to a short side of at most `short_side`."""
    scale = short_side / min(size)
    if scale >= 1:
        return size
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def is_small(size: int) -> bool:
    """Return whether images are treated like CIFAR's: kept in memory, and translated instead of cropped."""
    return size < 64


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """Resize an image with antialiasing: uint8 of shape (3, any, any) to (3, height, width).

    torch computes this in integers, so the result does not depend on the number of threads. Channels last, the layout
    of decoders, is fastest.
    """
    # This batch of one has the strides of channels_last. With unsqueeze(0) torch would copy the image first.
    batch = image.permute(1, 2, 0).unsqueeze(0).permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode="bilinear", antialias=True)[0]


def _as_tensor(image: Image.Image) -> Tensor:
    """Convert an RGB image to uint8 of shape (3, height, width)."""
    # A bytearray, because torch warns about read-only memory.
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def _decode_jpeg(content: bytes) -> Tensor | None:
    """Decode a JPEG file to the same RGB pixels as Pillow, but faster. Return None if torchvision fails."""
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


def _decode(source: Source, name: str, short_side: int | None) -> tuple[Tensor, tuple[int, int], int]:
    """Decode an image to RGB on white.

    Args:
        source: see `open_image`.
        name: name of the image, for messages; by default the name of the file.
        short_side: short side, in pixels, to which the image is reduced later, so that a JPEG can be decoded at 1/8,
            1/4 or 1/2 of its size in a fraction of the time. None decodes all pixels.

    Returns:
        uint8 of shape (3, height, width), width and height of the full image, and the EXIF orientation.
    """
    if not name:
        name = str(source) if isinstance(source, (str, Path)) else "the image"
    pixels = None
    with open_image(source, name) as (image, content):
        full_size = image.size
        if short_side is not None and _reduced(full_size, short_side) != full_size:
            image.draft(None, _reduced(full_size, short_side))
        # torchvision decodes at full size only. Pillow has to convert CMYK.
        is_full_jpeg = image.format == "JPEG" and image.size == full_size
        if is_full_jpeg and image.mode in ("RGB", "L") and content:
            pixels = _decode_jpeg(content)
        if pixels is None:
            image.load()
        # The pixels are readable even if the EXIF tag is damaged, so any error of the tag is ignored.
        try:
            orientation = image.getexif().get(0x0112, 1)
        except Exception:
            orientation = 1
        if pixels is None:
            pixels = _as_tensor(without_alpha(image).convert("RGB"))
    return pixels, full_size, orientation


def load_image(source: Source, short_side: int, name: str = "") -> Tensor:
    """Load an image of any mode for training: upright, RGB, on white, with a short side of at most `short_side`.

    Args:
        source: path of a file, content of a file, or an image in memory.
        short_side: greatest length of the short side, in pixels. Smaller images keep their size.
        name: name of the image, for messages; by default the name of the file.

    Returns:
        uint8 of shape (3, height, width).

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow, or not an image.
    """
    pixels, full_size, orientation = _decode(source, name, short_side)
    width, height = _reduced(full_size, short_side)
    if pixels.shape[1:] != (height, width):
        pixels = resized(pixels, height, width)
    return _upright(pixels, orientation)


def crop_pct(size: int) -> float:
    """Return the share of the short side that evaluation keeps, for inputs of `size` pixels."""
    return 1.0 if is_small(size) else _KEPT


def _resized(image: Tensor, top: int, left: int, height: int, width: int, size: int) -> Tensor:
    """Crop an image and resize the crop to uint8 of shape (3, size, size)."""
    crop = image[:, top : top + height, left : left + width]
    if crop.shape[1:] == (size, size):
        return crop
    return resized(crop, size, size)


def _side_kept(height: int, width: int, size: int) -> int:
    """Return the side of the square, in pixels of the image, that evaluation keeps."""
    return max(1, round(min(height, width) * crop_pct(size)))


def center_square(image: Tensor, size: int) -> Tensor:
    """Crop the central square of a training image and resize it. Small images are enlarged.

    Equivalent to resizing the short side to 8/7 of `size` and cropping the center, in one step. For inputs below 64
    pixels the whole short side is kept.

    Args:
        image: uint8 of shape (3, height, width).
        size: side of the result, in pixels.

    Returns:
        uint8 of shape (3, size, size).
    """
    height, width = image.shape[-2:]
    side = _side_kept(height, width, size)
    return _resized(image, (height - side) // 2, (width - side) // 2, side, side, size)


def _crop_start(draw: float, length: int, crop_length: int) -> int:
    """Return where a crop begins along an axis, for a random number in [0, 1)."""
    return min(int(draw * (length - crop_length + 1)), length - crop_length)


def crop_box(height: int, width: int, least_area: float, draws: Sequence[float]) -> tuple[int, int, int, int]:
    """Draw a random crop as torchvision's RandomResizedCrop does (Szegedy et al., 2015).

    Args:
        height: height of the image, in pixels.
        width: width of the image, in pixels.
        least_area: least share of the image's area; the greatest is 1.
        draws: 22 numbers in [0, 1): the position, and ten attempts of area and aspect ratio from 3/4 to 4/3. The
            number is fixed, so that one tensor holds the numbers of all samples.

    Returns:
        Top, left, height and width. If no attempt fits, the largest central crop with a valid aspect ratio.
    """
    least_ratio = math.log(3 / 4)
    greatest_ratio = math.log(4 / 3)
    for i in range(2, 2 + 2 * _TRIES, 2):
        area = height * width * (least_area + draws[i] * (1 - least_area))
        # Uniform in the logarithm, where 3/4 and 4/3 are equally far from 1.
        ratio = math.exp(least_ratio + draws[i + 1] * (greatest_ratio - least_ratio))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return _crop_start(draws[0], height, h), _crop_start(draws[1], width, w), h, w
    w = min(width, max(1, round(height * 4 / 3)))
    h = min(height, max(1, round(width * 4 / 3)))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class Crop:
    """First half of a named augmentation, before `BatchAugmentation`: crop of an image to the size of the inputs.

    Args:
        name: "none" crops the center. "light" crops the center of small images, and a square of the same size at a
            random position of large images. "standard" crops and resizes at random (`crop_box`).
        size: side of the result, in pixels.
        seed: seed of the run.
    """

    name: str
    size: int
    seed: int

    @property
    def is_center(self) -> bool:
        """Whether the crop is the central square in every epoch."""
        return self.name == "none" or (self.name == "light" and is_small(self.size))

    def draws(self, numbers: Sequence[int], epoch: int) -> list[list[float]]:
        """Return the random numbers of each sample in an epoch: 22 for a random crop, none for the center."""
        if self.is_center or not numbers:
            return [[] for _ in numbers]
        index = torch.tensor(numbers, dtype=torch.int64)
        draws: list[list[float]] = uniform(self.seed, "crop", epoch, index, 2 + 2 * _TRIES).tolist()
        return draws

    def __call__(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """Crop an image with its random numbers: uint8 of shape (3, height, width) to (3, size, size)."""
        if self.is_center:
            return center_square(image, self.size)
        height, width = image.shape[-2:]
        if self.name == "light":
            side = _side_kept(height, width, self.size)
            top = _crop_start(draws[0], height, side)
            left = _crop_start(draws[1], width, side)
            return _resized(image, top, left, side, side, self.size)
        least_area = _LEAST_AREA_SMALL if is_small(self.size) else _LEAST_AREA
        box = crop_box(height, width, least_area, draws)
        return _resized(image, *box, self.size)


def side_to_decode(crop: str, size: int) -> int:
    """Return the short side, in pixels, to which training images are reduced when they are decoded.

    "none" and "light" keep a fixed share of the short side, so their crops need no second resize. With "standard", the
    smallest crop, a quarter of the area, still has one pixel for each pixel of the input.
    """
    if crop == "standard":
        return 2 * size
    return round(size / crop_pct(size))


def evaluation_square(image: Tensor, size: int) -> Tensor:
    """Crop the central square of an upright image at whole pixels, and resize it once, for evaluation.

    The square has `crop_pct` of the short side, rounded to even. Its antialiased, bilinear resize is computed in
    float32 and rounded to even, as onnxruntime does (``Resize`` with ``antialias`` and ``exclude_outside``). torch's
    resize of bytes rounds more often: up to a fifth of its pixels differ by 1.

    Args:
        image: uint8 of shape (3, height, width), with any strides.
        size: side of the result, in pixels.

    Returns:
        uint8 of shape (3, size, size).
    """
    height, width = image.shape[-2:]
    side = _side_kept(height, width, size)
    top = (height - side) // 2
    left = (width - side) // 2
    square = image[:, top : top + side, left : left + side]
    if side == size:
        return square
    # Channel by channel, because float32 takes four times the memory of uint8.
    channels = []
    for channel in square:
        resized = F.interpolate(channel[None, None].float(), (size, size), mode="bilinear", antialias=True)[0, 0]
        channels.append(resized.round().clamp(0, 255).to(torch.uint8))
    return torch.stack(channels)


def evaluation_pixels(source: Source, size: int, name: str = "") -> Tensor:
    """Return the pixels of an image for validation, test, prediction and exported graphs.

    The image is decoded at full size (the first frame of an animation), put on a white background, and turned upright
    by its EXIF orientation. Then `evaluation_square` crops and resizes it. A file, its content, a PIL image and an
    array of its pixels give the same bits. `source` does not change.

    Args:
        source: path of a file, content of a file, or an image in memory.
        size: side of the network's inputs, in pixels.
        name: name of the image, for messages; by default the name of the file.

    Returns:
        uint8 of shape (3, size, size).

    Raises:
        UnreadableImage: the file is missing, damaged, too large for Pillow or not an image, has more than 8 bits, or is
            a TIFF with several pages.
    """
    pixels, _, orientation = _decode(source, name, None)
    return evaluation_square(_upright(pixels, orientation), size)
