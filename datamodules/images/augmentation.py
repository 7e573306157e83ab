"""Normalization and augmentation of batches: colors, affine maps, MixUp and CutMix.

Augmentations are functions of (seed, epoch, sample). They transform a whole batch on its device, but the result for a
sample does not depend on the other samples in the batch: another number of processes puts it into another batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.errors import UserError
from datamodules.images.decoding import is_small
from datamodules.loading.randomness import alternating_flips, uniform, widest_float


class Normalize(nn.Module):
    """Normalization of uint8 images of shape (batch, channels, height, width) to float32 with about mean 0 and std 1.

    The module has no parameters and saves nothing. It does not resize images.

    Args:
        mean: mean of each channel, of pixels from 0 to 1.
        std: standard deviation of each channel.

    Example:
        >>> Normalize([0.5], [0.25])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).round()
        tensor([[[[-2.,  2.]]]])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)
        means = torch.tensor(self.mean).view(-1, 1, 1)
        stds = torch.tensor(self.std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / (255 * stds), persistent=False)
        self.register_buffer("shift", -means / stds, persistent=False)
        # A tensor without dimensions counts as a number, so it need not be on the device of the images.
        self._offset = torch.tensor(-self.mean[0] / self.std[0])

    def forward(self, images: Tensor) -> Tensor:
        if len(self.mean) == 1:
            # Computes x / (255 std) - mean / std in one pass over the memory.
            return torch.add(self._offset, images, alpha=1 / (255 * self.std[0]))
        return (images * self.scale).add_(self.shift)


