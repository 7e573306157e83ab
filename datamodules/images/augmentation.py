"""Augmentation by name, and MixUp and CutMix, as functions of (seed, epoch, sample) and of nothing else.

The crop of an image is made where it is read: afterwards all images have one size. Flips, shifts, colours and mixtures
then take a whole batch at a time, on the device. No step depends on which other samples share the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.files import resized
from datamodules.loading.normalise import Normalise
from datamodules.loading.open_image import UnreadableImage
from datamodules.loading.randomness import alternating_flips, uniform
from datamodules.loading.worker_loaders import BatchRequest, LoadedBatch

__all__ = [
    "AUGMENTATIONS",
    "BatchAugmentation",
    "BatchReader",
    "Crop",
    "Mixing",
    "adjust_colours",
    "centre_square",
    "crop_box",
    "decoded_side",
    "is_small",
    "share_kept",
    "shift_and_flip",
]

AUGMENTATIONS = ("none", "light", "standard")

# Where every pixel counts, evaluation keeps the whole short side, and crops are mild.
_SMALL = 64
_KEPT = 7 / 8
# The least share of the area that a random crop takes: the usual 0.08 is for runs of a hundred epochs.
_LEAST_AREA, _LEAST_AREA_SMALL = 0.25, 0.64
_COLOUR = 0.2
_TRIES = 10


def is_small(size: int) -> bool:
    """Whether images of `size` pixels are augmented as CIFAR's are, by shifts, and not by crops of photographs."""
    return size < _SMALL


def share_kept(size: int) -> float:
    """The share of an image's short side that evaluation keeps, for images of `size` pixels."""
    return 1.0 if is_small(size) else _KEPT


def decoded_side(name: str, size: int) -> int:
    """The short side, in pixels, to which larger images are reduced while they are decoded.

    Evaluation and shifts take a fixed share of it, without scaling again; a random crop of a quarter of the area still
    has a pixel for each of the network's.
    """
    return 2 * size if name == "standard" else round(size / share_kept(size))


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

    def __post_init__(self) -> None:
        if self.name not in AUGMENTATIONS:
            raise UserError(f"augment={self.name!r}: expected one of {', '.join(AUGMENTATIONS)}")

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


def shift_and_flip(images: Tensor, shifts: Tensor | None, flips: Tensor | None, most: int = 0) -> Tensor:
    """Images moved by whole pixels, black where nothing comes in, and mirrored.

    Args:
        images: of shape (batch, channels, height, width).
        shifts: int64 of shape (batch, 2): rows and columns, from 0 to twice `most`, where `most` is no shift.
        flips: bool of shape (batch,).
        most: pixels that an image is moved, each way.
    """
    if shifts is None:
        if flips is None:
            return images
        if flips.device.type == "cpu" and len(flips) == 1:
            return images.flip(3) if flips else images
        return torch.where(flips.view(-1, 1, 1, 1), images.flip(3), images)
    height, width = images.shape[2:]
    rows, columns = (torch.arange(length, device=images.device) for length in (height, width))
    down = shifts[:, :1] + rows
    right = shifts[:, 1:] + (columns if flips is None else torch.where(flips.unsqueeze(1), columns.flip(0), columns))
    sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    padded = F.pad(images, (most, most, most, most))
    return padded[sample, :, down.unsqueeze(2), right.unsqueeze(1)].permute(0, 3, 1, 2)


def _grey(channels: Tensor) -> Tensor:
    """The brightness that a colour appears to have: (batch, 3, ...) to (batch, 1, ...)."""
    red, green, blue = channels.split(1, dim=1)
    grey: Tensor = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return grey


