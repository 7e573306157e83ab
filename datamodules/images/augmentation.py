"""Augmentation of batches, MixUp and CutMix, as functions of (seed, epoch, sample) and of nothing else.

They take a whole batch at a time, on the device. No step depends on which other samples share the batch.
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
# The most that brightness, contrast and saturation change, each: half of what ImageNet's usual recipes take.
_COLOUR = 0.2


def describe_augmentation(name: str, flip: bool) -> str:
    """What "light" and "standard" do, in words."""
    flips = " and mirroring" if flip else ", no mirroring"
    if name == "light":
        return f"shifts{flips}"
    return f"random crops{flips}, colours"


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
    if flips is not None:
        # A mirrored image reads its columns from the other end.
        columns = torch.where(flips.unsqueeze(1), columns.flip(0), columns)
    right = shifts[:, 1:] + columns
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
    pixels = out
    if pixels is None:
        pixels = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    pixels.copy_(images)
    # Of integers, which floats hold: the sum does not depend on its order, and so not on the batch.
    sums = pixels.sum(3).long().sum(2).float()
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
    """Quantiles of the beta distribution with both parameters `alpha` at `steps` + 1 equal steps from 0 to 1, float64.

    Its distribution function is ``F(x) = (x (1 - x))**alpha / (alpha B) * S(x)``, with a series S of positive terms
    (Abramowitz and Stegun 1964, 26.5.4). Of its logarithm, a concave function of log x, Newton's method finds the root.
    """
    with torch.inference_mode(False):
        levels = torch.linspace(0, 1, steps + 1, dtype=torch.float64)[1 : steps // 2 + 1]  # The others are mirrored.
        log_scale = 2 * math.lgamma(alpha) - math.lgamma(2 * alpha) + math.log(alpha)
        log_x = ((levels.log() + log_scale) / alpha).clamp(max=math.log(0.5))
        for _ in range(12):  # Four to eight reach the last bits, for parameters up to 1,000.
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

    With both on, each sample takes one of them at random.

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
        # Of both, half of the samples get each.
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
            share = torch.where(cut, 1 - inside.sum((1, 2)) / (images.shape[2] * images.shape[3]), share)
        own, other = (F.one_hot(labels, self.num_classes).float() for labels in (targets, partner_targets))
        return mixed, torch.lerp(other, own, share.unsqueeze(1))
