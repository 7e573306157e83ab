"""Finds, downloads, reads and checks the idx files in which MNIST and Fashion-MNIST are published."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from datamodules.errors import UserError, spelled
from datamodules.images.known_sets import DATASETS, ImageSet
from datamodules.images.source import ArrayImages, PartsOnDemand, Samples, Source
from datamodules.loading.download import download

FILES = {
    part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    for part, stem in (("train", "train"), ("test", "t10k"))
}
"""Published names of the files of images and labels of each part, without .gz."""
_STEMS = [stem for pair in FILES.values() for stem in pair]


def _files_in(folder: Path) -> dict[str, Path]:
    """Return the files of a data set in a folder by their published name, compressed or not."""
    files: dict[str, Path] = {}
    for stem in _STEMS:
        # Kaggle writes a dot in place of the dash, and puts each file into a folder of its name.
        dotted = stem.replace("-idx", ".idx")
        for name in (f"{stem}.gz", stem, f"{dotted}.gz", dotted, f"{stem}/{stem}", f"{stem}/{dotted}"):
            if (folder / name).is_file():
                files[stem] = folder / name
                break
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
    # A bytearray, since torch warns of memory that it may not write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).reshape(shape)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Return the folders that may hold the files. The last one is torchvision's, into which files are downloaded."""
    return [data_dir, data_dir / (DATASETS[name].torchvision_name or "") / "raw"]


def find_files(name: str, data_dir: str | Path) -> dict[str, tuple[Path, Path]] | None:
    """Return the files of images and labels of "train" and "test", or None if one of the four is missing."""
    for folder in _candidate_folders(name, Path(data_dir)):
        files = _files_in(folder)
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


def holds_other_files(data_dir: Path) -> bool:
    """Return whether a folder holds entries other than downloads and hidden files."""
    if not data_dir.is_dir():
        return data_dir.is_file()
    names = {entry.name for entry in data_dir.iterdir() if entry.name[0] != "."}
    return bool(names - {info.torchvision_name for info in DATASETS.values()})


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


def _refuse_another_sets_images(name: str, images: Tensor, source: str) -> None:
    """Raise an error if the pixels are those of another data set with the same file names, by their mean and std."""
    # MNIST and Fashion-MNIST have equal file names. A digest would depend on how the files are compressed.
    pixels = images[:10_000].double() / 255
    mean = float(pixels.mean())
    std = float(pixels.std())

    def matches(info: ImageSet) -> bool:
        return abs(mean - info.mean[0]) < 0.01 and abs(std - info.std[0]) < 0.015

    for other, info in DATASETS.items():
        if info.torchvision_name and matches(info) and not matches(DATASETS[name]):
            raise UserError(
                f"{source} belongs to {info.title} by its pixels (mean {mean:.3f}, standard deviation {std:.3f}),"
                f" expected {DATASETS[name].title}; pass {spelled('dataset', other)} or another {spelled('data_dir')}"
            )


def check_pair(images: Tensor, labels: Tensor, images_from: str, labels_from: str) -> None:
    """Check that images, uint8 of shape (n, 28, 28), and labels, of shape (n,), belong together.

    Raises:
        UserError: the numbers of images and labels differ, or the images have another size.
    """
    if len(images) != len(labels):
        raise UserError(f"{images_from} holds {len(images):,} images and {labels_from} {len(labels):,} labels")
    if tuple(images.shape[1:]) != (28, 28):
        raise UserError(f"{images_from} holds images of {' x '.join(map(str, images.shape[1:]))}, expected 28 x 28")


def from_idx(name: str, data_dir: Path) -> Source:
    """Make a data set of the four files of a name in `DATASETS`. A part is read when it is first used.

    Raises:
        UserError: a file is missing. Reading a part raises it for damaged files and for files of another data set.
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
