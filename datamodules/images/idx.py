"""Finds, downloads, reads and checks the idx files in which MNIST and Fashion-MNIST are published."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from datamodules.errors import UserError, spelled
from datamodules.images.known_sets import DATASETS
from datamodules.images.source import ArrayImages, PartsOnDemand, Samples, Source
from datamodules.loading.download import download
from datamodules.loading.tables import parse_columns

FILES = {
    part: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    for part, stem in (("train", "train"), ("test", "t10k"))
}
"""Published names of the files of images and labels of each part, without .gz."""
USES = ("images", "labels", "test_images", "test_labels")
"""What `columns` declares for files that are called otherwise, in the order of `FILES`."""
_STEMS = [stem for pair in FILES.values() for stem in pair]


def _files_in(folder: Path, columns: str | None = None) -> dict[str, Path]:
    """Return the files of a data set in a folder by their published name, compressed or not."""
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
    # A bytearray, since torch warns of memory that it may not write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).reshape(shape)


def _candidate_folders(name: str, data_dir: Path) -> list[Path]:
    """Return the folders that may hold the files. The last one is torchvision's, into which files are downloaded."""
    return [data_dir, data_dir / (DATASETS[name].torchvision_name or "") / "raw"]


def find_files(name: str, data_dir: str | Path, columns: str | None = None) -> dict[str, tuple[Path, Path]] | None:
    """Return the files of images and labels of "train" and "test", or None if one of the four is missing.

    Args:
        name: name of the data set in `DATASETS`.
        data_dir: folder of the files, flat or in torchvision's layout.
        columns: names of files that are called otherwise, see `USES`.
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
    """Return what to pass for four files of other names, such as train-images.idx3-ubyte; "" if there are none."""
    others = sorted(path.relative_to(data_dir).as_posix() for path in data_dir.glob("**/*ubyte*") if path.is_file())
    names: dict[str, str] = {}
    for use, stem in zip(USES, _STEMS):
        # Such as "train-images".
        start = stem.partition("-idx")[0]
        names.update((use, other) for other in others if start in Path(other).name)
    declared = ",".join(f"{use}={name}" for use, name in names.items())
    return f"{spelled('columns', declared)}, or " if len(names) == len(USES) else ""


def other_files(data_dir: Path) -> list[str]:
    """Return the names in a folder, other than downloads and hidden files; of a file, its name."""
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


def from_idx(name: str, data_dir: Path, columns: str | None = None) -> Source:
    """Make a data set of the four files of a name in `DATASETS`, see `find_files`. A part is read when it is used.

    Raises:
        UserError: a file is missing. Reading a part raises it for damaged files.
    """
    info = DATASETS[name]
    files = find_files(name, data_dir, columns)
    if files is None:
        raise UserError(describe_missing(name, data_dir))

    def read(part: str) -> Samples:
        images_file, labels_file = files[part]
        images = read_idx(images_file, 3)
        labels = read_idx(labels_file, 1)
        check_pair(images, labels, str(images_file), str(labels_file))
        return Samples(ArrayImages(images.numpy(), str(images_file)), labels.long())

    labels_from = {part: str(labels_file) for part, (_, labels_file) in files.items()}
    return Source(info.classes, PartsOnDemand(tuple(files), read), info.title, labels_from=labels_from)
