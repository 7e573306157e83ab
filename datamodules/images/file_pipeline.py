"""Pipeline of image files: decoding, caches, crops, augmentation, worker processes, and pixel statistics.

Tested in `tests/datamodules/images/test_image_folder.py`.
"""

import contextlib
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.base import Process
from datamodules.errors import UserError, spelled
from datamodules.images.arrays import InputImages
from datamodules.images.augmentation import (
    AUGMENTATIONS,
    BatchAugmentation,
    Mixing,
    Normalize,
    check_statistics,
    describe_augmentation,
    normalizer,
)
from datamodules.images.builtin_datasets import IMAGE_SETS, IMAGENET_MEAN
from datamodules.images.decoding import (
    Crop,
    UnreadableImage,
    center_square,
    decoders,
    evaluation_pixels,
    is_small,
    load_image,
    open_image,
    side_to_decode,
    unreadable,
)
from datamodules.images.image_data import Order, Part, Pipeline, Statistics
from datamodules.images.pixel_cache import PixelCache, delete_unused
from datamodules.images.source import ArrayImages, Images
from datamodules.loading.file_table import FileTable, cache_folder
from datamodules.loading.randomness import derive_seed_at
from datamodules.loading.worker_loaders import BatchRequest, LoadedBatch, WorkerEvaluationLoader, WorkerTrainLoader
from datamodules.ranges import NOT_NEGATIVE, Range, check_choice, check_ranges

_SIZE_SAMPLES = 100  # Images whose sizes are read.
_STATISTICS_SAMPLES = 1000  # Images whose pixels are measured.
_MAX_USUAL_SIZE = 224
_MAX_BYTES_IN_MEMORY = 2**32  # Bytes of small images that all processes of a machine keep in memory.


