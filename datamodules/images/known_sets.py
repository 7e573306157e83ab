"""Image data sets by name: MNIST and its relatives in idx files, CIFAR through torchvision, and the bundled digits.

MNIST's file format is a header of big-endian sizes, then the bytes (LeCun, Cortes and Burges, 1998).
"""

import gzip
import math
import string
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.labels import check_labels
from datamodules.loading.download import download

__all__ = [
    "DATASETS",
    "EMNIST",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "IMAGE_SETS",
    "ImageSet",
    "check_images_and_labels",
    "colour_digits",
    "describe_missing",
    "download_files",
    "file_names",
    "find_files",
    "holds_other_files",
    "known_set",
    "load_digits",
    "read_idx",
    "read_part",
    "read_torchvision",
]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_UINT8, _INT32 = 0x08, 0x0C
_MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
EMNIST = {
    "emnist-balanced": _MERGED,
    "emnist-bymerge": _MERGED,
    "emnist-byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "emnist-letters": string.ascii_lowercase,
    "emnist-digits": string.digits,
    "emnist-mnist": string.digits,
}
"""The classes of EMNIST's sets (Cohen et al., 2017)."""


_DIGITS = tuple(string.digits)


@dataclass(frozen=True)
class ImageSet:
    """The names of a data set, the statistics of its training pixels (0..1) by channel, and what suits it.

    Of photographs the statistics are ImageNet's, which published weights expect. `classes` is empty where the names are
    known only once the set has been read.
    """

    title: str
    classes: tuple[str, ...] = _DIGITS
    mean: tuple[float, ...] = (0.1307,)
    std: tuple[float, ...] = (0.3081,)
    torchvision_name: str | None = None
    flip: bool = False
    """Whether its images may be mirrored."""
    rotation: float = 10.0
    """The usual augmentation, in degrees; `scale` as in 0.1 for 0.9 to 1.1."""
    scale: float = 0.1
    image_size: int = 28
    num_classes: int = 0
    parts: tuple[str, ...] = ("train", "test")
    """Of the set as it is published."""


_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_KANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
DATASETS = {
    "mnist": ImageSet("MNIST", torchvision_name="MNIST"),
    # Clothing lies upright and fills the image.
    "fashion-mnist": ImageSet("Fashion-MNIST", _CLOTHES, (0.2860,), (0.3530,), "FashionMNIST", True, 0.0, 0.0),
    "kmnist": ImageSet("KMNIST", _KANA, (0.1918,), (0.3483,), "KMNIST"),
    "qmnist": ImageSet("QMNIST"),
    **{
        name: ImageSet(name.replace("emnist-", "EMNIST "), tuple(classes), (0.1722,), (0.3309,))
        for name, classes in EMNIST.items()
    },
    "digits": ImageSet("scikit-learn digits", mean=(0.1558,), std=(0.2774,)),
    # Your own take MNIST's form, so its statistics fit, and a checkpoint needs no others.
    "custom": ImageSet("your images", (), parts=()),
}
"""Sets in MNIST's form."""

_10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGE_SETS = {
    "folder": ImageSet("images", (), IMAGENET_MEAN, IMAGENET_STD, flip=True, image_size=224, parts=()),
    "cifar10": ImageSet("CIFAR-10", (), *_10, "CIFAR10", flip=True, image_size=32, num_classes=10),
    "cifar100": ImageSet("CIFAR-100", (), *_100, "CIFAR100", flip=True, image_size=32, num_classes=100),
    "digits": replace(DATASETS["digits"], mean=IMAGENET_MEAN, std=IMAGENET_STD, image_size=32),
}
"""Sets in colour."""


