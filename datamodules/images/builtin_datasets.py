"""Image data sets known by name: the bundled digits, MNIST and Fashion-MNIST, CIFAR-10 and CIFAR-100.

This module finds, downloads, reads and checks the four idx files of MNIST and the archives of CIFAR.
"""

import gzip
import math
import pickle
import string
import struct
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError, spelled
from datamodules.images.source import ArrayImages, PartsOnDemand, Samples, Source
from datamodules.loading.download import digest_of, download
from datamodules.loading.table_files import parse_columns

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_DIGITS = tuple(string.digits)


@dataclass(frozen=True)
class ImageSet:
    """Facts about a data set: names, mean and std of each channel (pixels from 0 to 1), and usual augmentation.

    Photographs have ImageNet's statistics, which published weights expect. `classes` is empty for the user's images.
    """

    title: str
    classes: tuple[str, ...] = _DIGITS
    mean: tuple[float, ...] = (0.1307,)
    std: tuple[float, ...] = (0.3081,)
    torchvision_name: str | None = None
    """Class in `torchvision.datasets` with URLs and digests; None if nothing is downloaded."""
    flip: bool = False
    """Whether images may be mirrored."""
    rotation: float = 10.0
    """Largest rotation of the usual augmentation, in degrees."""
    scale: float = 0.1
    """Largest change of scale of the usual augmentation, as in 0.1 for 0.9 to 1.1."""
    image_size: int = 28
    parts: tuple[str, ...] = ("train", "test")
    """Published parts of the data set."""
    natural_images: bool = False
    """Whether weights pretrained on ImageNet suit the images."""
    splits_by_class: bool = True
    """Whether a held-out part is a share of each class; otherwise it is a share of all samples."""


_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
DATASETS: dict[str, ImageSet] = {
    "mnist": ImageSet("MNIST", torchvision_name="MNIST", splits_by_class=False),
    # Clothing lies upright and fills the image.
    "fashion-mnist": ImageSet(
        *("Fashion-MNIST", _CLOTHES, (0.2860,), (0.3530,), "FashionMNIST", True, 0.0, 0.0), splits_by_class=False
    ),
    "digits": ImageSet("scikit-learn digits", mean=(0.1558,), std=(0.2774,), splits_by_class=False),
    # The user's images are converted to MNIST's form, so MNIST's statistics fit, and need not be saved.
    "custom": ImageSet("your images", (), parts=()),
}
"""Data sets of 28 x 28 gray images, by name."""

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_CIFAR = ImageSet("CIFAR-10", _CIFAR10, flip=True, image_size=32, natural_images=True)
IMAGE_SETS: dict[str, ImageSet] = {
    "folder": ImageSet(
        "images", (), IMAGENET_MEAN, IMAGENET_STD, flip=True, image_size=224, parts=(), natural_images=True
    ),
    "digits": replace(DATASETS["digits"], mean=IMAGENET_MEAN, std=IMAGENET_STD, image_size=32, splits_by_class=True),
    "cifar10": replace(_CIFAR, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), torchvision_name="CIFAR10"),
    "cifar100": replace(
        _CIFAR,
        title="CIFAR-100",
        classes=tuple(_CIFAR100.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        torchvision_name="CIFAR100",
    ),
}
"""Data sets of images in color, by name."""
ARCHIVES = {"cifar-10-python.tar.gz": "cifar10", "cifar-100-python.tar.gz": "cifar100"}
"""Data set of each published archive, by its file name."""


def _digits_file() -> dict[str, npt.NDArray[Any]]:
    """Load Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998; CC BY 4.0), as in scikit-learn 1.9.

    `images` has shape (1797, 8, 8) and values from 0 to 16. `train` and `test` are the row numbers of
    ``train_test_split(test_size=0.2, random_state=0, stratify=labels)``: a fifth of each class is the test part.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return dict(file)


def bundled_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Load the digits that are bundled with this package, for examples without a download.

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

    The test part is a fifth of each class, for every seed the same.
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


def digits_source(color: bool = False) -> Source:
    """Make a data set from the bundled digits: in MNIST's form, or as 32 x 32 color images with a smaller margin."""
    title = DATASETS["digits"].title

    def read(part: str) -> Samples:
        images, labels = load_digits()[part]
        if color:
            cropped = images[:, None, 2:26, 2:26].float()
            large = F.interpolate(cropped, size=(32, 32), mode="bilinear", align_corners=False)
            images = large.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
        return Samples(ArrayImages(images.numpy(), f"the {part} images of the {title}"), labels.long())

    labels_from = dict.fromkeys(("train", "test"), "the bundled digits")
    return Source(_DIGITS, PartsOnDemand(("train", "test"), read), title, labels_from=labels_from)