def adjust_colours(images: Tensor, factors: Tensor, normalise: Normalise, out: Tensor | None = None) -> Tensor:
    """Brightness, contrast and saturation of each image, as torchvision's ColorJitter has them, then normalised.

    One affine map of the colours for each image: it is cut to the range of bytes once, at the end.

    Args:
        images: uint8 of shape (batch, 3, height, width).
        factors: of shape (batch, 3), 1 leaves an image as it is.
        out: where the result is written, if it is given: contiguous float32.
    """
    brightness, contrast, saturation = (column.view(-1, 1, 1, 1) for column in factors.unbind(1))
    both = brightness * contrast
    own = both * saturation
    # Channel by channel, where a number that belongs to a channel costs no time.
    pixels = torch.empty(images.shape, dtype=torch.float32, device=images.device) if out is None else out
    pixels.copy_(images)
    # Of integers, which floats hold: the sum does not depend on its order, and so not on the batch.
    sums = pixels.sum(3).sum(2, dtype=torch.float64).float()
    mean = _grey(sums).view(-1, 1, 1, 1) / (images.shape[2] * images.shape[3])
    grey = _grey(pixels).mul_(both - own).add_((brightness - both) * mean)
    return pixels.mul_(own).add_(grey).clamp_(0, 255).mul_(normalise.scale).add_(normalise.shift)


