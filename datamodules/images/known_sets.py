"""Image data sets by name: CIFAR through torchvision, and the bundled digits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from datamodules.loading.file_table import FileTable
from datamodules.mnist.data_module import load_digits

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "IMAGE_SETS", "ImageSetInfo", "Samples", "read_digits", "read_torchvision"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageSetInfo:
    """The names of a set, and the mean and standard deviation of its pixels (0..1), by channel.

    Of photographs they are ImageNet's, which published weights expect. `classes` is empty until the set has been read,
    save where the names are known.
    """

    title: str
    num_classes: int = 0
    classes: tuple[str, ...] = ()
    image_size: int = 224
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    flip: bool = True
    torchvision_name: str | None = None
    parts: tuple[str, ...] = ()
    """Of the set as it is published."""


IMAGE_SETS = {
    "folder": ImageSetInfo("images"),
    "cifar10": ImageSetInfo(
        "CIFAR-10",
        10,
        image_size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        torchvision_name="CIFAR10",
        parts=("train", "test"),
    ),
    "cifar100": ImageSetInfo(
        "CIFAR-100",
        100,
        image_size=32,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        torchvision_name="CIFAR100",
        parts=("train", "test"),
    ),
    "digits": ImageSetInfo(
        "scikit-learn digits", 10, tuple("0123456789"), image_size=32, flip=False, parts=("train", "test")
    ),
}


@dataclass(frozen=True)
class Samples:
    """A part of a set.

    Attributes:
        images: files, images in memory, or uint8 of shape (n, 3, height, width).
        targets: the classes' numbers, int64 of shape (n,).
    """

    images: FileTable | Sequence[str | Image.Image] | Tensor
    targets: Tensor

    def select(self, rows: Tensor) -> "Samples":
        """Those of some numbers, int64 of shape (m,)."""
        images = self.images
        assert isinstance(images, (FileTable, Tensor))
        return Samples(images[rows] if isinstance(images, Tensor) else images.select(rows), self.targets[rows])


def read_torchvision(name: str, part: str, data_dir: str, download: bool) -> tuple[Samples, tuple[str, ...]]:
    """A part of one of torchvision's sets, and the names of its classes."""
    import torchvision.datasets

    info = IMAGE_SETS[name]
    assert info.torchvision_name is not None
    source = getattr(torchvision.datasets, info.torchvision_name)
    found = source(data_dir, train=part == "train", download=download)
    return Samples(torch.from_numpy(found.data).permute(0, 3, 1, 2), torch.tensor(found.targets)), tuple(found.classes)


def read_digits(part: str) -> Samples:
    """The bundled digits as small colour images, most of their empty margin cut off."""
    images, labels = load_digits()[part]
    large = F.interpolate(images[:, None, 2:26, 2:26].float(), size=(32, 32), mode="bilinear", align_corners=False)
    return Samples(large.round().to(torch.uint8).expand(-1, 3, -1, -1), labels.long())
