"""Random affine maps of batches, a function of (seed, epoch, sample) and of nothing else."""

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
    """The map of each sample, from output to input positions, both in [-1, 1] over the image.

    Args:
        index: sample numbers, int64 of shape (n,).
        shift: pixels at most, each way.
        rotation: degrees at most, each way.
        scale: change of scale at most, as in 0.1 for 0.9 to 1.1.
        size: the image's side in pixels.
        flip: mirror half of the samples in the even epochs, and the others in the odd ones.

    Returns:
        float32 of shape (n, 6): the rows (a, b, c, d, e, f) of x' = ax + by + c and y' = dx + ey + f.
    """
    signed = uniform(seed, "affine", epoch, index, draws=4) * 2 - 1
    angle = signed[:, 0] * math.radians(rotation)
    zoom = 1 / (1 + signed[:, 1] * scale)
    cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
    dx, dy = (signed[:, 2:] * (2 * shift / size)).unbind(1)
    maps = torch.stack((cos, -sin, dx, sin, cos, dy), dim=1)
    if flip:
        # Positions in the output are mirrored first.
        maps[:, 0::3] *= 1 - 2 * alternating_flips(seed, epoch, index).unsqueeze(1).float()
    return maps


@lru_cache(maxsize=2)
def _epoch_matrices(seed: int, epoch: int, count: int, device: torch.device, *how: Any) -> Tensor:
    """The maps of a whole set, in milliseconds; for each batch, dozens of small operations would cost more."""
    return affine_matrices(seed, epoch, torch.arange(count, device=device), *how)


@lru_cache(maxsize=8)
def _pixel_centres(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = (torch.arange(width, device=device, dtype=torch.float32) * 2 + 1) / width - 1
    y = (torch.arange(height, device=device, dtype=torch.float32) * 2 + 1) / height - 1
    return x.repeat(height), y.repeat_interleave(width)


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Images resampled bilinearly at the mapped positions; outside is zero.

    Args:
        images: float32 of shape (batch, channels, height, width).
        matrices: of shape (batch, 6), see `affine_matrices`.
    """
    batch, _, height, width = images.shape
    x, y = _pixel_centres(height, width, images.device)
    a, b, c, d, e, f = matrices.unsqueeze(2).unbind(1)
    # Two planes, then a view with them innermost: F.affine_grid and a stack along the last dimension, whose inner
    # size of 2 does not vectorise, take 4 and 2 times longer.
    planes = torch.stack((torch.addcmul(c, a, x).addcmul_(b, y), torch.addcmul(f, d, x).addcmul_(e, y)), dim=1)
    positions = planes.view(batch, 2, height, width).permute(0, 2, 3, 1)
    return F.grid_sample(images, positions, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class RandomAffine:
    """A random affine map per sample and epoch, the same on every device, rank and worker.

    Args:
        seed: the run's seed.
        shift: pixels at most, each way.
        rotation: degrees at most, each way.
        scale: change of scale at most, as in 0.1 for 0.9 to 1.1.
        flip: mirror half of the samples in the even epochs, and the others in the odd ones.
        count: samples in the set, whose maps are then made once per epoch; 0 makes those of each batch.
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
        """Warp float images of shape (batch, channels, size, size), given their sample numbers of shape (batch,)."""
        how = (self.shift, self.rotation, self.scale, images.shape[-1], self.flip)
        if self.count:
            matrices = _epoch_matrices(self.seed, epoch, self.count, images.device, *how).index_select(0, index)
        else:
            matrices = affine_matrices(self.seed, epoch, index, *how)
        return warp(images, matrices)