@lru_cache(maxsize=4)
def normalizer(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Normalize:
    """Return the cached `Normalize` of these statistics on a device."""
    # The first caller may be a validation in inference mode, and inference tensors cannot be used in training later.
    with torch.inference_mode(False):
        return Normalize(mean, std).to(device)


def check_statistics(name: str, numbers: Sequence[float] | None, least: float) -> list[float] | None:
    """Check a parameter with one number per channel, and return it as a list, for the checkpoint.

    Raises:
        UserError: there are not three numbers, or they are not from `least` to 1.
    """
    if numbers is None:
        return None
    if len(numbers) != 3 or not all(least <= number <= 1 for number in numbers):
        raise UserError(
            "expected three numbers from 0 to 1, such as [0.485, 0.456, 0.406]", setting=name, value=numbers
        )
    return list(numbers)


AUGMENTATIONS = ("none", "light", "standard")
# Largest change of brightness, contrast and saturation: half of the 0.4 that is usual for ImageNet.
_COLOR = 0.2


def describe_augmentation(name: str, flip: bool) -> str:
    """Return a description of the augmentation "light" or "standard"."""
    flips = " and mirroring" if flip else ", no mirroring"
    if name == "light":
        return f"shifts{flips}"
    return f"random crops{flips}, colors"


def shift_and_flip(images: Tensor, shifts: Tensor | None, flips: Tensor | None, most: int = 0) -> Tensor:
    """Translate images by whole pixels, with black borders, and mirror them.

    Args:
        images: of shape (batch, channels, height, width).
        shifts: offsets of rows and columns, int64 of shape (batch, 2), from 0 to ``2 * most``; `most` moves nothing.
        flips: mask of the mirrored images, bool of shape (batch,).
        most: largest translation in each direction, in pixels.
    """
    if shifts is None:
        if flips is None:
            return images
        # Faster than `torch.where`, which writes the whole image. On a GPU this condition would synchronize.
        if flips.device.type == "cpu" and len(flips) == 1:
            return images.flip(3) if flips else images
        return torch.where(flips.view(-1, 1, 1, 1), images.flip(3), images)
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    down = shifts[:, :1] + rows
    if flips is not None:
        # A mirrored image reads its columns from the other end.
        columns = torch.where(flips.unsqueeze(1), columns.flip(0), columns)
    right = shifts[:, 1:] + columns
    sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    padded = F.pad(images, (most, most, most, most))
    return padded[sample, :, down.unsqueeze(2), right.unsqueeze(1)].permute(0, 3, 1, 2)


def _gray(channels: Tensor) -> Tensor:
    """Convert RGB of shape (batch, 3, ...) to luma of shape (batch, 1, ...), with the weights of ITU-R BT.601."""
    red, green, blue = channels.split(1, dim=1)
    gray: Tensor = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return gray


def adjust_colors(images: Tensor, factors: Tensor, normalize: Normalize, out: Tensor | None = None) -> Tensor:
    """Adjust brightness, contrast and saturation of each image as torchvision's ColorJitter does, and normalize it.

    The three steps are one affine map of the colors. Values are therefore clamped to 0..255 once, at the end.

    Args:
        images: uint8 of shape (batch, 3, height, width).
        factors: factors of brightness, contrast and saturation, of shape (batch, 3); 1 changes nothing.
        normalize: normalization of the result.
        out: contiguous float32 tensor for the result, if given.
    """
    brightness, contrast, saturation = (column.view(-1, 1, 1, 1) for column in factors.unbind(1))
    bright_contrast = brightness * contrast
    pixel_factor = bright_contrast * saturation
    # Contiguous by channel: multiplying by a value per channel is fastest in this layout.
    pixels = out
    if pixels is None:
        pixels = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    pixels.copy_(images)
    # Integer sums do not depend on the order of the terms, which may change with the batch size. The sum of a row is
    # exact in float32.
    sums = pixels.sum(3).long().sum(2).float()
    mean = _gray(sums).view(-1, 1, 1, 1) / (images.shape[2] * images.shape[3])
    gray = _gray(pixels).mul_(bright_contrast - pixel_factor).add_((brightness - bright_contrast) * mean)
    return pixels.mul_(pixel_factor).add_(gray).clamp_(0, 255).mul_(normalize.scale).add_(normalize.shift)


@dataclass(frozen=True)
class BatchAugmentation:
    """Second half of a named augmentation, after `Crop`: translation, flips and colors of a batch, and normalization.

    "light" translates small images by up to an eighth of their side, as usual for CIFAR. "standard" varies colors.
    Flips alternate from epoch to epoch.

    Args:
        name: name of the augmentation.
        size: side of the images, in pixels.
        seed: seed of the run.
        flip: whether to mirror images; False for digits and letters.
        normalize: function that returns the normalization on a device.
    """

    name: str
    size: int
    seed: int
    flip: bool
    normalize: Callable[[torch.device], Normalize]

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        """Augment uint8 images of shape (batch, 3, size, size) to normalized float32; `numbers` are sample numbers."""
        most = 0
        shifts = None
        if self.name == "light" and is_small(self.size):
            most = max(1, self.size // 8)
            shifts = (uniform(self.seed, "shift", epoch, numbers, 2) * (2 * most + 1)).long().clamp_(max=2 * most)
        flips = None
        if self.flip and self.name != "none":
            flips = alternating_flips(self.seed, epoch, numbers)
        factors = None
        if self.name == "standard":
            # The purpose is spelled as in the first version: another one would draw other numbers.
            factors = 1 + _COLOR * (2 * uniform(self.seed, "colours", epoch, numbers, 3) - 1)
        normalize = self.normalize(images.device)

        def select(draws: Tensor | None, samples: slice) -> Tensor | None:
            return None if draws is None else draws[samples]

        def augment(samples: slice, out: Tensor | None = None) -> Tensor:
            moved = shift_and_flip(images[samples], select(shifts, samples), select(flips, samples), most)
            sample_factors = select(factors, samples)
            if sample_factors is not None:
                return adjust_colors(moved, sample_factors, normalize, out)
            normalized: Tensor = normalize(moved)
            return normalized if out is None else out.copy_(normalized)

        if images.device.type != "cpu" or is_small(self.size):
            return augment(slice(None))
        # Image by image: the cache of a core holds one large image, but not a batch.
        augmented = torch.empty(images.shape, dtype=torch.float32)
        for i in range(len(images)):
            augment(slice(i, i + 1), augmented[i : i + 1])
        return augmented


@lru_cache(maxsize=8)
def _beta_quantiles(alpha: float, device: torch.device, steps: int = 4096) -> Tensor:
    """Return the quantiles of Beta(alpha, alpha) at ``steps + 1`` evenly spaced levels from 0 to 1.

    The distribution function is ``F(x) = (x (1 - x))**alpha / (alpha B) * S(x)``, with a series S of positive terms
    (Abramowitz and Stegun 1964, 26.5.4). Its logarithm is a concave function of log x, so Newton's method converges.
    """
    # Cached, so not an inference tensor, even if a validation is the first caller.
    with torch.inference_mode(False):
        # The distribution is symmetric, so the upper half is the mirrored lower half.
        levels = torch.linspace(0, 1, steps + 1, dtype=torch.float64)[1 : steps // 2 + 1]
        log_scale = 2 * math.lgamma(alpha) - math.lgamma(2 * alpha) + math.log(alpha)
        log_x = ((levels.log() + log_scale) / alpha).clamp(max=math.log(0.5))
        # Four to eight iterations reach full precision for parameters up to 1,000.
        for _ in range(12):
            x = log_x.exp()
            term = torch.ones_like(x)
            series = torch.ones_like(x)
            n = 0
            while bool((term > series * 1e-17).any()):
                term = term * x * (2 * alpha + n) / (alpha + 1 + n)
                series = series + term
                n += 1
            log_f = alpha * (log_x + torch.log1p(-x)) - log_scale + series.log()
            slope = alpha / ((1 - x) * series)
            log_x = (log_x + (levels.log() - log_f) / slope).clamp(max=math.log(0.5))
        lower = torch.cat([levels.new_zeros(1), log_x.exp()])
        return torch.cat([lower, 1 - lower[:-1].flip(0)]).to(device, widest_float(device))


def _beta(alpha: float, draws: Tensor) -> Tensor:
    """Map uniform numbers of shape (n,) to Beta(alpha, alpha) by interpolated quantiles, float32 of shape (n,)."""
    table = _beta_quantiles(alpha, draws.device)
    position = draws.to(table.dtype) * (len(table) - 1)
    below = position.long()
    return torch.lerp(table[below], table[below + 1], position - below).float()


def _boxes(share: Tensor, y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """Return boxes of area 1 - share around (x, y), cut off at the borders, as bool masks (batch, height, width)."""
    side = (1 - share).sqrt() / 2

    def within(length: int, center: Tensor) -> Tensor:
        start = (length * (center - side)).round()
        stop = (length * (center + side)).round()
        pixels = torch.arange(length, device=share.device)
        return (pixels >= start.unsqueeze(1)) & (pixels < stop.unsqueeze(1))

    return within(height, y).unsqueeze(2) & within(width, x).unsqueeze(1)


@dataclass(frozen=True)
class Mixing:
    """MixUp (Zhang et al., 2018) and CutMix (Yun et al., 2019) of each sample with its predecessor in the epoch.

    If both are on, one of them is chosen at random for each sample. The partner is the predecessor, and not a random
    sample of the batch, so it does not depend on how the epoch is cut into batches.

    Args:
        mixup: alpha of MixUp's beta distribution; 0 is off.
        cutmix: alpha of CutMix's beta distribution; 0 is off.
        num_classes: number of classes of the soft targets.
        seed: seed of the run.
    """

    mixup: float
    cutmix: float
    num_classes: int
    seed: int

    def __call__(
        self, images: Tensor, targets: Tensor, partners: Tensor, partner_targets: Tensor, numbers: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix samples with their partners.

        Args:
            images: float images of shape (batch, 3, size, size).
            targets: class numbers, int64 of shape (batch,).
            partners: images of the partners, of the same shape.
            partner_targets: class numbers of the partners, of the same shape.
            numbers: sample numbers, int64 of shape (batch,).
            epoch: epoch of the random numbers.

        Returns:
            Mixed images, and soft targets: float32 of shape (batch, classes), whose rows sum to 1.
        """
        kind, amount, y, x = uniform(self.seed, "mixing", epoch, numbers, 4).unbind(1)
        share = torch.ones_like(amount)
        mixed = images
        # Probability of CutMix.
        share_cut = 0.0
        if self.cutmix:
            share_cut = 0.5 if self.mixup else 1.0
        cut = kind < share_cut
        if self.mixup:
            share = torch.where(cut, share, _beta(self.mixup, amount))
            mixed = torch.lerp(partners, images, share.view(-1, 1, 1, 1))
        if self.cutmix:
            inside = _boxes(_beta(self.cutmix, amount), y, x, images.shape[2], images.shape[3]) & cut.view(-1, 1, 1)
            mixed = torch.where(inside.unsqueeze(1), partners, mixed)
            # The share of mixed pixels: the borders may have cut off a part of the box.
            share = torch.where(cut, 1 - inside.sum((1, 2)) / (images.shape[2] * images.shape[3]), share)
        one_hot = F.one_hot(targets, self.num_classes).float()
        partner_one_hot = F.one_hot(partner_targets, self.num_classes).float()
        return mixed, torch.lerp(partner_one_hot, one_hot, share.unsqueeze(1))


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
        flip: whether to mirror half of the samples in even epochs, and the other half in odd epochs.

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
        # Negating the factors of x mirrors the output, and does not change the random map.
        maps[:, 0::3] *= 1 - 2 * alternating_flips(seed, epoch, index).unsqueeze(1).float()
    return maps


@lru_cache(maxsize=2)
def _epoch_matrices(seed: int, epoch: int, count: int, device: torch.device, *options: Any) -> Tensor:
    """Return the maps of all samples of an epoch, computed at once: per batch, small operations would dominate."""
    return affine_matrices(seed, epoch, torch.arange(count, device=device), *options)


@lru_cache(maxsize=8)
def _pixel_centers(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x and y of each pixel's center in [-1, 1], each of shape (height * width,)."""
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
    x, y = _pixel_centers(height, width, images.device)
    a, b, c, d, e, f = matrices.unsqueeze(2).unbind(1)
    # Two planes, then a view with the planes as the last dimension. `F.affine_grid` takes 4 times as long. Stacking
    # along the last dimension takes twice as long, because an inner size of 2 is not vectorized.
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
        flip: whether to mirror half of the samples in even epochs, and the other half in odd epochs.
        count: number of samples of the data set, to compute all maps once per epoch; 0 computes them per batch.
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