FILES = {
    part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    for part, stem in (("train", "train"), ("test", "t10k"))
}
"""Published names of the image and label files of each part, without .gz."""
USES = ("images", "labels", "test_images", "test_labels")
"""Uses that `columns` maps to other file names, in the order of `FILES`."""
_STEMS = [stem for pair in FILES.values() for stem in pair]


def _files_in(folder: Path, columns: str | None = None) -> dict[str, Path]:
    """Return the files of a data set in a folder by published name, compressed or not."""
    declared = parse_columns(columns)
    files: dict[str, Path] = {}
    for use, stem in zip(USES, _STEMS):
        name = declared.get(use, stem)
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                files.setdefault(stem, path)
    return files


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx or idx.gz file as a uint8 tensor.

    Args:
        path: path of the file.
        dimensions: expected number of dimensions: 1 for labels, 3 for images (n, height, width).

    Raises:
        UserError: the file is damaged, truncated, too long or of another type.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}; delete it and run again to download it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    # The format: two zeros, the type (8 is uint8), the number of dimensions, and each size as a big-endian uint32.
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if len(content) < header or content[:4] != magic:
        raise UserError(
            f"{path} is no idx file of bytes in {dimensions} dimensions: it starts with"
            f" {content[:4].hex() or 'nothing'}, expected {magic.hex()}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = len(content) - header
    if size != math.prod(shape) or not math.prod(shape):
        raise UserError(f"{path} holds {size:,} bytes, and its header says {' x '.join(map(str, shape))}")
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).reshape(shape)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Return the folders that may hold the files. Files are downloaded into the last one, torchvision's."""
    return [data_dir, data_dir / (DATASETS[name].torchvision_name or "") / "raw"]


def find_files(name: str, data_dir: str | Path, columns: str | None = None) -> dict[str, tuple[Path, Path]] | None:
    """Return the image and label files of "train" and "test", or None if one of the four is missing.

    Args:
        name: name of the data set in `DATASETS`.
        data_dir: folder of the files, flat or in torchvision's layout.
        columns: other names of the files, see `USES`.
    """
    for folder in _candidate_folders(name, Path(data_dir)):
        files = _files_in(folder, columns)
        if len(files) == len(_STEMS):
            return {part: (files[images], files[labels]) for part, (images, labels) in FILES.items()}
    return None


def describe_missing(name: str, data_dir: Path) -> str:
    """Return why `find_files` found nothing."""
    title = DATASETS[name].title
    if not data_dir.exists():
        return f"the folder {data_dir} does not exist, so there are no {title} files"
    files = max(map(_files_in, _candidate_folders(name, data_dir)), key=len)
    missing = [stem for stem in _STEMS if stem not in files]
    lacks = f"lacks {' and '.join(missing)} of the four" if files else "has no"
    return f"{data_dir} {lacks} {title} files"


def proposal(data_dir: Path) -> str:
    """Return what to pass for four files with other names, such as train-images.idx3-ubyte; "" if there are none."""
    others = sorted(path.relative_to(data_dir).as_posix() for path in data_dir.glob("**/*ubyte*") if path.is_file())
    names: dict[str, str] = {}
    for use, stem in zip(USES, _STEMS):
        # Such as "train-images".
        start = stem.partition("-idx")[0]
        names.update((use, other) for other in others if start in Path(other).name)
    declared = ",".join(f"{use}={name}" for use, name in names.items())
    return f"{spelled('columns', declared)}, or " if len(names) == len(USES) else ""


def other_files(data_dir: Path) -> list[str]:
    """Return the names in a folder, without downloads and hidden files; for a file, its name."""
    if not data_dir.is_dir():
        return [data_dir.name] if data_dir.is_file() else []
    downloads = {info.torchvision_name for info in DATASETS.values()}
    return [entry.name for entry in data_dir.iterdir() if entry.name[0] != "." and entry.name not in downloads]


def download_files(name: str, data_dir: Path) -> None:
    """Download the files of a data set from the URLs that torchvision knows.

    Raises:
        DownloadError: no URL delivers a file with the expected digest.
        OSError: a file cannot be written.
    """
    import torchvision.datasets

    source = getattr(torchvision.datasets, DATASETS[name].torchvision_name or "")
    folder = _candidate_folders(name, data_dir)[-1]
    for file_name, md5 in source.resources:
        download([mirror + file_name for mirror in source.mirrors], folder / file_name, md5)


