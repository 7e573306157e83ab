"""An image file as a tensor of bytes: the same whether it is decoded every time or kept in memory."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from datamodules.images.pixel_cache import PixelCache, stamp_of
from datamodules.loading.file_table import FileTable
from datamodules.loading.open_image import Source, open_image, unreadable, without_alpha

__all__ = ["ImageFiles", "decoders", "load_image", "resized"]

_RULES = 3  # Of this file and of `open_image`, by which the same content has the same pixels.


@cache
def decoders() -> str:
    """What the pixels of an image depend on besides its file, for the names of caches."""
    found = [str(_RULES)]
    for package in ("pillow", "pillow-heif", "torch", "torchvision"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("")
    return " ".join(found)


def _reduced(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Width and height in proportion, with a short side of `short_side` at most."""
    scale = short_side / min(size)
    return size if scale >= 1 else (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


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


def _decode(source: Source, short_side: int, name: str) -> Tensor:
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
    return _decode(source, short_side, name)


class ImageFiles:
    """Image files as tensors of bytes: ``files[i]`` is `load_image` of the i-th, from a cache where it is kept.

    Args:
        files: a table of them, or paths and images in memory.
        short_side: of the decoded images, at most.
        cache: decoded images on disk, of the table's files; without it each is decoded whenever it is read.
    """

    def __init__(
        self,
        files: FileTable | Sequence[str | Image.Image],
        short_side: int,
        cache: PixelCache | None = None,
    ) -> None:
        self.files, self.short_side, self.cache = files, short_side, cache

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        """uint8 of shape (3, height, width); not to be changed.

        Raises:
            UnreadableImage: with the file's name and the reason.
        """
        if not isinstance(self.files, FileTable):
            return load_image(self.files[row], self.short_side)
        if self.cache is None:
            return self._read(self.files, row)
        try:
            stamp = stamp_of(*self.files.stamp(row))
        except OSError:
            return self._read(self.files, row)
        place = self.files.place(row)
        image = self.cache.get(place, stamp)
        if image is None:
            image = self._read(self.files, row)
            self.cache.put(place, stamp, image)
        return image

    def _read(self, files: FileTable, row: int) -> Tensor:
        name = files[row]
        try:
            content = files.read(row)
        except OSError as error:
            raise unreadable(name, error.strerror or str(error)) from error
        return load_image(content, self.short_side, name=name)
