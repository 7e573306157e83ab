"""Random affine transforms of batches, as a function of (seed, epoch, sample) only."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.loading.randomness import alternating_flips, uniform


def affine_matrices(
    seed: int, epoch: int, index: Tensor, shift: float, rotation: float, scale: float, size: int, flip: bool = False
) -> Tensor:
    """Return the affine map of each sample, from output to input positions, both in [-1, 1] across the image.

    Args:
        seed: seed of the run.
        epoch: epoch of the random numbers.
        index: sample numbers, int64 of shape (n,).
        shift: largest translation in each direction, in pixels.
        rotation: largest rotation in each direction, in degrees.
        scale: largest change of scale, as in 0.1 for 0.9 to 1.1.
        size: side of the image, in pixels.
        flip: whether to mirror half of the samples in even epochs, and the other half in odd ones.

    Returns:
        float32 of shape (n, 6): the rows (a, b, c, d, e, f) of x' = ax + by + c and y' = dx + ey + f.
    """
    signed = uniform(seed, "affine", epoch, index, draws=4) * 2 - 1
    angle = signed[:, 0] * math.radians(rotation)
    # The inverse of the scale, since the map goes from output to input.
    zoom = 1 / (1 + signed[:, 1] * scale)
    cos = torch.cos(angle) * zoom
    sin = torch.sin(angle) * zoom
    # An image is 2 units wide, so a pixel is 2 / size.
    dx, dy = (signed[:, 2:] * (2 * shift / size)).unbind(1)
    maps = torch.stack((cos, -sin, dx, sin, cos, dy), dim=1)
    if flip:
        # Only the factors of x change their sign: the output is mirrored, and the random map stays as it is.
        maps[:, 0::3] *= 1 - 2 * alternating_flips(seed, epoch, index).unsqueeze(1).float()
    return maps


@lru_cache(maxsize=2)
def _epoch_matrices(seed: int, epoch: int, count: int, device: torch.device, *options: Any) -> Tensor:
    """Return the maps of all samples of an epoch. For each batch, dozens of small operations would cost more."""
    return affine_matrices(seed, epoch, torch.arange(count, device=device), *options)


@lru_cache(maxsize=8)
def _pixel_centres(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x and y of each pixel's centre in [-1, 1], each of shape (height * width,)."""
    x = (torch.arange(width, device=device, dtype=torch.float32) * 2 + 1) / width - 1
    y = (torch.arange(height, device=device, dtype=torch.float32) * 2 + 1) / height - 1
    return x.repeat(height), y.repeat_interleave(width)


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Resample images bilinearly at the mapped positions. Positions outside the image give zero.

    Args:
        images: float32 of shape (batch, channels, height, width).
        matrices: affine maps of shape (batch, 6), see `affine_matrices`.
    """
    batch, _, height, width = images.shape
    x, y = _pixel_centres(height, width, images.device)
    a, b, c, d, e, f = matrices.unsqueeze(2).unbind(1)
    # Two planes, then a view with them as the last dimension. `F.affine_grid` takes 4 times longer. Stacking along the
    # last dimension takes 2 times longer, since an inner size of 2 does not vectorise.
    planes = torch.stack((torch.addcmul(c, a, x).addcmul_(b, y), torch.addcmul(f, d, x).addcmul_(e, y)), dim=1)
    positions = planes.view(batch, 2, height, width).permute(0, 2, 3, 1)
    return F.grid_sample(images, positions, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class RandomAffine:
    """Random affine transform per sample and epoch, the same on every device, rank and worker.

    Args:
        seed: seed of the run.
        shift: largest translation in each direction, in pixels.
        rotation: largest rotation in each direction, in degrees.
        scale: largest change of scale, as in 0.1 for 0.9 to 1.1.
        flip: whether to mirror half of the samples in even epochs, and the other half in odd ones.
        count: number of samples of the data set, whose maps are then computed once per epoch; 0 computes the maps of
            each batch.
    """

    seed: int
    shift: float
    rotation: float
    scale: float
    flip: bool = False
    count: int = 0

    def __bool__(self) -> bool:
        return bool(self.shift or self.rotation or self.scale or self.flip)

    def __call__(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """Warp float images of shape (batch, channels, size, size) with sample numbers `index` of shape (batch,)."""
        options = (self.shift, self.rotation, self.scale, images.shape[-1], self.flip)
        if self.count:
            matrices = _epoch_matrices(self.seed, epoch, self.count, images.device, *options).index_select(0, index)
        else:
            matrices = affine_matrices(self.seed, epoch, index, *options)
        return warp(images, matrices)
