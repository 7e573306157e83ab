"""Names, statistics and usual augmentation of known image data sets, and the bundled digits."""

import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.images.source import ArrayImages, PartsOnDemand, Samples, Source

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_DIGITS = tuple(string.digits)


@dataclass(frozen=True)
class ImageSet:
    """Names of a data set, mean and std of its training pixels (0..1) by channel, and its usual augmentation.

    Photographs have the statistics of ImageNet, which published weights expect. `classes` is empty for the user's
    images.
    """

    title: str
    classes: tuple[str, ...] = _DIGITS
    mean: tuple[float, ...] = (0.1307,)
    std: tuple[float, ...] = (0.3081,)
    torchvision_name: str | None = None
    flip: bool = False
    """Whether images may be mirrored."""
    rotation: float = 10.0
    """Largest rotation of the usual augmentation, in degrees."""
    scale: float = 0.1
    """Largest change of scale of the usual augmentation, as in 0.1 for 0.9 to 1.1."""
    image_size: int = 28
    parts: tuple[str, ...] = ("train", "test")
    """Parts of the data set as it is published."""


_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
DATASETS = {
    "mnist": ImageSet("MNIST", torchvision_name="MNIST"),
    # Clothing lies upright and fills the image.
    "fashion-mnist": ImageSet("Fashion-MNIST", _CLOTHES, (0.2860,), (0.3530,), "FashionMNIST", True, 0.0, 0.0),
    "digits": ImageSet("scikit-learn digits", mean=(0.1558,), std=(0.2774,)),
    # The user's images are converted to MNIST's form, so its statistics fit, and a checkpoint need not hold others.
    "custom": ImageSet("your images", (), parts=()),
}
"""Data sets of 28 x 28 grey images, by name."""

IMAGE_SETS = {
    "folder": ImageSet("images", (), IMAGENET_MEAN, IMAGENET_STD, flip=True, image_size=224, parts=()),
    "digits": replace(DATASETS["digits"], mean=IMAGENET_MEAN, std=IMAGENET_STD, image_size=32),
}
"""Data sets of images in colour, by name."""


def _digits_file() -> dict[str, npt.NDArray[Any]]:
    """Load Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998; CC BY 4.0), as in scikit-learn 1.9.

    `images` has shape (1797, 8, 8) and values from 0 to 16. `train` and `test` are the row numbers of
    ``train_test_split(test_size=0.2, random_state=0, stratify=labels)``: a fifth of each class is the test part.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return dict(file)


def bundled_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Load the digits that come with this package, for examples without a download.

    Returns:
        Images of shape (1797, 8, 8) from 0 to 1, and labels of shape (1797,) from 0 to 9.

    Example:
        >>> images, labels = bundled_digits()
        >>> images.shape, labels[:4]
        ((1797, 8, 8), array([0, 1, 2, 3]))
    """
    digits = _digits_file()
    return digits["images"] / 16, digits["labels"].astype(np.int64)


def load_digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Load the 1,797 bundled digits in MNIST's form: uint8, enlarged to 20 x 20 pixels and padded to 28 x 28.

    A fifth of each class is the test part, the same for every seed.
    """
    digits = {name: torch.from_numpy(values) for name, values in _digits_file().items()}
    small = digits["images"].float().unsqueeze(1) / 16
    large = F.interpolate(small, size=(20, 20), mode="bilinear", align_corners=False)
    images = F.pad(large, (4, 4, 4, 4)).mul(255).round().to(torch.uint8).squeeze(1)
    parts = {}
    for part in ("train", "test"):
        rows = digits[part].long()
        parts[part] = (images[rows], digits["labels"][rows])
    return parts


def digits_source(colour: bool = False) -> Source:
    """Make a data set of the bundled digits: in MNIST's form, or as 32 x 32 colour images with a smaller margin."""
    title = DATASETS["digits"].title

    def read(part: str) -> Samples:
        images, labels = load_digits()[part]
        if colour:
            cropped = images[:, None, 2:26, 2:26].float()
            large = F.interpolate(cropped, size=(32, 32), mode="bilinear", align_corners=False)
            images = large.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
        return Samples(ArrayImages(images.numpy(), f"the {part} images of the {title}"), labels.long())

    labels_from = dict.fromkeys(("train", "test"), "the bundled digits")
    return Source(_DIGITS, PartsOnDemand(("train", "test"), read), title, labels_from=labels_from)