@dataclass(frozen=True)
class BatchAugmentation:
    """The second part of a named augmentation, of a batch of images of the network's size, and its normalisation.

    Small images are moved by an eighth of their side at most with "light", as usual for CIFAR. Colours vary with
    "standard". Flips alternate from epoch to epoch.

    Args:
        name: of the augmentation.
        size: of the images, in pixels.
        seed: the run's.
        flip: False mirrors none, as for digits and letters.
        normalise: bytes to floats; by device.
    """

    name: str
    size: int
    seed: int
    flip: bool
    normalise: Callable[[torch.device], Normalise]

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        """Uint8 of shape (batch, 3, size, size) to normalised float32, given the sample numbers of shape (batch,)."""
        most = max(1, self.size // 8) if self.name == "light" and is_small(self.size) else 0
        shifts = None
        if most:
            shifts = (uniform(self.seed, "shift", epoch, numbers, 2) * (2 * most + 1)).long().clamp_(max=2 * most)
        flips = None
        if self.flip and self.name != "none":
            flips = alternating_flips(self.seed, epoch, numbers)
        factors = None
        if self.name == "standard":
            factors = 1 + _COLOUR * (2 * uniform(self.seed, "colours", epoch, numbers, 3) - 1)
        normalise = self.normalise(images.device)

        def augmented(part: slice, out: Tensor | None = None) -> Tensor:
            shift, flip, factor = (None if draws is None else draws[part] for draws in (shifts, flips, factors))
            moved = shift_and_flip(images[part], shift, flip, most)
            if factor is not None:
                return adjust_colours(moved, factor, normalise, out)
            done: Tensor = normalise(moved)
            return done if out is None else out.copy_(done)

        if images.device.type != "cpu" or is_small(self.size):
            return augmented(slice(None))
        # The cache of a core holds a large image, and not a batch of them.
        found = torch.empty(images.shape, dtype=torch.float32)
        for i in range(len(images)):
            augmented(slice(i, i + 1), found[i : i + 1])
        return found


@lru_cache(maxsize=8)
def _beta_quantiles(alpha: float, device: torch.device, steps: int = 4096) -> Tensor:
    from scipy.stats import beta

    with torch.inference_mode(False):
        return torch.from_numpy(beta.ppf(torch.linspace(0, 1, steps + 1).double().numpy(), alpha, alpha)).to(device)


def _beta(alpha: float, draws: Tensor) -> Tensor:
    """Uniform numbers of shape (n,) to those of the beta distribution with both parameters `alpha`, interpolated."""
    table = _beta_quantiles(alpha, draws.device)
    at = draws.double() * (len(table) - 1)
    below = at.long()
    return torch.lerp(table[below], table[below + 1], at - below).float()


def _boxes(share: Tensor, y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """Rectangles of the area 1 - share around random points, cut at the borders: bool (batch, height, width)."""
    side = (1 - share).sqrt() / 2

    def within(length: int, centre: Tensor) -> Tensor:
        start, stop = ((length * (centre + sign * side)).round() for sign in (-1, 1))
        places = torch.arange(length, device=share.device)
        return (places >= start.unsqueeze(1)) & (places < stop.unsqueeze(1))

    return within(height, y).unsqueeze(2) & within(width, x).unsqueeze(1)


@dataclass(frozen=True)
class Mixing:
    """MixUp (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a sample and the one before it in the epoch's order.

    A batch-wise permutation would depend on how the batch was split; the whole epoch's order does not, and only one
    image more than the batch has to be read. With both on, each sample takes one of them at random.

    Args:
        mixup: alpha of MixUp's beta distribution; 0 is off.
        cutmix: alpha of CutMix's; 0 is off.
        num_classes: of the soft targets.
        seed: the run's.
    """

    mixup: float
    cutmix: float
    num_classes: int
    seed: int

    def __call__(
        self, images: Tensor, targets: Tensor, partners: Tensor, partner_targets: Tensor, numbers: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """The mixtures of samples with their partners.

        Args:
            images: floats of shape (batch, 3, size, size), as `partners`.
            targets: int64 of shape (batch,), as `partner_targets`.
            numbers: of the samples, int64 of shape (batch,).

        Returns:
            Images, and the soft targets, float32 of shape (batch, classes) with the sum 1.
        """
        kind, amount, y, x = uniform(self.seed, "mixing", epoch, numbers, 4).unbind(1)
        share = torch.ones_like(amount)
        mixed = images
        cut = kind < (0.5 if self.mixup else 1.0) if self.cutmix else torch.zeros_like(kind, dtype=torch.bool)
        if self.mixup:
            share = torch.where(cut, share, _beta(self.mixup, amount))
            mixed = torch.lerp(partners, images, share.view(-1, 1, 1, 1))
        if self.cutmix:
            inside = _boxes(_beta(self.cutmix, amount), y, x, images.shape[2], images.shape[3]) & cut.view(-1, 1, 1)
            mixed = torch.where(inside.unsqueeze(1), partners, mixed)
            share = torch.where(cut, 1 - inside.sum((1, 2)) / (images.shape[2] * images.shape[3]), share)
        own, other = (F.one_hot(labels, self.num_classes).float() for labels in (targets, partner_targets))
        return mixed, torch.lerp(other, own, share.unsqueeze(1))


class Images(Protocol):
    """Images by number: a tensor of all, or `ImageFiles`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Tensor: ...


class BatchReader:
    """Makes batches of images of one size: read and cropped.

    Args:
        images: uint8 of shape (3, height, width) by sample number. A tensor of images that need no crop is indexed, on
            the device that it is on.
        targets: int64 of shape (n,).
        crop: applied to each image.
    """

    def __init__(self, images: Images, targets: Tensor, crop: Crop) -> None:
        self.images, self.targets, self.crop = images, targets, crop

    @property
    def is_in_memory(self) -> bool:
        """Whether a batch is one indexing operation."""
        ready = isinstance(self.images, Tensor) and self.images.shape[2:] == (self.crop.size, self.crop.size)
        return ready and self.crop.is_centre

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        epoch, rows = request
        count, size = len(self.targets), self.crop.size
        if self.is_in_memory and isinstance(self.images, Tensor):
            numbers = torch.tensor(rows, dtype=torch.int64)
            index = numbers % count
            inputs = self.images.index_select(0, index.to(self.images.device, non_blocking=True))
            return LoadedBatch(inputs, self.targets[index], numbers, [])
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
                    inputs[len(kept)] = self.crop(self.images[row % count], draws)
                except UnreadableImage as error:
                    unreadable.append((row % count, str(error)))
                else:
                    kept.append(row)
        finally:
            torch.set_num_threads(threads)
        numbers = torch.tensor(kept, dtype=torch.int64)
        return LoadedBatch(inputs[: len(kept)], self.targets[numbers % count], numbers, unreadable)
