"""An image file as a tensor of bytes: the same whether it is decoded every time or kept in memory."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.file_table import FileTable
from datamodules.loading.heic import prepare_to_read
from datamodules.loading.unpacking import MOST_PIXELS, check_pixels

__all__ = ["ImageFiles", "MemoryBudget", "UnreadableImage", "load_image"]

log = logging.getLogger("lightning_recipes")


class UnreadableImage(UserError):
    """A file that cannot be decoded; the message names it."""


def _reduced(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Width and height in proportion, with a short side of `short_side` at most."""
    scale = short_side / min(size)
    return size if scale >= 1 else (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips 16 bits to 255 instead of scaling them.
        image = image.convert("F").point(lambda value: value * (1 / 257) + 0)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    if image.mode == "F":
        image = image.convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _File(NamedTuple):
    """A file of a table."""

    table: FileTable
    row: int

    def __str__(self) -> str:
        return self.table[self.row]


def _open(source: str | Path | Image.Image | _File) -> AbstractContextManager[Image.Image]:
    if isinstance(source, Image.Image):
        return nullcontext(source)
    if isinstance(source, _File):
        prepare_to_read(str(source))
        return Image.open(BytesIO(source.table.read(source.row)))
    prepare_to_read(source)
    return Image.open(source)


def _decode(source: str | Path | Image.Image | _File, short_side: int, most_pixels: int) -> Tensor:
    with _open(source) as image:
        size = _reduced(image.size, short_side)
        if size != image.size:
            # JPEG decodes to an eighth, a quarter or half of its size in a fraction of the time.
            image.draft(None, size)
        check_pixels(image.size, most_pixels)
        image.load()
        # A broken orientation tag does not make an image unreadable.
        try:
            orientation = image.getexif().get(0x0112, 1)
        except Exception:
            orientation = 1
        rgb = _as_rgb(image)
        if rgb.size != size:
            rgb = rgb.resize(size, Image.Resampling.BILINEAR)
    if orientation in _TURNS:
        rgb = rgb.transpose(_TURNS[orientation])
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


def load_image(path: str | Path | Image.Image | _File, short_side: int, most_pixels: int = MOST_PIXELS) -> Tensor:
    """An image of any size and mode, upright, in colour and on white, its short side reduced to `short_side` at most.

    Args:
        path: the file, or an image in memory.
        most_pixels: that are decoded; a JPEG is decoded at a fraction of its size.

    Returns:
        uint8 of shape (3, height, width), with the channels innermost in memory.

    Raises:
        UnreadableImage: the file is missing, damaged, too large, or not an image.
    """
    try:
        return _decode(path, short_side, most_pixels)
    except UnidentifiedImageError:
        empty = (path.table.stamp(path.row)[0] if isinstance(path, _File) else Path(str(path)).stat().st_size) == 0
        reason = "the file is empty" if empty else "its content is not an image"
    except OSError as error:
        reason = error.strerror or str(error)
    # On damaged files Pillow's decoders raise exceptions of many kinds, from SyntaxError to zlib.error.
    except Exception as error:
        reason = str(error) or type(error).__name__
    raise UnreadableImage(f"{path} cannot be read as an image: {reason}")


@dataclass
class MemoryBudget:
    """How much memory decoded images may still take, in bytes; the parts of a data set share one."""

    left: int


class ImageFiles:
    """Image files as tensors of bytes: ``files[i]`` is ``load_image`` of the i-th, from memory where it is kept.

    Workers forked from this process share its memory, and torch moves it to shared memory for those that are not.

    Args:
        files: their paths, or images in memory.
        short_side: of the decoded images, at most.
        budget: memory for decoded images; without it each is decoded whenever it is read.
        threads: how many decode at the same time.
    """

    def __init__(
        self,
        files: FileTable | Sequence[str | Image.Image],
        short_side: int,
        budget: MemoryBudget | None = None,
        threads: int = 1,
    ) -> None:
        self.files, self.short_side, self.budget, self.threads = files, short_side, budget, threads
        self.unreadable: dict[int, str] = {}
        self._kept = torch.empty(0, dtype=torch.uint8)
        self._places: dict[int, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        """uint8 of shape (3, height, width); not to be changed.

        Raises:
            UnreadableImage: with the file's name and the reason.
        """
        if row in self._places:
            start, height, width = self._places[row]
            pixels = self._kept[start : start + 3 * height * width]
            return pixels.view(height, width, 3).permute(2, 0, 1)
        if row in self.unreadable:
            raise UnreadableImage(self.unreadable[row])
        return load_image(self._source(row), self.short_side)

    def _source(self, row: int) -> str | Image.Image | _File:
        return _File(self.files, row) if isinstance(self.files, FileTable) else self.files[row]

    def prepare(self) -> None:
        """Decode what fits into the budget, the first time; the headers of the files say how much that is."""
        if self.budget is None:
            return
        budget, self.budget = self.budget, None
        rows, starts, rooms, total = [], [], [], 0
        for row in range(len(self)):
            try:
                with _open(self._source(row)) as image:
                    width, height = _reduced(image.size, self.short_side)
            except Exception:
                # The error is reported when it is decoded.
                width = height = 0
            room = 3 * width * height
            if total + room > budget.left:
                break
            rows.append(row)
            starts.append(total)
            rooms.append(room)
            total += room
        budget.left -= total
        # The first call may come from a validation, in inference mode, whose tensors cannot be written to elsewhere.
        with torch.inference_mode(False):
            self._kept = torch.empty(total, dtype=torch.uint8)
        began, logged = time.monotonic(), False
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                for _ in pool.map(self._keep, rows, starts, rooms):
                    if not logged and time.monotonic() - began > 2:
                        logged = True
                        size = f"{total / 2**30:.2f} GiB; `cache_gb` is the limit"
                        _log(f"keeping {len(rows):,} of {len(self):,} images decoded in memory ({size})")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _keep(self, row: int, start: int, room: int) -> None:
        try:
            pixels = load_image(self._source(row), self.short_side).permute(1, 2, 0)
        except UnreadableImage as error:
            self.unreadable[row] = str(error)
            return
        # Some formats hold another size than their header says; such an image is not kept.
        if pixels.numel() == room:
            self._kept[start : start + room].view_as(pixels).copy_(pixels)
            self._places[row] = (start, pixels.shape[0], pixels.shape[1])


def _log(message: str) -> None:
    # Workers that are started afresh import this module, and would pay seconds for Lightning.
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only(log.info)("%s", message)
