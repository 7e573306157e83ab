"""Images by number, and batches of them: decoded, kept in the cache, cropped to one size, and measured."""

import contextlib
import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from statistics import median

import torch
from PIL import Image
from torch import Tensor

from datamodules.images.decoding import UnreadableImage, decoders, is_small, load_image, resized, unreadable
from datamodules.images.file_table import FileTable
from datamodules.images.pixel_cache import PixelCache, cache_folder, delete_unused
from datamodules.loading.randomness import derive_seed_at, uniform
from datamodules.loading.worker_loaders import BatchRequest, LoadedBatch

# Where every pixel counts, evaluation keeps the whole short side, and crops are mild.
_KEPT = 7 / 8
# The least share of the area that a random crop takes: the usual 0.08 is for runs of a hundred epochs.
_LEAST_AREA, _LEAST_AREA_SMALL = 0.25, 0.64
_TRIES = 10
_LOOKED_AT, _MEASURED = 100, 1000
_LARGEST = 224
_MOST_IN_MEMORY = 2**32  # Bytes of small images, on a machine.


class ImageFiles:
    """Image files as tensors of bytes: ``files[i]`` is `load_image` of the i-th, from a cache where it is kept.

    Args:
        files: a table of them, or paths and images in memory.
        short_side: of the decoded images, at most.
        cache: decoded images on disk, of the table's files; without it each is decoded whenever it is read.
    """

    def __init__(
        self, files: FileTable | Sequence[str | Image.Image], short_side: int, cache: PixelCache | None = None
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
            stamp = derive_seed_at(0, *self.files.stamp(row))
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


def share_kept(size: int) -> float:
    """The share of an image's short side that evaluation keeps, for images of `size` pixels."""
    return 1.0 if is_small(size) else _KEPT


def _resized(image: Tensor, top: int, left: int, height: int, width: int, size: int) -> Tensor:
    """A part of an image, scaled to a square: uint8 of shape (3, size, size)."""
    part = image[:, top : top + height, left : left + width]
    if part.shape[1:] == (size, size):
        return part
    return resized(part, size, size)


def _side_kept(height: int, width: int, size: int) -> int:
    return max(1, round(min(height, width) * share_kept(size)))


def centre_square(image: Tensor, size: int) -> Tensor:
    """The middle of an image as evaluation sees it, small images scaled up.

    It is what resizing the short side to 8/7 of `size` and cropping the centre keep, in one step; below 64 pixels the
    whole short side is kept.

    Args:
        image: uint8 of shape (3, height, width).

    Returns:
        uint8 of shape (3, size, size).
    """
    height, width = image.shape[-2:]
    side = _side_kept(height, width, size)
    return _resized(image, (height - side) // 2, (width - side) // 2, side, side, size)


def _placed(draw: float, length: int, part: int) -> int:
    return min(int(draw * (length - part + 1)), length - part)


def crop_box(height: int, width: int, least_area: float, draws: Sequence[float]) -> tuple[int, int, int, int]:
    """A random crop as torchvision's RandomResizedCrop draws it (Szegedy et al., 2015).

    Args:
        height: of the image, in pixels, as `width`.
        least_area: the least share of the image's area; the greatest is 1.
        draws: 22 numbers from 0 to 1: the place, and ten tries of area and ratio of the sides, 3/4 to 4/3.

    Returns:
        Top, left, height and width. Where no try fits, the largest part in the middle with a ratio in these limits.
    """
    least_ratio, greatest_ratio = math.log(3 / 4), math.log(4 / 3)
    for i in range(2, 2 + 2 * _TRIES, 2):
        area = height * width * (least_area + draws[i] * (1 - least_area))
        ratio = math.exp(least_ratio + draws[i + 1] * (greatest_ratio - least_ratio))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return _placed(draws[0], height, h), _placed(draws[1], width, w), h, w
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class Crop:
    """The first part of a named augmentation: from a decoded image of any shape to the size of the network's inputs.

    Args:
        name: "none", and "light" for small images: the centre, as in evaluation. "light" otherwise: a square as large
            as evaluation's, anywhere. "standard": a random part, scaled (`crop_box`).
        size: of the square, in pixels.
        seed: the run's.
    """

    name: str
    size: int
    seed: int

    @property
    def is_centre(self) -> bool:
        """Whether the crop is that of evaluation, in every epoch."""
        return self.name == "none" or (self.name == "light" and is_small(self.size))

    def draws(self, numbers: Sequence[int], epoch: int) -> list[list[float]]:
        """The random numbers of some samples."""
        if self.is_centre or not numbers:
            return [[] for _ in numbers]
        index = torch.tensor(numbers, dtype=torch.int64)
        found: list[list[float]] = uniform(self.seed, "crop", epoch, index, 2 + 2 * _TRIES).tolist()
        return found

    def __call__(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """An image, given its random numbers: uint8 of shape (3, height, width) to (3, size, size)."""
        if self.is_centre:
            return centre_square(image, self.size)
        height, width = image.shape[-2:]
        if self.name == "light":
            side = _side_kept(height, width, self.size)
            top, left = _placed(draws[0], height, side), _placed(draws[1], width, side)
            return _resized(image, top, left, side, side, self.size)
        box = crop_box(height, width, _LEAST_AREA_SMALL if is_small(self.size) else _LEAST_AREA, draws)
        return _resized(image, *box, self.size)


def open_images(
    images: FileTable | Sequence[str | Image.Image] | Tensor, crop: str, size: int, limit: int
) -> ImageFiles | Tensor:
    """Images by number, decoded as large as they are needed; files of large ones are kept in a cache on disk.

    Evaluation and shifts take a fixed share of the short side, without scaling again; a random crop of a quarter of the
    area still has a pixel for each of the network's.

    Args:
        crop: the name of the augmentation.
        size: of the network's inputs, in pixels.
        limit: of the cache, in bytes; 0 keeps none.
    """
    if isinstance(images, Tensor):
        return images
    side = 2 * size if crop == "standard" else round(size / share_kept(size))
    if not limit or not isinstance(images, FileTable) or is_small(size):
        return ImageFiles(images, side)
    folder, whole = cache_folder("images"), images.whole()
    key = hashlib.sha256(f"{whole.digest()} {decoders()}".encode()).hexdigest()
    delete_unused(folder)
    return ImageFiles(images, side, PixelCache(folder / f"{key[:24]}-{side}", len(whole), limit))


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def held_in_memory(images: ImageFiles | Tensor, crop: Crop, copies: int) -> Tensor | None:
    """Small images as evaluation sees them, uint8 of shape (n, 3, size, size); None where one cannot be read.

    None, too, where they are large, many or cropped at random.

    Args:
        copies: how many processes of the machine hold them.
    """
    size = crop.size
    if not (crop.is_centre and is_small(size) and 3 * size * size * len(images) * copies <= _MOST_IN_MEMORY):
        return None
    if isinstance(images, Tensor) and images.shape[2:] == (size, size):
        return images
    # A validation, in inference mode, may be the first to need it.
    with torch.inference_mode(False):
        held = torch.empty((len(images), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)

    def read(row: int) -> None:
        held[row] = centre_square(images[row], size)

    try:
        with ThreadPoolExecutor(cores()) as pool:
            for _ in pool.map(read, range(len(images))):
                pass
    except UnreadableImage:
        return None
    return held


class BatchReader:
    """Makes batches of images of one size: read and cropped.

    Args:
        images: uint8 of shape (3, height, width) by sample number. A tensor of images that need no crop is indexed, on
            the device that it is on.
        targets: int64 of shape (n,).
        crop: applied to each image.
    """

    def __init__(self, images: ImageFiles | Tensor, targets: Tensor, crop: Crop) -> None:
        self.images, self.targets, self.crop = images, targets, crop

    @property
    def is_in_memory(self) -> bool:
        """Whether a batch is one indexing operation."""
        ready = isinstance(self.images, Tensor) and self.images.shape[2:] == (self.crop.size, self.crop.size)
        return ready and self.crop.is_centre

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        epoch, rows = request
        size = self.crop.size
        if self.is_in_memory and isinstance(self.images, Tensor):
            numbers = torch.tensor(rows, dtype=torch.int64)
            inputs = self.images.index_select(0, numbers.to(self.images.device, non_blocking=True))
            return LoadedBatch(inputs, self.targets[numbers], numbers, [])
        unreadable: list[tuple[int, str]] = []
        kept: list[int] = []
        # With the channels innermost, as decoders write them and scaling is fastest.
        inputs = torch.empty((len(rows), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        # One thread, as in a worker: an image is too small for more.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for row, draws in zip(rows, self.crop.draws(rows, epoch)):
                try:
                    inputs[len(kept)] = self.crop(self.images[row], draws)
                except UnreadableImage as error:
                    unreadable.append((row, str(error)))
                else:
                    kept.append(row)
        finally:
            torch.set_num_threads(threads)
        numbers = torch.tensor(kept, dtype=torch.int64)
        return LoadedBatch(inputs[: len(kept)], self.targets[numbers], numbers, unreadable)


def _evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spaced."""
    return list(range(0, count, -(-count // most)))


def usual_size(files: FileTable) -> int | None:
    """The median of the short sides of some files, rounded up to a multiple of 8; None from 224 pixels on.

    Files that cannot be read are left out; the loaders report them.
    """
    sides = []
    for row in _evenly(len(files), _LOOKED_AT):
        with contextlib.suppress(Exception), Image.open(BytesIO(files.read(row))) as image:
            sides.append(min(image.size))
    size = int(median(sides)) if sides else _LARGEST
    # Those of a little less than 224 are photographs that are scaled up a little.
    return None if size >= _LARGEST * 7 / 8 else max(8, -(-size // 8) * 8)


def pixel_statistics(files: FileTable, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of the pixels, from 0 to 1, of some images, by channel, to 4 digits.

    Those that cannot be read are left out; the loaders report them.

    Args:
        size: of the square in the middle that evaluation sees.
    """
    total = torch.zeros(3, dtype=torch.int64)
    squares, count = total.clone(), 0
    images = ImageFiles(files, size)
    for row in _evenly(len(files), _MEASURED):
        with contextlib.suppress(UnreadableImage):
            pixels = centre_square(images[row], size).flatten(1).long()
            total += pixels.sum(1)
            squares += (pixels * pixels).sum(1)
            count += pixels.shape[1]
    mean = total.double() / max(1, count)
    std = (squares.double() / max(1, count) - mean * mean).clamp(min=1).sqrt()
    return tuple((mean / 255).round(decimals=4).tolist()), tuple((std / 255).round(decimals=4).tolist())
