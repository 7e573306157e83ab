"""Crops decoded images to the size of the network's inputs, at the centre or at random."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from datamodules.images.decoding import is_small, resized
from datamodules.loading.randomness import uniform

# Share of the short side that evaluation keeps. Small images are kept whole, since every pixel counts.
_KEPT = 7 / 8
# Least share of the area that a random crop takes. The usual 0.08 is for runs of a hundred epochs.
_LEAST_AREA = 0.25
_LEAST_AREA_SMALL = 0.64
_TRIES = 10


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


def centre_square(image: Tensor, size: int) -> Tensor:
    """Crop the central square of an image and resize it, as for evaluation. Small images are enlarged.

    The result is that of resizing the short side to 8/7 of `size` and cropping the centre, in one step. For inputs
    below 64 pixels the whole short side is kept.

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
        draws: 22 numbers in [0, 1): the position, and ten tries of area and aspect ratio from 3/4 to 4/3. A fixed
            number is drawn, so that one tensor holds the numbers of all samples.

    Returns:
        Top, left, height and width. If no try fits, the largest central crop with an aspect ratio within the limits.
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
    """First half of a named augmentation, before `BatchAugmentation`: crops an image to the size of the inputs.

    Args:
        name: "none", and "light" for small images, crop the centre, as evaluation does. "light" for large images crops
            a square of the same size at a random position. "standard" crops and resizes at random (`crop_box`).
        size: side of the result, in pixels.
        seed: seed of the run.
    """

    name: str
    size: int
    seed: int

    @property
    def is_centre(self) -> bool:
        """Whether the crop is that of evaluation in every epoch."""
        return self.name == "none" or (self.name == "light" and is_small(self.size))

    def draws(self, numbers: Sequence[int], epoch: int) -> list[list[float]]:
        """Return the random numbers of each sample in an epoch: 22 for a random crop, none for the centre."""
        if self.is_centre or not numbers:
            return [[] for _ in numbers]
        index = torch.tensor(numbers, dtype=torch.int64)
        draws: list[list[float]] = uniform(self.seed, "crop", epoch, index, 2 + 2 * _TRIES).tolist()
        return draws

    def __call__(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """Crop an image with its random numbers: uint8 of shape (3, height, width) to (3, size, size)."""
        if self.is_centre:
            return centre_square(image, self.size)
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
    """Return the short side to which images are reduced when they are decoded, in pixels.

    Evaluation and "light" keep a fixed share of the short side, so that their crops need no further resizing. With
    "standard", the smallest crop, a quarter of the area, still has a pixel for each pixel of the input.
    """
    if crop == "standard":
        return 2 * size
    return round(size / crop_pct(size))
