"""Reads images and batches of images: decoding, caches, crops, and statistics of a data set."""

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

_LOOKED_AT = 100  # Images whose sizes are read.
_MEASURED = 1000  # Images whose pixels are measured.
_LARGEST = 224
_MOST_IN_MEMORY = 2**32  # Bytes of small images that all processes of a machine keep in memory.


class ImageFiles:
    """Sequence of decoded images: ``files[i]`` is `load_image` of the i-th file, or its cached result.

    Args:
        files: a table of files, or images in memory.
        short_side: greatest short side of the decoded images, in pixels.
        cache: cache of the decoded files on disk; None decodes an image whenever it is read.
    """

    def __init__(self, files: Images, short_side: int, cache: PixelCache | None = None) -> None:
        self.files = files
        self.short_side = short_side
        self.cache = cache

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        """Return an image, uint8 of shape (3, height, width), which must not be changed.

        Raises:
            UnreadableImage: the message has the name of the file and the reason.
        """
        if self.cache is None or not isinstance(self.files, FileTable):
            return self._read(row)
        try:
            # A file that has been rewritten has another stamp, so that it is decoded again.
            stamp = derive_seed_at(0, *self.files.stamp(row))
        except OSError:
            return self._read(row)
        # The index in the full table, since the parts of a data set and all its splits share a cache.
        cache_row = self.files.place(row)
        image = self.cache.get(cache_row, stamp)
        if image is None:
            image = self._read(row)
            self.cache.put(cache_row, stamp, image)
        return image

    def _read(self, row: int) -> Tensor:
        try:
            content = self.files.read(row)
        except OSError as error:
            raise unreadable(self.files[row], error.strerror or str(error)) from error
        return load_image(content, self.short_side, name=self.files[row])


def open_images(images: Images, crop: str, size: int, limit: int) -> ImageFiles:
    """Return the decoded images at the size that the augmentation needs, with a cache on disk for large ones.

    Args:
        images: a table of files, or images in memory.
        crop: name of the augmentation.
        size: side of the network's inputs, in pixels.
        limit: greatest size of the cache, in bytes; 0 uses none.
    """
    side = side_to_decode(crop, size)
    # Small images are kept in memory instead.
    if not limit or not isinstance(images, FileTable) or is_small(size):
        return ImageFiles(images, side)
    folder = cache_folder("images")
    full_table = images.whole()
    key = hashlib.sha256(f"{full_table.digest()} {decoders()}".encode()).hexdigest()
    delete_unused(folder)
    return ImageFiles(images, side, PixelCache(folder / f"{key[:24]}-{side}", len(full_table), limit))


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usual_workers(processes: int) -> int:
    """Return the default number of loader workers for each of the training processes of this machine, on a GPU.

    When training on the CPU, workers take cores away: bf16 kernels with AMX wait for each other in a loop, so that one
    thread without a core makes a step many times slower.
    """
    return min(8, cores() // processes // 2)


def held_in_memory(images: ImageFiles, crop: Crop, copies: int) -> Tensor | None:
    """Decode all small images, centrally cropped, to uint8 of shape (n, 3, size, size).

    The result is None if the images are large, too many or cropped at random, or if one cannot be read.

    Args:
        images: the images.
        crop: the crop of each image.
        copies: number of processes of the machine that keep the images.
    """
    size = crop.size
    if not (crop.is_centre and is_small(size) and 3 * size * size * len(images) * copies <= _MOST_IN_MEMORY):
        return None
    # A validation in inference mode may be the first caller. Its tensors could not be used in training later.
    with torch.inference_mode(False):
        pixels = torch.empty((len(images), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)

    def read(row: int) -> None:
        pixels[row] = centre_square(images[row], size)

    try:
        with ThreadPoolExecutor(cores()) as pool:
            for _ in pool.map(read, range(len(images))):
                pass
    except UnreadableImage:
        return None
    return pixels


class BatchReader:
    """Reader of batches of cropped images, see `SampleReader`.

    Args:
        images: images by sample number, uint8 of shape (3, height, width). A tensor of images that need no crop, as
            `held_in_memory` returns it, is indexed on its device.
        targets: class numbers, int64 of shape (n,).
        crop: crop of each image.
    """

    def __init__(self, images: ImageFiles | Tensor, targets: Tensor, crop: Crop) -> None:
        self.images = images
        self.targets = targets
        self.crop = crop

    @property
    def is_in_memory(self) -> bool:
        """Whether reading a batch is one indexing operation."""
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
        # In the layout channels_last, which decoders write and in which resizing is fastest.
        inputs = torch.empty((len(rows), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        # One thread, as torch has in a worker: an image is too small to gain from more.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for row, draws in zip(rows, self.crop.draws(rows, epoch)):
                try:
                    # Readable images move up, so that the batch is a slice without gaps.
                    inputs[len(kept)] = self.crop(self.images[row], draws)
                except UnreadableImage as error:
                    unreadable.append((row, str(error)))
                else:
                    kept.append(row)
        finally:
            torch.set_num_threads(threads)
        numbers = torch.tensor(kept, dtype=torch.int64)
        return LoadedBatch(inputs[: len(kept)], self.targets[numbers], numbers, unreadable)


def _evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers from 0 to `count` - 1."""
    return list(range(0, count, -(-count // most)))


def usual_size(files: Images) -> int | None:
    """Return the median short side of some images, rounded up to a multiple of 8; None for about 224 pixels or more.

    Unreadable images are left out, since the loaders report them.
    """
    sides = []
    for row in _evenly_spaced(len(files), _LOOKED_AT):
        with contextlib.suppress(UnreadableImage, OSError), open_image(files.read(row), "") as (image, _):
            sides.append(min(image.size))
    if not sides:
        return None
    size = int(median(sides))
    # Images of slightly less than 224 pixels count as photographs, which are enlarged slightly.
    if size >= _LARGEST * 7 / 8:
        return None
    return max(8, -(-size // 8) * 8)


def pixel_statistics(files: Images, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of some images, of pixels from 0 to 1, rounded to 4 digits.

    Unreadable images are left out, since the loaders report them.

    Args:
        files: the images.
        size: side of the central crop that is measured, in pixels.
    """
    # Sums of integers are exact: those of floats would be rounded, differently on different machines.
    total = torch.zeros(3, dtype=torch.int64)
    squares = torch.zeros(3, dtype=torch.int64)
    count = 0
    images = ImageFiles(files, size)
    for row in _evenly_spaced(len(files), _MEASURED):
        with contextlib.suppress(UnreadableImage):
            pixels = centre_square(images[row], size).flatten(1).long()
            total += pixels.sum(1)
            squares += (pixels * pixels).sum(1)
            count += pixels.shape[1]
    mean = total.double() / max(1, count)
    # A std of at least 1/255, since images of one colour would lead to a division by zero.
    std = (squares.double() / max(1, count) - mean * mean).clamp(min=1).sqrt()
    return tuple((mean / 255).round(decimals=4).tolist()), tuple((std / 255).round(decimals=4).tolist())
