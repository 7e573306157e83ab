"""Images in idx files, as MNIST and Fashion-MNIST are published: found, downloaded, read and checked."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.known_sets import DATASETS, ImageSet
from datamodules.images.source import ArrayImages, PartsOnDemand, Samples, Source
from datamodules.loading.download import download

FILES = {
    part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    for part, stem in (("train", "train"), ("test", "t10k"))
}
"""The published names of the images and labels of MNIST and Fashion-MNIST, by part, without .gz."""
_STEMS = [stem for pair in FILES.values() for stem in pair]


def _files_in(folder: Path) -> dict[str, Path]:
    """The files of a set that a folder holds, by published name: packed or not, also as Kaggle names them."""
    found: dict[str, Path] = {}
    for stem in _STEMS:
        dotted = stem.replace("-idx", ".idx")
        for name in (f"{stem}.gz", stem, f"{dotted}.gz", dotted, f"{stem}/{stem}", f"{stem}/{dotted}"):
            if (folder / name).is_file():
                found[stem] = folder / name
                break
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
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: {error}; delete it and run again to download it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
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
    # A bytearray, since torch warns of memory that it may not write.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).reshape(shape)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Folders that may hold the files, torchvision's last: downloads go there."""
    return [data_dir, data_dir / (DATASETS[name].torchvision_name or "") / "raw"]


def find_files(name: str, data_dir: str | Path) -> dict[str, tuple[Path, Path]] | None:
    """The image and the label file of each part ("train", "test"), or None where one of the four is missing."""
    for folder in _candidate_folders(name, Path(data_dir)):
        found = _files_in(folder)
        if len(found) == len(_STEMS):
            return {part: (found[images], found[labels]) for part, (images, labels) in FILES.items()}
    return None


def describe_missing(name: str, data_dir: Path) -> str:
    """Why `find_files` found nothing."""
    title = DATASETS[name].title
    if not data_dir.exists():
        return f"the folder {data_dir} does not exist, so there are no {title} files"
    found = max(map(_files_in, _candidate_folders(name, data_dir)), key=len)
    missing = [stem for stem in _STEMS if stem not in found]
    lacks = f"lacks {' and '.join(missing)} of the four" if found else "has no"
    return f"{data_dir} {lacks} {title} files"


def holds_other_files(data_dir: Path) -> bool:
    """Whether a folder holds more than what downloads make, and hidden files."""
    if not data_dir.is_dir():
        return data_dir.is_file()
    names = {entry.name for entry in data_dir.iterdir() if entry.name[0] != "."}
    return bool(names - {info.torchvision_name for info in DATASETS.values()})


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


def _refuse_another_sets_images(name: str, images: Tensor, source: str) -> None:
    """Fashion-MNIST shares MNIST's file names; the statistics of the pixels tell them apart, however packed."""
    some = images[:10_000].double() / 255
    mean = float(some.mean())
    std = float(some.std())

    def matches(info: ImageSet) -> bool:
        return abs(mean - info.mean[0]) < 0.01 and abs(std - info.std[0]) < 0.015

    for other, info in DATASETS.items():
        if info.torchvision_name and matches(info) and not matches(DATASETS[name]):
            raise UserError(
                f"{source} belongs to {info.title} by its pixels (mean {mean:.3f}, standard deviation {std:.3f}), "
                f"expected {DATASETS[name].title}; pass dataset={other!r} or another `data_dir`"
            )


def check_pair(images: Tensor, labels: Tensor, images_from: str, labels_from: str) -> None:
    """Check images, uint8 of shape (n, height, width), and their labels, of shape (n,), against each other.

    Raises:
        UserError: with the file and the reason.
    """
    if len(images) != len(labels):
        raise UserError(f"{images_from} holds {len(images):,} images and {labels_from} {len(labels):,} labels")
    if tuple(images.shape[1:]) != (28, 28):
        raise UserError(f"{images_from} holds images of {' x '.join(map(str, images.shape[1:]))}, expected 28 x 28")


def from_idx(name: str, data_dir: Path) -> Source:
    """A set by its name in `DATASETS`, in its four files; a part is read when it is first asked for.

    Raises:
        UserError: a file is missing, and, when a part is read: it is damaged, or of another set by its pixels.
    """
    info = DATASETS[name]
    files = find_files(name, data_dir)
    if files is None:
        raise UserError(describe_missing(name, data_dir))

    def read(part: str) -> Samples:
        images_file, labels_file = files[part]
        images = read_idx(images_file, 3)
        _refuse_another_sets_images(name, images, str(images_file))
        labels = read_idx(labels_file, 1)
        check_pair(images, labels, str(images_file), str(labels_file))
        return Samples(ArrayImages(images.numpy(), str(images_file)), labels.long())

    labels_from = {part: str(labels_file) for part, (_, labels_file) in files.items()}
    return Source(info.classes, PartsOnDemand(tuple(files), read), info.title, labels_from=labels_from)
