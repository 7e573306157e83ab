"""Image data sets by name: MNIST and Fashion-MNIST in idx files, and the bundled digits."""

import gzip
import math
import string
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.labels import check_labels
from datamodules.loading.download import download

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DIGITS = tuple(string.digits)


@dataclass(frozen=True)
class ImageSet:
    """The names of a data set, the statistics of its training pixels (0..1) by channel, and what suits it.

    Of photographs the statistics are ImageNet's, which published weights expect. `classes` is empty where the images
    are your own.
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
    parts: tuple[str, ...] = ("train", "test")
    """Of the set as it is published."""


_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
DATASETS = {
    "mnist": ImageSet("MNIST", torchvision_name="MNIST"),
    # Clothing lies upright and fills the image.
    "fashion-mnist": ImageSet("Fashion-MNIST", _CLOTHES, (0.2860,), (0.3530,), "FashionMNIST", True, 0.0, 0.0),
    "digits": ImageSet("scikit-learn digits", mean=(0.1558,), std=(0.2774,)),
    # Your own take MNIST's form, so its statistics fit, and a checkpoint needs no others.
    "custom": ImageSet("your images", (), parts=()),
}
"""Sets in MNIST's form."""

IMAGE_SETS = {
    "folder": ImageSet("images", (), IMAGENET_MEAN, IMAGENET_STD, flip=True, image_size=224, parts=()),
    "digits": replace(DATASETS["digits"], mean=IMAGENET_MEAN, std=IMAGENET_STD, image_size=32),
}
"""Sets in colour."""


FILES = {
    part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    for part, stem in (("train", "train"), ("test", "t10k"))
}
"""The published names of the images and labels of MNIST and Fashion-MNIST, by part, without .gz."""


def _files_in(folder: Path) -> dict[str, Path]:
    """Those of the four files that a folder holds, by published name; as packed, and as Kaggle names them, too."""
    found: dict[str, Path] = {}
    for stem in (stem for pair in FILES.values() for stem in pair):
        dotted = stem.replace("-idx", ".idx")
        places = (f"{stem}.gz", stem, f"{dotted}.gz", dotted, f"{stem}/{stem}", f"{stem}/{dotted}")
        if file := next((folder / place for place in places if (folder / place).is_file()), None):
            found[stem] = file
    return found


def read_idx(path: Path, dimensions: int) -> Tensor:
    """What is in an idx or idx.gz file, uint8.

    Args:
        dimensions: how many are expected: 1 for labels, 3 for images (n, height, width).

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
    header, magic = 4 + 4 * dimensions, bytes((0, 0, 8, dimensions))
    if len(data) < header or data[:4] != magic:
        raise UserError(
            f"{path} is no idx file of bytes in {dimensions} dimensions: it starts with {data[:4].hex() or 'nothing'},"
            f" expected {magic.hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if len(data) - header != math.prod(shape) or not math.prod(shape):
        raise UserError(f"{path} holds {len(data) - header:,} bytes, and its header says {' x '.join(map(str, shape))}")
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).reshape(shape)


def check_images_and_labels(
    images: Tensor, labels: Tensor, num_classes: int, images_from: str, labels_from: str
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
    if tuple(images.shape[1:]) != (28, 28):
        raise UserError(f"{images_from} holds images of {' x '.join(map(str, images.shape[1:]))}, expected 28 x 28")
    # As int64: uint8 wraps the number it is compared with, and 256 classes would be none.
    check_labels(labels.long(), num_classes, labels_from)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Folders that may hold the files, torchvision's last: downloads go there."""
    return [data_dir, data_dir / (DATASETS[name].torchvision_name or "") / "raw"]


def find_files(name: str, data_dir: str | Path) -> dict[str, tuple[Path, Path]] | None:
    """The image and the label file of each part ("train", "test"), or None where one of the four is missing."""
    for found in map(_files_in, _candidate_folders(name, Path(data_dir))):
        if len(found) == 4:
            return {part: (found[images], found[labels]) for part, (images, labels) in FILES.items()}
    return None


def describe_missing(name: str, data_dir: Path) -> str:
    """Why `find_files` found nothing."""
    title = DATASETS[name].title
    if not data_dir.exists():
        return f"the folder {data_dir} does not exist, so there are no {title} files"
    found = max(map(_files_in, _candidate_folders(name, data_dir)), key=len)
    missing = [stem for pair in FILES.values() for stem in pair if stem not in found]
    lacks = f"lacks {' and '.join(missing)} of the four" if found else "has no"
    return f"{data_dir} {lacks} {title} files"


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
    import torchvision.datasets

    source = getattr(torchvision.datasets, DATASETS[name].torchvision_name or "")
    folder = _candidate_folders(name, data_dir)[-1]
    for file_name, md5 in source.resources:
        download([mirror + file_name for mirror in source.mirrors], folder / file_name, md5)


def read_part(name: str, part: str, data_dir: Path) -> tuple[Tensor, Tensor, tuple[str, str]] | None:
    """A part of a set.

    Returns:
        The images, uint8 of shape (n, height, width), the labels of shape (n,), and what they are from; None where
        there are no files.

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
    _refuse_another_sets_images(name, pixels, str(images))
    return pixels, read_idx(labels, 1), (str(images), str(labels))


def _refuse_another_sets_images(name: str, images: Tensor, source: str) -> None:
    """Fashion-MNIST shares MNIST's file names; the statistics of the pixels tell them apart, however packed."""
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


def _digits_file() -> dict[str, npt.NDArray[Any]]:
    """Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998; CC BY 4.0), as scikit-learn 1.9 has it.

    `images` are (1797, 8, 8) from 0 to 16; `train` and `test` are the rows of
    ``train_test_split(test_size=0.2, random_state=0, stratify=labels)``: a fifth of each class is the test set.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return dict(file)


def bundled_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Load the digits that come with this package, to try things on without a download.

    Returns:
        The images, (1797, 8, 8) from 0 to 1, and their labels, (1797,) from 0 to 9.

    Example:
        >>> images, labels = bundled_digits()
        >>> images.shape, labels[:4]
        ((1797, 8, 8), array([0, 1, 2, 3]))
    """
    digits = _digits_file()
    return digits["images"] / 16, digits["labels"].astype(np.int64)


def load_digits() -> dict[str, tuple[Tensor, Tensor]]:
    """The 1,797 bundled digits in MNIST's form: 20 x 20 pixels in the middle of 28 x 28, bytes.

    A fifth of each class is the test set, the same for every seed.
    """
    digits = {name: torch.from_numpy(values) for name, values in _digits_file().items()}
    small = digits["images"].float().unsqueeze(1) / 16
    large = F.interpolate(small, size=(20, 20), mode="bilinear", align_corners=False)
    images = F.pad(large, (4, 4, 4, 4)).mul(255).round().to(torch.uint8).squeeze(1)
    return {part: (images[digits[part].long()], digits["labels"][digits[part].long()]) for part in ("train", "test")}


def colour_digits(part: str) -> tuple[Tensor, Tensor]:
    """The bundled digits as small colour images, most of their empty margin cut off, and their labels."""
    images, labels = load_digits()[part]
    large = F.interpolate(images[:, None, 2:26, 2:26].float(), size=(32, 32), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).expand(-1, 3, -1, -1), labels.long()
