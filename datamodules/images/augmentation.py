"""Augmentation of batches, MixUp and CutMix, as functions of (seed, epoch, sample) only.

All functions take a whole batch, on the device of the batch. The result for a sample does not depend on the other
samples of its batch, since another number of processes puts it into another batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.images.decoding import is_small
from datamodules.images.normalise import Normalise
from datamodules.loading.randomness import alternating_flips, uniform

AUGMENTATIONS = ("none", "light", "standard")
# Largest change of brightness, contrast and saturation: half of that of the usual recipes for ImageNet.
_COLOUR = 0.2


def describe_augmentation(name: str, flip: bool) -> str:
    """Return a description of the augmentation "light" or "standard"."""
    flips = " and mirroring" if flip else ", no mirroring"
    if name == "light":
        return f"shifts{flips}"
    return f"random crops{flips}, colours"


def shift_and_flip(images: Tensor, shifts: Tensor | None, flips: Tensor | None, most: int = 0) -> Tensor:
    """Translate images by whole pixels, with black borders, and mirror them.

    Args:
        images: of shape (batch, channels, height, width).
        shifts: rows and columns, int64 of shape (batch, 2), from 0 to ``2 * most``; the value `most` is no translation.
        flips: which images are mirrored, bool of shape (batch,).
        most: largest translation in each direction, in pixels.
    """
    if shifts is None:
        if flips is None:
            return images
        # `torch.where` writes the whole image. On a GPU, the condition below would wait for the device.
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


def _grey(channels: Tensor) -> Tensor:
    """Convert RGB of shape (batch, 3, ...) to luma of shape (batch, 1, ...), with the weights of ITU-R BT.601."""
    red, green, blue = channels.split(1, dim=1)
    grey: Tensor = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return grey


def adjust_colours(images: Tensor, factors: Tensor, normalise: Normalise, out: Tensor | None = None) -> Tensor:
    """Adjust brightness, contrast and saturation of each image as torchvision's ColorJitter does, and normalise it.

    The three steps are one affine map of the colours, so values are clamped to 0..255 once, at the end.

    Args:
        images: uint8 of shape (batch, 3, height, width).
        factors: factors of brightness, contrast and saturation, of shape (batch, 3); 1 changes nothing.
        normalise: normalisation of the result.
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
    # Sums of integers do not depend on the order of the terms, which may change with the size of the batch. A float32
    # holds the sum of a row exactly.
    sums = pixels.sum(3).long().sum(2).float()
    mean = _grey(sums).view(-1, 1, 1, 1) / (images.shape[2] * images.shape[3])
    grey = _grey(pixels).mul_(bright_contrast - pixel_factor).add_((brightness - bright_contrast) * mean)
    return pixels.mul_(pixel_factor).add_(grey).clamp_(0, 255).mul_(normalise.scale).add_(normalise.shift)


@dataclass(frozen=True)
class BatchAugmentation:
    """Second half of a named augmentation, after `Crop`: translation, flips and colours of a batch, and normalisation.

    "light" translates small images by up to an eighth of their side, as usual for CIFAR. "standard" varies colours.
    Flips alternate from epoch to epoch.

    Args:
        name: name of the augmentation.
        size: side of the images, in pixels.
        seed: seed of the run.
        flip: whether to mirror images; False for digits and letters.
        normalise: function that returns the normalisation on a device.
    """

    name: str
    size: int
    seed: int
    flip: bool
    normalise: Callable[[torch.device], Normalise]

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        """Augment uint8 images of shape (batch, 3, size, size) to normalised float32; `numbers` are sample numbers."""
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
            factors = 1 + _COLOUR * (2 * uniform(self.seed, "colours", epoch, numbers, 3) - 1)
        normalise = self.normalise(images.device)

        def select(draws: Tensor | None, samples: slice) -> Tensor | None:
            return None if draws is None else draws[samples]

        def augment(samples: slice, out: Tensor | None = None) -> Tensor:
            moved = shift_and_flip(images[samples], select(shifts, samples), select(flips, samples), most)
            sample_factors = select(factors, samples)
            if sample_factors is not None:
                return adjust_colours(moved, sample_factors, normalise, out)
            normalised: Tensor = normalise(moved)
            return normalised if out is None else out.copy_(normalised)

        if images.device.type != "cpu" or is_small(self.size):
            return augment(slice(None))
        # Image by image, since the cache of a core holds one large image but not a batch of them.
        augmented = torch.empty(images.shape, dtype=torch.float32)
        for i in range(len(images)):
            augment(slice(i, i + 1), augmented[i : i + 1])
        return augmented


@lru_cache(maxsize=8)
def _beta_quantiles(alpha: float, device: torch.device, steps: int = 4096) -> Tensor:
    """Return the quantiles of Beta(alpha, alpha) at `steps` + 1 equal steps from 0 to 1, float64 of that length.

    The distribution function is ``F(x) = (x (1 - x))**alpha / (alpha B) * S(x)``, with a series S of positive terms
    (Abramowitz and Stegun 1964, 26.5.4). Its logarithm is a concave function of log x, so Newton's method converges.
    """
    # The cached table outlives a validation in inference mode, whose tensors could not be used in training.
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
        return torch.cat([lower, 1 - lower[:-1].flip(0)]).to(device)


def _beta(alpha: float, draws: Tensor) -> Tensor:
    """Map uniform numbers of shape (n,) to Beta(alpha, alpha) by interpolated quantiles, float32 of shape (n,)."""
    table = _beta_quantiles(alpha, draws.device)
    position = draws.double() * (len(table) - 1)
    below = position.long()
    return torch.lerp(table[below], table[below + 1], position - below).float()


def _boxes(share: Tensor, y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """Return boxes of area 1 - share around (x, y), cut off at the borders, as bool masks (batch, height, width)."""
    side = (1 - share).sqrt() / 2

    def within(length: int, centre: Tensor) -> Tensor:
        start = (length * (centre - side)).round()
        stop = (length * (centre + side)).round()
        pixels = torch.arange(length, device=share.device)
        return (pixels >= start.unsqueeze(1)) & (pixels < stop.unsqueeze(1))

    return within(height, y).unsqueeze(2) & within(width, x).unsqueeze(1)


@dataclass(frozen=True)
class Mixing:
    """MixUp (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a sample and its predecessor in the epoch's order.

    If both are on, each sample takes one of them at random. The partner is the predecessor and not a random sample of
    the batch, so that it does not depend on how the epoch is cut into batches.

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
        # Share of the samples that take CutMix.
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
            # The share of the pixels, not of the box drawn, which the borders may have cut off.
            share = torch.where(cut, 1 - inside.sum((1, 2)) / (images.shape[2] * images.shape[3]), share)
        one_hot = F.one_hot(targets, self.num_classes).float()
        partner_one_hot = F.one_hot(partner_targets, self.num_classes).float()
        return mixed, torch.lerp(partner_one_hot, one_hot, share.unsqueeze(1))
