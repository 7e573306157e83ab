"""Augmentation by name, and MixUp and CutMix, as functions of (seed, epoch, sample) and of nothing else.

torchvision's transforms draw from torch's global generator. Here it is seeded for each sample and put back afterwards,
so that an image looks the same on any worker or rank, and the global generator does not change.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.files import UnreadableImage
from datamodules.loading.randomness import derive_seed, derive_seed_at
from datamodules.loading.worker_loaders import BatchRequest, LoadedBatch

__all__ = [
    "AUGMENTATIONS",
    "Augmentation",
    "BatchReader",
    "Mixing",
    "build_augmentation",
    "centre_square",
    "share_kept",
]

Transform = Callable[[Tensor], Tensor]

# Where every pixel counts, evaluation keeps the whole short side, and crops are mild.
_SMALL = 64
_KEPT = 7 / 8


def _resized_square(image: Tensor, top: int, left: int, side: int, size: int) -> Tensor:
    from torchvision.transforms.v2.functional import resized_crop

    resized: Tensor = resized_crop(image, top, left, side, side, [size, size], antialias=True)
    return resized


def share_kept(size: int) -> float:
    """The share of an image's short side that evaluation keeps, for images of `size` pixels."""
    return 1.0 if size < _SMALL else _KEPT


def _side_kept(image: Tensor, size: int) -> int:
    short = min(image.shape[-2:])
    return max(1, round(short * share_kept(size)))