class ImageFiles:
    """Decoded images: ``files[i]`` is the i-th image, for training or for evaluation, decoded or from a cache.

    Args:
        files: a table of files, or images in memory.
        side: largest short side of a decoded image, in pixels (`load_image`); for evaluation, the side of the square
            (`evaluation_pixels`).
        cache: cache of the decoded files on disk; None decodes an image every time it is read.
        evaluation: whether images are decoded by `evaluation_pixels`.
    """

    def __init__(self, files: Images, side: int, cache: PixelCache | None = None, evaluation: bool = False) -> None:
        self.files = files
        self.side = side
        self.cache = cache
        self.evaluation = evaluation
        # Empty before the first call of `held`; then all images as one tensor, or None if they are not kept in memory.
        self._held: list[Tensor | None] = []

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Tensor:
        """Return an image, uint8 of shape (3, height, width). Do not change it: it may be memory of a cache.

        Raises:
            UnreadableImage: the message has the name of the file and the reason.
        """
        if self.cache is None or not isinstance(self.files, FileTable):
            return self._read(row)
        try:
            # A rewritten file has another stamp, so it is decoded again.
            stamp = derive_seed_at(0, *self.files.stamp(row))
        except OSError:
            return self._read(row)
        # Indexed by the full table, because all parts and splits of a data set share a cache.
        cache_row = self.files.base_row(row)
        image = self.cache.get(cache_row, stamp)
        if image is None:
            image = self._read(row)
            self.cache.put(cache_row, stamp, image)
        return image

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": []}

    def held(self, size: int, process: Process) -> Tensor | None:
        """Return all images on the device of the process, see `held_in_memory`. They are read once."""
        if not self._held:
            pixels = held_in_memory(self, size, process.on_machine)
            self._held.append(None if pixels is None else pixels.to(process.device))
        return self._held[0]

    def _read(self, row: int) -> Tensor:
        try:
            content = self.files.read(row)
        except OSError as error:
            raise unreadable(self.files[row], error.strerror or str(error)) from error
        read = evaluation_pixels if self.evaluation else load_image
        return read(content, self.side, name=self.files[row])


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usual_workers(processes: int) -> int:
    """Return the default number of loader workers for each training process of this machine, on a GPU.

    On a CPU the default is 0, because workers compete for the cores: the threads of bf16 kernels with AMX wait for each
    other in a loop, so one thread without a core makes a step many times slower.
    """
    return min(8, cores() // processes // 2)


def held_in_memory(images: ImageFiles, size: int, copies: int) -> Tensor | None:
    """Decode all small images, centrally cropped, to uint8 of shape (n, 3, size, size).

    The result is None if the images are large or too many, or if an image is unreadable.

    Args:
        images: the images.
        size: side of the network's inputs, in pixels.
        copies: number of processes on this machine that keep the images.
    """
    if not is_small(size) or 3 * size * size * len(images) * copies > _MAX_BYTES_IN_MEMORY:
        return None
    # The first caller may be a validation in inference mode, and inference tensors cannot be used in training later.
    with torch.inference_mode(False):
        arrays = images.files
        if isinstance(arrays, ArrayImages) and arrays.pixels.shape[1:] == (size, size, 3):
            # Decoding would give the same bytes.
            return torch.tensor(arrays.pixels).permute(0, 3, 1, 2)
        pixels = torch.empty((len(images), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)

    def read(row: int) -> None:
        pixels[row] = images[row] if images.evaluation else center_square(images[row], size)

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
        images: images by sample number, uint8 of shape (3, height, width). A tensor, as from `held_in_memory`, holds
            images that need no crop, and is indexed on its device.
        targets: class numbers, int64 of shape (n,).
        crop: crop of each image. Images for evaluation are already squares of its size.
    """

    def __init__(self, images: ImageFiles | Tensor, targets: Tensor, crop: Crop) -> None:
        self.images = images
        self.targets = targets
        self.crop = crop
        self._are_squares = isinstance(images, ImageFiles) and images.evaluation

    @property
    def is_in_memory(self) -> bool:
        """Whether reading a batch is one indexing operation."""
        size = (self.crop.size, self.crop.size)
        return isinstance(self.images, Tensor) and self.images.shape[2:] == size and self.crop.is_center

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        epoch, rows = request
        size = self.crop.size
        if isinstance(self.images, Tensor) and self.is_in_memory:
            numbers = torch.tensor(rows, dtype=torch.int64)
            samples = numbers % len(self.targets)
            inputs = self.images.index_select(0, samples.to(self.images.device, non_blocking=True))
            return LoadedBatch(inputs, self.targets[samples], numbers, [])
        errors: list[tuple[int, UserError]] = []
        kept: list[int] = []
        # In channels_last: the layout of decoders, and the fastest one for resizing.
        inputs = torch.empty((len(rows), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        # One thread, as in a worker process: an image is too small for more.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for number, draws in zip(rows, self.crop.draws(rows, epoch)):
                # Repeated draws of a sample have different numbers, see `number_draws`.
                row = number % len(self.targets)
                try:
                    image = self.images[row]
                    # Unreadable images leave no gap, so that the batch is a slice.
                    inputs[len(kept)] = image if self._are_squares else self.crop(image, draws)
                except UnreadableImage as error:
                    # Without its traceback, whose frames would keep the batch in memory.
                    errors.append((row, error.with_traceback(None)))
                else:
                    kept.append(number)
        finally:
            torch.set_num_threads(threads)
        numbers = torch.tensor(kept, dtype=torch.int64)
        return LoadedBatch(inputs[: len(kept)], self.targets[numbers % len(self.targets)], numbers, errors)


def _evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers in ``range(count)``."""
    return list(range(0, count, -(-count // most)))


def usual_size(files: Images) -> int | None:
    """Return the median short side of a sample of images, rounded up to a multiple of 8; None from about 224 pixels on.

    Unreadable images are left out; the loaders report them.
    """
    sides = []
    for row in _evenly_spaced(len(files), _SIZE_SAMPLES):
        with contextlib.suppress(UnreadableImage, OSError), open_image(files.read(row), "") as (image, _):
            sides.append(min(image.size))
    if not sides:
        return None
    size = int(median(sides))
    # Images slightly below 224 pixels count as photographs, and are enlarged.
    if size >= _MAX_USUAL_SIZE * 7 / 8:
        return None
    return max(8, -(-size // 8) * 8)


def pixel_statistics(files: Images, size: int) -> Statistics:
    """Return mean and standard deviation of each channel of a sample of images, for pixels from 0 to 1, with 4 digits.

    Unreadable images are left out; the loaders report them.

    Args:
        files: the images.
        size: side of the central crop that is measured, in pixels.
    """
    # Integer sums are exact. Sums of floats would be rounded, differently on different machines.
    total = torch.zeros(3, dtype=torch.int64)
    squares = torch.zeros(3, dtype=torch.int64)
    count = 0
    for row in _evenly_spaced(len(files), _STATISTICS_SAMPLES):
        with contextlib.suppress(UnreadableImage, OSError):
            image = load_image(files.read(row), side_to_decode("none", size))
            pixels = center_square(image, size).flatten(1).long()
            total += pixels.sum(1)
            squares += (pixels * pixels).sum(1)
            count += pixels.shape[1]
    mean = total.double() / max(1, count)
    # The std is at least 1/255: images of one color would otherwise cause a division by zero.
    std = (squares.double() / max(1, count) - mean * mean).clamp(min=1).sqrt()
    return tuple((mean / 255).round(decimals=4).tolist()), tuple((std / 255).round(decimals=4).tolist())


class FilePipeline(Pipeline):
    """Pipeline of images in color: files or arrays that are decoded, cached, cropped and augmented.

    Args:
        image_size: side of the network's inputs in pixels; None: 32 for digits, else 224, or the size of the files if
            they are smaller.
        augment: "none", "light" (shifts and mirroring), "standard" (random crops, mirroring, colors), or "auto": light
            below 64 pixels, else standard.
        mixup: alpha of MixUp (Zhang et al., 2018); 0 is off.
        cutmix: alpha of CutMix (Yun et al., 2019); 0 is off.
        num_workers: worker processes; None: half of the cores per device, at most 8, and 0 on a CPU.
        cache_gb: disk space for the decoded images of each part, in GiB.
        pixel_mean: mean of each channel, for pixels from 0 to 1; None: ImageNet's, or measured below 64 pixels.
        pixel_std: standard deviation of each channel.
        on_corrupt: "error" or "skip" for images that cannot be read.
    """

    sets: ClassVar = IMAGE_SETS
    own: ClassVar = "folder"

    def __init__(
        self,
        image_size: int | None = None,
        augment: str = "auto",
        mixup: float = 0.0,
        cutmix: float = 0.0,
        num_workers: int | None = None,
        cache_gb: float = 2.0,
        pixel_mean: Sequence[float] | None = None,
        pixel_std: Sequence[float] | None = None,
        on_corrupt: str = "error",
    ) -> None:
        check_choice("augment", augment, ("auto", *AUGMENTATIONS))
        check_choice("on_corrupt", on_corrupt, ("error", "skip"))
        check_ranges(
            image_size=(image_size, Range(8, 2**14, whole=True)),
            mixup=(mixup, NOT_NEGATIVE),
            cutmix=(cutmix, NOT_NEGATIVE),
            num_workers=(num_workers, Range(0, 1024, whole=True)),
            cache_gb=(cache_gb, Range(0, 2**20)),
        )
        super().__init__(
            image_size=image_size,
            augment=augment,
            mixup=mixup,
            cutmix=cutmix,
            num_workers=num_workers,
            cache_gb=cache_gb,
            pixel_mean=check_statistics("pixel_mean", pixel_mean, least=0),
            pixel_std=check_statistics("pixel_std", pixel_std, least=1e-6),
            on_corrupt=on_corrupt,
        )
        self._saved: Mapping[str, Any] = {}
        # Weak references: a discarded loader ends its workers, for example if each epoch builds a new loader.
        self._loaders: weakref.WeakSet[WorkerTrainLoader | WorkerEvaluationLoader] = weakref.WeakSet()

    @property
    @override
    def image_size(self) -> int:
        known = self.settings["image_size"] or self._saved.get("image_size")
        return int(known or self._size_of_files or self.data_set.info.image_size)

    @cached_property
    def _size_of_files(self) -> int | None:
        """Size that suits the user's images; None if they are large or not known yet."""
        data = self.data_set
        if not data.is_own or not (data.is_read or self.settings.get("data_dir")):
            return None
        return usual_size(data.source.parts["train"].images)

    @property
    def augment(self) -> str:
        """Name of the augmentation of training images."""
        name: str = self.settings["augment"]
        if name == "auto":
            return "light" if is_small(self.image_size) else "standard"
        return name

    def check_unaugmented(self) -> None:
        """Raise a UserError if training images change from epoch to epoch; its `to_type` turns that off."""
        parameters = [] if self.augment == "none" else [spelled("augment", "none")]
        parameters += [spelled(name, 0) for name in ("mixup", "cutmix") if self.settings[name]]
        if parameters:
            raise UserError("these are augmented", to_type=f"pass {' and '.join(parameters)}")

    @property
    def _mixes(self) -> bool:
        return bool(self.settings["mixup"] or self.settings["cutmix"])

    @property
    @override
    def statistics(self) -> Statistics:
        mean, std = self.settings["pixel_mean"], self.settings["pixel_std"]
        if mean is None or std is None:
            info = self.data_set.info
            known = self._saved.get("statistics") or self._statistics_of_files or (info.mean, info.std)
            mean, std = mean or known[0], std or known[1]
        return tuple(mean), tuple(std)

    @cached_property
    def _statistics_of_files(self) -> Statistics | None:
        """Statistics of the user's images if they are small: published weights are not made for small images."""
        if self._saved or not self.data_set.is_own or not is_small(self.image_size):
            return None
        return pixel_statistics(self.data_set.source.parts["train"].images, self.image_size)

    @override
    def resolve(self) -> dict[str, Any]:
        """Return image size, augmentation and pixel statistics. Reads some of the user's images."""
        mean, std = self.statistics
        self._note_choices()
        names = {"image_size": self.image_size, "augment": self.augment}
        return {**names, "pixel_mean": list(mean), "pixel_std": list(std)}

    def _note_choices(self) -> None:
        """Log the settings that follow from the data."""
        info = self.data_set.info
        chosen = []
        if self.settings["image_size"] is None:
            why = " as the files have" if self.data_set.is_own and self._size_of_files else ""
            chosen.append(f"images of {self.image_size} pixels{why}")
        if self.settings["augment"] == "auto":
            chosen.append(f"augment={self.augment!r} ({describe_augmentation(self.augment, info.flip)})")
        mean = ", ".join(f"{value:.3f}" for value in self.statistics[0])
        whose = "their"
        if self.settings["pixel_mean"] is not None:
            whose = "the"
        if self.statistics[0] == IMAGENET_MEAN:
            whose = "ImageNet's"
        chosen.append(f"pixels normalized by {whose} mean ({mean})")
        self.note(f"{info.title}: {', '.join(chosen)}")

    def normalizer(self, device: torch.device) -> Normalize:
        """Return the normalization of uint8 images on a device."""
        return normalizer(*self.statistics, device)

    @override
    def open(self, part: str, published: str, rows: Tensor | None, process: Process) -> Part:
        images, labels = self.data_set.source.parts[published]
        if rows is not None:
            images = images.select(rows)
            labels = labels[rows]
        if self._size_of_files and self.settings["image_size"] is None:
            self._note_choices()
        files = self._decoded(images, self.augment if part == "train" else None)
        # Samples are numbered within their part. Their random numbers are a function of these numbers.
        names = images if isinstance(images, FileTable) else ()
        return Part(files, labels, torch.arange(len(labels)), names)

    def _decoded(self, images: Images, augment: str | None) -> ImageFiles:
        """Return the decoded images, with a cache on disk for large files.

        Args:
            images: the images.
            augment: name of the augmentation, which determines the decoded size; None: for evaluation.
        """
        evaluation = augment is None
        side = self.image_size if augment is None else side_to_decode(augment, self.image_size)
        limit = int(self.settings["cache_gb"] * 2**30)
        # Small images are kept in memory, not on disk.
        if not limit or not isinstance(images, FileTable) or is_small(self.image_size):
            return ImageFiles(images, side, None, evaluation)
        folder = cache_folder("images")
        full_table = images.base_table()
        use = "evaluation" if evaluation else "training"
        key = hashlib.sha256(f"{full_table.digest()} {decoders()} {use}".encode()).hexdigest()
        delete_unused(folder)
        cache = PixelCache(folder / f"{key[:24]}-{side}", len(full_table), limit)
        return ImageFiles(images, side, cache, evaluation)

    def _reader(self, part: Part, augment: str, process: Process, hold: bool = True) -> BatchReader:
        """Return the reader of a part. Small images are kept in memory, at one size, on the device of the process."""
        crop = Crop(augment, self.image_size, self.settings["seed"])
        held = part.images.held(crop.size, process) if hold and crop.is_center else None
        return BatchReader(part.images if held is None else held, part.labels, crop)

    def _options(self, reader: BatchReader, augment: str, process: Process) -> dict[str, Any]:
        """Return the arguments that training and evaluation loaders have in common."""
        info = self.data_set.info
        workers = self.settings["num_workers"]
        if reader.is_in_memory:
            workers = 0
        elif workers is None:
            # Starting a process takes longer than decoding the digits.
            beside_gpu = info.natural_images and process.device.type != "cpu"
            workers = usual_workers(process.on_machine) if beside_gpu else 0
        return {
            "num_workers": workers,
            "pin_memory": process.device.type == "cuda",
            "device": process.device,
            "transform": BatchAugmentation(augment, self.image_size, self.settings["seed"], info.flip, self.normalizer),
            "rank": process.rank,
            "world_size": process.world_size,
        }

    @override
    def train(self, part: Part, order: Order, process: Process) -> WorkerTrainLoader:
        options = self.settings
        reader = self._reader(part, self.augment, process)
        mix = None
        if self._mixes:
            mix = Mixing(options["mixup"], options["cutmix"], self.data_set.num_classes, order.seed)
        loader = WorkerTrainLoader(
            reader,
            part.rows,
            **order._asdict(),
            names=part.names,
            mix=mix,
            skip_unreadable=options["on_corrupt"] == "skip",
            **self._options(reader, self.augment, process),
        )
        self._loaders.add(loader)
        return loader

    @override
    def evaluate(self, part: Part, batch_size: int, process: Process) -> WorkerEvaluationLoader:
        return self._evaluation_loader(self._reader(part, "none", process), batch_size, process)

    def _evaluation_loader(
        self,
        reader: BatchReader,
        batch_size: int,
        process: Process,
        skip: bool = False,
        rows: Tensor | None = None,
    ) -> WorkerEvaluationLoader:
        loader = WorkerEvaluationLoader(
            reader,
            torch.arange(len(reader.targets)) if rows is None else rows,
            batch_size,
            skip_unreadable=skip or self.settings["on_corrupt"] == "skip",
            **self._options(reader, "none", process),
        )
        self._loaders.add(loader)
        return loader

    @override
    def predict(self, images: InputImages, batch_size: int, process: Process) -> WorkerEvaluationLoader:
        numbers = torch.arange(len(images))
        reader = self._reader(Part(self._decoded(images, None), numbers, numbers), "none", process, hold=False)
        loader = self._evaluation_loader(reader, batch_size, process, skip=True)
        # Unreadable images are rows of the table of predictions, so no warning is needed.
        loader.warn_unreadable = False
        self.unreadable = loader.unreadable
        return loader

    def numbered_batches(
        self, part: Part, batch_size: int, process: Process, chosen: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (normalized images, labels, sample numbers) of a part on the device, without augmentation.

        Args:
            chosen: sample numbers, int64 of shape (m,), without unreadable samples; None: all samples.
        """
        reader = self._reader(part, "none", process)
        loader = self._evaluation_loader(reader, batch_size, process, skip=chosen is not None, rows=chosen)
        normalize = self.normalizer(process.device)
        try:
            for batch in loader.loaded_batches():
                images = normalize(batch.inputs.to(process.device, non_blocking=True))
                targets, rows = (ints.to(process.device, non_blocking=True) for ints in (batch.targets, batch.rows))
                yield images, targets, rows
        finally:
            loader.close()
            self._loaders.discard(loader)

    @property
    @override
    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the size of the inputs and the statistics of the normalization."""
        mean, std = self.statistics
        return {"image_size": self.image_size, "statistics": [list(mean), list(std)]}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self._saved = dict(state)

    @override
    def close(self) -> None:
        for loader in list(self._loaders):
            loader.close()
        self._loaders.clear()