def file_names(name: str) -> dict[str, tuple[str, str]]:
    """The published names of a set's images and labels, by part, without .gz."""
    if name in EMNIST or name == "qmnist":
        labels = "labels-idx2-int" if name == "qmnist" else "labels-idx1-ubyte"
        return {part: (f"{name}-{part}-images-idx3-ubyte", f"{name}-{part}-{labels}") for part in ("train", "test")}
    prefixes = {"train": "train", "test": "t10k"}
    return {part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte") for part, stem in prefixes.items()}


def files_in(folder: Path, name: str) -> dict[str, Path]:
    """Those of a set's four files that a folder holds, by published name; as packed, and as Kaggle names them, too."""
    found: dict[str, Path] = {}
    for stem in (stem for pair in file_names(name).values() for stem in pair):
        dotted = stem.replace("-idx", ".idx")
        places = (f"{stem}.gz", stem, f"{dotted}.gz", dotted, f"{stem}/{stem}", f"{stem}/{dotted}")
        if file := next((folder / place for place in places if (folder / place).is_file()), None):
            found[stem] = file
    return found


def read_idx(path: Path, dimensions: int) -> Tensor:
    """What is in an idx or idx.gz file.

    Args:
        dimensions: how many are expected: 1 for labels, 2 for rows of whole numbers, 3 for images (n, height, width).

    Returns:
        uint8; int64 of shape (n, columns) for 2 dimensions, which are of 32 bits in the file.

    Raises:
        UserError: the file is damaged, cut short, too long or of another kind.
    """
    try:
        content = path.read_bytes()
        # A bytearray, since torch warns of memory that it may not write.
        data = bytearray(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}; delete it and run again to download it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    kind, size = (_INT32, 4) if dimensions == 2 else (_UINT8, 1)
    header, magic = 4 + 4 * dimensions, bytes((0, 0, kind, dimensions))
    if len(data) < header or data[:4] != magic:
        raise UserError(
            f"{path} is no idx file of {'whole numbers' if size == 4 else 'bytes'} in {dimensions} dimensions: it "
            f"starts with {data[:4].hex() or 'nothing'}, expected {magic.hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    found, expected = len(data) - header, size * math.prod(shape)
    if found != expected or not expected:
        raise UserError(f"{path} holds {found:,} bytes, and its header says {' x '.join(map(str, shape))}")
    if size == 4:
        return torch.from_numpy(np.frombuffer(data, ">i4", offset=header).astype(np.int64)).reshape(shape)
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).reshape(shape)


def check_images_and_labels(
    images: Tensor, labels: Tensor, num_classes: int, images_from: str, labels_from: str, image_size: int = 28
) -> None:
    """Check images and labels before training.

    Args:
        images: uint8 of shape (n, height, width).
        labels: uint8 of shape (n,).

    Raises:
        UserError: with the file, the row and the reason.
    """
    if len(images) != len(labels):
        raise UserError(f"{images_from} holds {len(images):,} images and {labels_from} {len(labels):,} labels")
    if tuple(images.shape[1:]) != (image_size, image_size):
        height, width = images.shape[1:]
        raise UserError(f"{images_from} holds images of {height} x {width}, expected {image_size} x {image_size}")
    # As int64: uint8 wraps the number it is compared with, and 256 classes would be none.
    check_labels(labels.long(), num_classes, labels_from)


def _torchvision_class(info: ImageSet) -> Any:
    """The torchvision class of a data set, which holds its addresses and checksums."""
    import torchvision.datasets

    assert info.torchvision_name is not None, f"{info.title} has no files"
    return getattr(torchvision.datasets, info.torchvision_name)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Folders that may hold the files, torchvision's last: downloads go there."""
    own = DATASETS[name].torchvision_name or name.split("-")[0].upper()
    return [data_dir, data_dir / name, data_dir / "gzip", data_dir / own / "raw"]


def find_files(name: str, data_dir: str | Path) -> dict[str, tuple[Path, Path]] | None:
    """The image and the label file of each part ("train", "test"), or None where one of the four is missing."""
    for folder in _candidate_folders(name, Path(data_dir)):
        found = files_in(folder, name)
        if len(found) == 4:
            return {part: (found[images], found[labels]) for part, (images, labels) in file_names(name).items()}
    return None


def describe_missing(name: str, data_dir: Path) -> str:
    """Why `find_files` found nothing."""
    title = DATASETS[name].title
    if not data_dir.exists():
        return f"the folder {data_dir} does not exist, so there are no {title} files"
    found = max((files_in(folder, name) for folder in _candidate_folders(name, data_dir)), key=len)
    missing = [stem for pair in file_names(name).values() for stem in pair if stem not in found]
    if found:
        return f"{data_dir} lacks {' and '.join(missing)} of the four {title} files"
    return f"{data_dir} has no {title} files"


def known_set(data_dir: Path, given: bool) -> str | None:
    """The set whose files a folder holds by their names: MNIST, or where it is given, QMNIST or one of EMNIST's.

    Raises:
        UserError: there are several of them.
    """
    if find_files("mnist", data_dir) or not given:
        return "mnist" if find_files("mnist", data_dir) else None
    found = [name for name in ("qmnist", *EMNIST) if find_files(name, data_dir)]
    if len(found) > 1:
        raise UserError(f"{data_dir} holds {', '.join(found)}; pass dataset={found[0]!r} or another of them")
    return found[0] if found else None


def holds_other_files(data_dir: Path) -> bool:
    """Whether a folder holds more than what downloads make, and hidden files."""
    names = {entry.name for entry in data_dir.iterdir() if entry.name[0] != "."} if data_dir.is_dir() else set()
    return data_dir.is_file() or bool(names - {info.torchvision_name for info in DATASETS.values()})


def download_files(name: str, data_dir: Path) -> None:
    """Download the files of a set that torchvision knows the addresses of.

    Raises:
        DownloadError: none of the addresses gives a file as it should be.
        OSError: a file cannot be written.
    """
    source, folder = _torchvision_class(DATASETS[name]), _candidate_folders(name, data_dir)[-1]
    for file_name, md5 in source.resources:
        download([mirror + file_name for mirror in source.mirrors], folder / file_name, md5)


def read_part(name: str, part: str, data_dir: Path) -> tuple[Tensor, Tensor, tuple[str, str]] | None:
    """A part of a set as the set means it: images upright, uint8 of shape (n, height, width), and labels from 0.

    EMNIST writes columns for rows, and counts letters from 1. The first of QMNIST's eight columns is the class.

    Returns:
        The images, labels of shape (n,), and what they are from; None where there are no files.

    Raises:
        UserError: a file is damaged, or of another set by its pixels.
    """
    if name == "digits":
        return *load_digits()[part], ("the bundled digits", "the bundled digits")
    files = find_files(name, data_dir)
    if files is None:
        return None
    images, labels = files[part]
    pixels = read_idx(images, 3)
    numbers = read_idx(labels, 2)[:, 0] if name == "qmnist" else read_idx(labels, 1)
    if name in EMNIST:
        pixels = pixels.transpose(1, 2).contiguous()
    _refuse_another_sets_images(name, pixels, str(images))
    return pixels, numbers.long() - 1 if name == "emnist-letters" else numbers, (str(images), str(labels))


def _refuse_another_sets_images(name: str, images: Tensor, source: str) -> None:
    """Fashion-MNIST and KMNIST share MNIST's file names; the statistics of the pixels tell them apart, however packed.

    Args:
        images: uint8 of shape (n, height, width).
    """
    some = images[:10_000].double() / 255
    mean, std = float(some.mean()), float(some.std())

    def matches(info: ImageSet) -> bool:
        return abs(mean - info.mean[0]) < 0.01 and abs(std - info.std[0]) < 0.015

    for other, info in DATASETS.items():
        if info.torchvision_name and matches(info) and not matches(DATASETS[name]):
            raise UserError(
                f"{source} belongs to {info.title} by its pixels (mean {mean:.3f}, standard deviation {std:.3f}), "
                f"expected {DATASETS[name].title}; pass dataset={other!r} or another `data_dir`"
            )


def load_digits() -> dict[str, tuple[Tensor, Tensor]]:
    """scikit-learn's 1,797 bundled digits in MNIST's form: 20 x 20 pixels in the middle of 28 x 28, bytes.

    A fifth of each class is the test set, the same for every seed.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    bunch = load()
    small = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    large = F.interpolate(small, size=(20, 20), mode="bilinear", align_corners=False)
    images = F.pad(large, (4, 4, 4, 4)).mul(255).round().to(torch.uint8).squeeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.uint8)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=bunch.target)
    return {part: (images[rows], labels[rows]) for part, rows in (("train", train), ("test", test))}


def read_torchvision(name: str, part: str, data_dir: str | Path, download: bool) -> tuple[Tensor, Tensor, list[str]]:
    """A part of one of torchvision's sets: bytes of shape (n, 3, height, width), labels, and the names of classes."""
    found = _torchvision_class(IMAGE_SETS[name])(str(data_dir), train=part == "train", download=download)
    return torch.from_numpy(found.data).permute(0, 3, 1, 2), torch.tensor(found.targets), list(found.classes)


def colour_digits(part: str) -> tuple[Tensor, Tensor]:
    """The bundled digits as small colour images, most of their empty margin cut off, and their labels."""
    images, labels = load_digits()[part]
    large = F.interpolate(images[:, None, 2:26, 2:26].float(), size=(32, 32), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).expand(-1, 3, -1, -1), labels.long()