def centre_square(image: Tensor, size: int) -> Tensor:
    """The middle of an image as evaluation sees it, small images scaled up.

    It is what resizing the short side to 8/7 of `size` and cropping the centre keep, in one step; below 64 pixels the
    whole short side is kept.

    Args:
        image: uint8 of shape (3, height, width).

    Returns:
        uint8 of shape (3, size, size).
    """
    side = _side_kept(image, size)
    height, width = image.shape[-2:]
    return _resized_square(image, (height - side) // 2, (width - side) // 2, side, size)


def _shifted_square(image: Tensor, size: int) -> Tensor:
    """A square as large as evaluation's, anywhere in the image."""
    side = _side_kept(image, size)
    height, width = image.shape[-2:]
    top, left = (int(torch.randint(length - side + 1, ())) for length in (height, width))
    return _resized_square(image, top, left, side, size)


def _light(size: int) -> list[Transform]:
    from torchvision.transforms import v2

    if size < _SMALL:
        pad = max(1, size // 8)
        return [lambda image: centre_square(image, size), v2.RandomCrop(size, padding=pad, padding_mode="reflect")]
    return [lambda image: _shifted_square(image, size)]


def _random_resized_crop(size: int, least: float) -> Transform:
    from torchvision.transforms import v2

    scale = (max(least, 0.64) if size < _SMALL else least, 1.0)
    crop: Transform = v2.RandomResizedCrop(size, scale=scale, antialias=True)
    return crop


def _standard(size: int) -> list[Transform]:
    from torchvision.transforms import v2

    # A quarter of the area at least: the usual 0.08 is for runs of a hundred epochs.
    return [_random_resized_crop(size, 0.25), v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)]


def _randaugment(size: int) -> list[Transform]:
    from torchvision.transforms import v2

    return [_random_resized_crop(size, 0.08), v2.RandAugment(num_ops=2, magnitude=9)]


_RECIPES: dict[str, Callable[[int], list[Transform]]] = {
    "light": _light,
    "standard": _standard,
    "randaugment": _randaugment,
}
AUGMENTATIONS = ("none", *_RECIPES)


def build_augmentation(name: str, size: int, flip: bool = True) -> Transform:
    """A transform of uint8 images of shape (3, height, width) to (3, size, size) that draws from torch's generator.

    Args:
        name: "none" (the centre, as in evaluation), "light" (a shifted crop), "standard" (a random resized crop, and
            brightness, contrast and saturation), or "randaugment" (a random resized crop and two operations of
            RandAugment; Cubuk et al., 2019); all but "none" mirror half of the images.
        flip: False mirrors none, as for digits and letters.
    """
    if name == "none":
        return lambda image: centre_square(image, size)
    from torchvision.transforms import v2

    steps = _RECIPES[name](size)
    if flip:
        # Behind the crop, where there are fewer pixels to mirror.
        steps.insert(1, v2.RandomHorizontalFlip())

    def augment(image: Tensor) -> Tensor:
        for step in steps:
            image = step(image)
        return image

    return augment


@dataclass
class Augmentation:
    """A named augmentation whose random numbers are a function of (seed, epoch, sample).

    It seeds torch's global generator, so its caller restores that, as `BatchReader` does.
    """

    name: str
    size: int
    seed: int
    flip: bool = True
    _transform: Transform | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.name not in AUGMENTATIONS:
            raise UserError(f"augment={self.name!r}: expected one of {', '.join(AUGMENTATIONS)}")
        self._key = derive_seed(self.seed, "augmentation")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_transform": None}

    def __call__(self, image: Tensor, number: int, epoch: int) -> Tensor:
        """The image of sample `number` in an epoch: uint8 of shape (3, height, width) to (3, size, size)."""
        if self._transform is None:
            self._transform = build_augmentation(self.name, self.size, self.flip)
        if self.name != "none":
            torch.default_generator.manual_seed(derive_seed_at(self._key, epoch, number))
        return self._transform(image)


def _box(share: float, height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a rectangle around a random point with a share of the area, cut at the borders."""
    side = share**0.5
    y, x = draw.random() * height, draw.random() * width
    half_height, half_width = side * height / 2, side * width / 2
    top, bottom = max(0, round(y - half_height)), min(height, round(y + half_height))
    left, right = max(0, round(x - half_width)), min(width, round(x + half_width))
    return top, bottom, left, right


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

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def one_hot(self, target: int) -> Tensor:
        """The target of a sample by itself: float32 of shape (classes,)."""
        soft = torch.zeros(self.num_classes)
        soft[target] = 1.0
        return soft

    def __call__(
        self, image: Tensor, target: int, partner: Tensor, partner_target: int, number: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """The mixture of a sample with its partner.

        Args:
            image: uint8 of shape (3, size, size), as `partner`.
            number: of the sample.

        Returns:
            uint8 of shape (3, size, size), and the soft target, float32 of shape (classes,) with the sum 1.
        """
        draw = random.Random(derive_seed(self.seed, "mixing", epoch, number))
        use_cutmix = bool(self.cutmix) and (not self.mixup or draw.random() < 0.5)
        alpha = self.cutmix if use_cutmix else self.mixup
        share = draw.betavariate(alpha, alpha)
        if use_cutmix:
            height, width = image.shape[-2:]
            top, bottom, left, right = _box(1 - share, height, width, draw)
            image = image.clone()
            image[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / (height * width)
        else:
            image = torch.lerp(partner.float(), image.float(), share).round_().to(torch.uint8)
        return image, share * self.one_hot(target) + (1 - share) * self.one_hot(partner_target)


@contextmanager
def _like_a_worker() -> Iterator[None]:
    """One thread, since sums in several parts may round differently, and the global generator restored afterwards."""
    threads, state = torch.get_num_threads(), torch.default_generator.get_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.default_generator.set_state(state)


class Images(Protocol):
    """Images by number: a tensor of all, or `ImageFiles`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Tensor: ...


class BatchReader:
    """Makes batches of images: read, augmented and mixed.

    Args:
        images: uint8 of shape (3, height, width) by sample number.
        targets: int64 of shape (n,).
        augmentation: applied to each image.
        mixing: makes mixtures and soft targets of shape (batch, classes). A sample whose partner cannot be read stays
            as it is.
    """

    def __init__(
        self, images: Images, targets: Tensor, augmentation: Augmentation, mixing: Mixing | None = None
    ) -> None:
        self.images, self.targets, self.augmentation = images, targets, augmentation
        self.mixing = mixing or None
        self.mixes = bool(mixing)

    def prepare(self) -> None:
        """Decode the images that are kept in memory."""
        prepare = getattr(self.images, "prepare", None)
        if prepare is not None:
            prepare()

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        epoch, rows, partners = request
        count = len(self.targets)
        images: dict[int, Tensor] = {}
        unreadable: list[tuple[int, str]] = []
        with _like_a_worker():
            for row in dict.fromkeys((*rows, *partners)):
                try:
                    images[row] = self.augmentation(self.images[row % count], row, epoch)
                except UnreadableImage as error:
                    unreadable.append((row % count, str(error)))
            kept = [row for row in rows if row in images]
            size = self.augmentation.size
            inputs = torch.empty((len(kept), 3, size, size), dtype=torch.uint8)
            index = torch.tensor(kept, dtype=torch.int64) % count
            targets = self.targets[index]
            if self.mixing is None:
                for place, row in zip(inputs, kept):
                    place.copy_(images[row])
            else:
                classes, soft = dict(zip(kept, targets.tolist())), []
                partner_of = dict(zip(rows, partners))
                for place, row in zip(inputs, kept):
                    other = partner_of[row]
                    image, target = images[row], self.mixing.one_hot(classes[row])
                    if other in images:
                        label = int(self.targets[other % count])
                        image, target = self.mixing(image, classes[row], images[other], label, row, epoch)
                    place.copy_(image)
                    soft.append(target)
                targets = torch.stack(soft) if soft else torch.zeros(0, self.mixing.num_classes)
        return LoadedBatch(inputs, targets, index, unreadable)