def check_pair(images: Tensor, labels: Tensor, images_from: str, labels_from: str) -> None:
    """Check that images, uint8 of shape (n, 28, 28), and labels, of shape (n,), belong together.

    Raises:
        UserError: the numbers of images and labels differ, or the images have another size.
    """
    if len(images) != len(labels):
        raise UserError(f"{images_from} holds {len(images):,} images and {labels_from} {len(labels):,} labels")
    if tuple(images.shape[1:]) != (28, 28):
        raise UserError(f"{images_from} holds images of {' x '.join(map(str, images.shape[1:]))}, expected 28 x 28")


def from_idx(info: ImageSet, files: Mapping[str, tuple[Path, Path]]) -> Source:
    """Make a data set from the result of `find_files`. A part is read on first use.

    Reading a part raises a UserError if a file is damaged.
    """

    def read(part: str) -> Samples:
        images_file, labels_file = files[part]
        images = read_idx(images_file, 3)
        labels = read_idx(labels_file, 1)
        check_pair(images, labels, str(images_file), str(labels_file))
        return Samples(ArrayImages(images.numpy(), str(images_file)), labels.long())

    labels_from = {part: str(labels_file) for part, (_, labels_file) in files.items()}
    return Source(info.classes, PartsOnDemand(tuple(files), read), info.title, labels_from=labels_from)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler for containers, text, numbers and NumPy arrays. It looks up no other class or function."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        # The function that rebuilds an array is private, and its module changes between versions of NumPy.
        known = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.empty(0).__reduce__()[0]}
        if module_name.partition(".")[0] == "numpy" and global_name in known:
            return known[global_name]
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, expected arrays only")


def _torchvision_cifar(info: ImageSet) -> Any:
    """Return torchvision's class with the URL, the digest and the members of an archive of CIFAR."""
    import torchvision.datasets

    return getattr(torchvision.datasets, info.torchvision_name or "")


def _archive_of(info: ImageSet, path: Path) -> Path:
    """Return the path of the archive of CIFAR: `path`, or the file with the published name in this folder."""
    return path if path.is_file() else path / _torchvision_cifar(info).filename


def download_cifar(info: ImageSet, path: Path) -> None:
    """Download the archive of CIFAR into a folder, unless it exists.

    Raises:
        DownloadError: the server does not deliver a file with the expected digest.
        OSError: the file cannot be written.
    """
    published = _torchvision_cifar(info)
    download([published.url], _archive_of(info, path), published.tgz_md5)


def _read_cifar_batch(file: IO[bytes]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Read a batch of CIFAR: images, uint8 of shape (n, 32, 32, 3), and labels, for CIFAR-100 the fine labels."""
    # Python 2 wrote the archives, and its strings have no encoding. NumPy requires latin1 for arrays.
    batch = _ArrayUnpickler(file, encoding="latin1").load()
    labels = batch["fine_labels" if "fine_labels" in batch else "labels"]
    # A row has all red values, then all green ones, then all blue ones.
    return batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def from_cifar(info: ImageSet, path: Path, download_error: Exception | None = None) -> Source:
    """Make a data set from the published archive of CIFAR-10 or CIFAR-100 (Krizhevsky, 2009). A part is read on demand.

    The archive holds pickles. It is read only if it has the published digest, by an unpickler that calls nothing.

    Args:
        path: path of the archive or of its folder.
        download_error: error of the download, if it was tried.

    Raises:
        UserError: there is no archive, or it is not the published file.
    """
    published = _torchvision_cifar(info)
    archive = _archive_of(info, path)
    if not archive.is_file():
        reason = f"; {download_error}" if download_error else ""
        raise UserError(
            f"{path} has no {published.filename} of {info.title}{reason}; download {published.url} elsewhere, and pass"
            f" {spelled('data_dir', 'FOLDER')} of it"
        )
    digest = digest_of(archive)
    if digest != published.tgz_md5:
        raise UserError(
            f"{archive} is not the published archive of {info.title}: its MD5 is {digest}, expected"
            f" {published.tgz_md5}; delete it and run again to download it"
        )

    def read(part: str) -> Samples:
        members = published.train_list if part == "train" else published.test_list
        names = [f"{published.base_folder}/{name}" for name, _ in members]
        batches = {}
        with tarfile.open(archive, "r:gz") as tar:
            # In the order of the archive, so that it is decompressed once.
            for member in tar:
                if member.name in names:
                    file = tar.extractfile(member)
                    assert file is not None
                    batches[member.name] = _read_cifar_batch(file)
        pixels = np.concatenate([batches[name][0] for name in names])
        labels = [label for name in names for label in batches[name][1]]
        return Samples(ArrayImages(pixels, f"the {part} images of {info.title}"), torch.tensor(labels))

    labels_from = dict.fromkeys(info.parts, str(archive))
    return Source(info.classes, PartsOnDemand(info.parts, read), info.title, labels_from=labels_from)
