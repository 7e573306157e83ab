"""From a decoded image of any shape to the size of the network's inputs: the middle, or a random part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from datamodules.images.decoding import is_small, resized
from datamodules.loading.randomness import uniform

# Where every pixel counts, evaluation keeps the whole short side, and crops are mild.
_KEPT = 7 / 8
# The least share of the area that a random crop takes: the usual 0.08 is for runs of a hundred epochs.
_LEAST_AREA = 0.25
_LEAST_AREA_SMALL = 0.64
_TRIES = 10


def crop_pct(size: int) -> float:
    """The share of an image's short side that evaluation keeps, for images of `size` pixels."""
    return 1.0 if is_small(size) else _KEPT


def _resized(image: Tensor, top: int, left: int, height: int, width: int, size: int) -> Tensor:
    """A part of an image, scaled to a square: uint8 of shape (3, size, size)."""
    part = image[:, top : top + height, left : left + width]
    if part.shape[1:] == (size, size):
        return part
    return resized(part, size, size)


def _side_kept(height: int, width: int, size: int) -> int:
    return max(1, round(min(height, width) * crop_pct(size)))


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
    least_ratio = math.log(3 / 4)
    greatest_ratio = math.log(4 / 3)
    for i in range(2, 2 + 2 * _TRIES, 2):
        area = height * width * (least_area + draws[i] * (1 - least_area))
        # Evenly in the logarithm: half and twice are equally far from 1.
        ratio = math.exp(least_ratio + draws[i + 1] * (greatest_ratio - least_ratio))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return _placed(draws[0], height, h), _placed(draws[1], width, w), h, w
    w = min(width, max(1, round(height * 4 / 3)))
    h = min(height, max(1, round(width * 4 / 3)))
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
            top = _placed(draws[0], height, side)
            left = _placed(draws[1], width, side)
            return _resized(image, top, left, side, side, self.size)
        least_area = _LEAST_AREA_SMALL if is_small(self.size) else _LEAST_AREA
        box = crop_box(height, width, least_area, draws)
        return _resized(image, *box, self.size)


def side_to_decode(crop: str, size: int) -> int:
    """The short side at which images are decoded for a named augmentation, in pixels.

    Evaluation and shifts take a fixed share of the short side, without scaling again; a random crop of a quarter of the
    area still has a pixel for each of the network's.
    """
    if crop == "standard":
        return 2 * size
    return round(size / crop_pct(size))
