"""Images by number, and batches of them: decoded, kept in the cache, cropped to one size, and measured."""

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from torch import Tensor

from datamodules.images.crop import Crop, centre_square, side_to_decode
from datamodules.images.decoding import UnreadableImage, decoders, is_small, load_image, open_image, unreadable
from datamodules.images.pixel_cache import PixelCache, delete_unused
from datamodules.images.source import Images
from datamodules.loading.caches import cache_folder
from datamodules.loading.file_table import FileTable
from datamodules.loading.randomness import derive_seed_at
from datamodules.loading.worker_loaders import BatchRequest, LoadedBatch

_LOOKED_AT = 100
_MEASURED = 1000
_LARGEST = 224
_MOST_IN_MEMORY = 2**32  # Bytes of small images, on a machine.


class ImageFiles:
    """Images as tensors of bytes: ``files[i]`` is `load_image` of the i-th, from a cache where it is kept.

    Args:
        files: a table of files, or images in memory.
        short_side: of the decoded images, at most.
        cache: decoded images on disk, of a table of files; without it each is decoded whenever it is read.
    """

    def __init__(self, files: Images, short_side: int, cache: PixelCache | None = None) -> None:
        self.files = files
        self.short_side = short_side
        self.cache = cache

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        """uint8 of shape (3, height, width); not to be changed.

        Raises:
            UnreadableImage: with the file's name and the reason.
        """
        if self.cache is None or not isinstance(self.files, FileTable):
            return self._read(row)
        try:
            # A file that is written again has another stamp, and is decoded again.
            stamp = derive_seed_at(0, *self.files.stamp(row))
        except OSError:
            return self._read(row)
        # Of the whole table: the parts of a set, and other splits of it, share a cache.
        place = self.files.place(row)
        image = self.cache.get(place, stamp)
        if image is None:
            image = self._read(row)
            self.cache.put(place, stamp, image)
        return image

    def _read(self, row: int) -> Tensor:
        try:
            content = self.files.read(row)
        except OSError as error:
            raise unreadable(self.files[row], error.strerror or str(error)) from error
        return load_image(content, self.short_side, name=self.files[row])


def open_images(images: Images, crop: str, size: int, limit: int) -> ImageFiles:
    """Images by number, decoded as large as they are needed; files of large ones are kept in a cache on disk.

    Args:
        crop: the name of the augmentation.
        size: of the network's inputs, in pixels.
        limit: of the cache, in bytes; 0 keeps none.
    """
    side = side_to_decode(crop, size)
    # Small images are held in memory, and those in memory need no disk.
    if not limit or not isinstance(images, FileTable) or is_small(size):
        return ImageFiles(images, side)
    folder = cache_folder("images")
    whole = images.whole()
    key = hashlib.sha256(f"{whole.digest()} {decoders()}".encode()).hexdigest()
    delete_unused(folder)
    return ImageFiles(images, side, PixelCache(folder / f"{key[:24]}-{side}", len(whole), limit))


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usual_workers(processes: int) -> int:
    """How many worker processes read large images for each of the training processes on this machine, beside a GPU.

    Beside training on the CPU they take cores away: bf16 kernels with AMX wait for each other in a loop, and one thread
    without a core makes a step many times slower.
    """
    return min(8, cores() // processes // 2)


def held_in_memory(images: ImageFiles, crop: Crop, copies: int) -> Tensor | None:
    """Small images as evaluation sees them, uint8 of shape (n, 3, size, size); None where one cannot be read.

    Also None where they are large, many or cropped at random.

    Args:
        copies: how many processes of the machine hold them.
    """
    size = crop.size
    if not (crop.is_centre and is_small(size) and 3 * size * size * len(images) * copies <= _MOST_IN_MEMORY):
        return None
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
        images: uint8 of shape (3, height, width) by sample number. A tensor of images that need no crop, as of
            `held_in_memory`, is indexed on the device that it is on.
        targets: int64 of shape (n,).
        crop: applied to each image.
    """

    def __init__(self, images: ImageFiles | Tensor, targets: Tensor, crop: Crop) -> None:
        self.images = images
        self.targets = targets
        self.crop = crop

    @property
    def is_in_memory(self) -> bool:
        """Whether a batch is one indexing operation."""
        size = (self.crop.size, self.crop.size)
        return isinstance(self.images, Tensor) and self.images.shape[2:] == size and self.crop.is_centre

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        epoch, rows = request
        size = self.crop.size
        if isinstance(self.images, Tensor) and self.is_in_memory:
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


def usual_size(files: Images) -> int | None:
    """The median of the short sides of some images, rounded up to a multiple of 8; None from 224 pixels on.

    Images that cannot be read are left out; the loaders report them.
    """
    sides = []
    for row in _evenly(len(files), _LOOKED_AT):
        with contextlib.suppress(UnreadableImage, OSError), open_image(files.read(row), "") as (image, _):
            sides.append(min(image.size))
    if not sides:
        return None
    size = int(median(sides))
    # Those of a little less than 224 are photographs that are scaled up a little.
    if size >= _LARGEST * 7 / 8:
        return None
    return max(8, -(-size // 8) * 8)


def pixel_statistics(files: Images, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and the standard deviation of the pixels, from 0 to 1, of some images, by channel, to 4 digits.

    Those that cannot be read are left out; the loaders report them.

    Args:
        size: of the square in the middle that evaluation sees.
    """
    # Whole numbers: their sums do not depend on the order.
    total = torch.zeros(3, dtype=torch.int64)
    squares = torch.zeros(3, dtype=torch.int64)
    count = 0
    images = ImageFiles(files, size)
    for row in _evenly(len(files), _MEASURED):
        with contextlib.suppress(UnreadableImage):
            pixels = centre_square(images[row], size).flatten(1).long()
            total += pixels.sum(1)
            squares += (pixels * pixels).sum(1)
            count += pixels.shape[1]
    mean = total.double() / max(1, count)
    # At least a step of a byte: images of one colour have no deviation to divide by.
    std = (squares.double() / max(1, count) - mean * mean).clamp(min=1).sqrt()
    return tuple((mean / 255).round(decimals=4).tolist()), tuple((std / 255).round(decimals=4).tolist())
