"""Images in memory and their labels: arrays, NumPy files, and CSV with a pixel in each column (Kaggle's form)."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.folders import PARTS, ImageTree, part_of
from datamodules.images.known_sets import EMNIST
from datamodules.images.labels import IGNORED
from datamodules.images.lists import class_order, find_images, holds_images

__all__ = ["as_bytes", "holds_own_images", "images_from_arrays", "read_own_images"]

_KEYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("X_train", "y_train")),
    "val": (("val_images", "val_labels"), ("x_val", "y_val"), ("X_val", "y_val")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test"), ("X_test", "y_test")),
}
"""The names of images and labels in a NumPy file: ours, MedMNIST's, Keras's and scikit-learn's."""


def as_bytes(pixels: npt.NDArray[Any], source: str, least: float = 0.0) -> npt.NDArray[np.uint8]:
    """Pixels as whole numbers from 0 to 255, of an array of any shape.

    Args:
        pixels: True and False, whole numbers from 0 to 255, or floats from 0 to 1.
        source: what they are, for the message, such as "the train images".
        least: share of the full range that the brightest pixel has at least; a set without one has another scale.

    Raises:
        UserError: their range is another one.
    """
    if pixels.dtype.kind == "b":
        return pixels.astype(np.uint8) * np.uint8(255)
    if not pixels.size:
        return pixels.astype(np.uint8)
    top, (low, high) = 1 if pixels.dtype.kind == "f" else 255, (pixels.min(), pixels.max())
    # NaN fails each comparison.
    if not (low >= 0 and least * top <= high <= top):
        how = f": pass images / {high:g}" if 0 <= low <= high < np.inf and high > 0 else ""
        raise UserError(
            f"{source} are {pixels.dtype} from {low:g} to {high:g}, expected whole numbers from 0 to 255 or floats from"
            f" 0 to 1{how}"
        )
    if top == 255:
        return pixels.astype(np.uint8)
    # By parts: in float64 a large set takes eight times its memory.
    return np.concatenate(
        [(pixels[start : start + 4096] * 255).round().astype(np.uint8) for start in range(0, len(pixels), 4096)]
    )


def _pixels(images: Any, source: str) -> npt.NDArray[np.uint8]:
    """Bytes of shape (n, height, width) or (n, height, width, channels)."""
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    try:
        pixels = np.asarray(images)
    except ValueError as error:  # Images of different sizes.
        raise UserError(f"{source} are no array: {error}; pass images of one size") from error
    shape = pixels.shape
    if pixels.dtype.kind not in "buif":
        raise UserError(f"{source} are {pixels.dtype}, expected numbers: uint8 from 0 to 255 or floats from 0 to 1")
    if pixels.ndim == 2 and (side := round(shape[1] ** 0.5)) ** 2 == shape[1]:
        pixels = pixels.reshape(len(pixels), side, side)
    elif pixels.ndim == 4 and shape[3] not in (1, 3, 4) and shape[1] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 1, 3)
    if pixels.ndim == 4 and pixels.shape[3] == 1:
        pixels = pixels[..., 0]
    if not (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] in (3, 4))) or 0 in pixels.shape[1:]:
        raise UserError(
            f"{source} are of shape {shape}, expected (n, height, width), (n, height, width, channels) or (n, pixels)"
            " with 1, 3 or 4 channels"
        )
    if not len(pixels):
        raise UserError(f"{source} are empty: their shape is {shape}")
    return as_bytes(pixels, source, least=0.25)


def _labels(labels: Any, source: str, count: int) -> npt.NDArray[Any]:
    """Whole numbers or texts of shape (n,)."""
    values = np.asarray(labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (count,):
        raise UserError(f"{source} are of shape {values.shape}, expected one for each of {count:,} images, ({count},)")
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str)
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.round(values)).all():
        values = values.astype(np.int64)
    if values.dtype.kind not in "iuU":
        raise UserError(f"{source} are {values.dtype}, expected class numbers from 0, or names")
    return values


def images_from_arrays(parts: dict[str, tuple[Any, Any]], title: str, source: str = "") -> ImageTree:
    """Images and labels in memory.

    Args:
        parts: images and labels by part, at least "train". Images are uint8 (or other whole numbers) from 0 to 255 or
            floats from 0 to 1, of shape (n, height, width), (n, height, width, channels), (n, channels, height, width)
            or (n, pixels); labels are whole numbers or names, of shape (n,) or (n, 1). The label -100 is none.
        source: the file, for messages.

    Raises:
        UserError: for other types, shapes and values, with what to pass.
    """
    of = f" of {source}" if source else ""
    found: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]] = {}
    unlabelled = 0
    for part, (images, given_labels) in parts.items():
        pixels = _pixels(images, f"the {part} images{of}")
        labels = _labels(given_labels, f"the {part} labels{of}", len(pixels))
        if labels.dtype.kind == "i" and (ignored := int((labels == IGNORED).sum())):
            unlabelled += ignored
            pixels, labels = pixels[labels != IGNORED], labels[labels != IGNORED]
        if not len(labels):
            raise UserError(f"no {part} image{of} has a label")
        found[part] = pixels, labels
    train = found["train"][1]
    if (train == train[0]).all():
        raise UserError(f"the train labels{of} are all {train[0]}; expected two classes or more")
    named = train.dtype.kind == "U"
    classes = class_order(train.tolist() if named else map(str, range(max(2, int(train.max()) + 1))))
    numbers = {name: number for number, name in enumerate(classes)}
    targets: dict[str, Tensor] = {}
    for part, (_, labels) in found.items():
        if (labels.dtype.kind == "U") != named:
            raise UserError(f"the {part} labels{of} are {labels.dtype}, and those of train {train.dtype}")
        if named and (unknown := sorted(set(labels.tolist()) - set(classes))):
            raise UserError(f"{part} has classes that train has no image of: {', '.join(unknown[:10])}")
        targets[part] = torch.tensor([numbers[name] for name in labels.tolist()] if named else labels.astype(np.int64))
    tree = {part: (pixels, targets[part]) for part, (pixels, _) in found.items()}
    left_out = {"without a label": unlabelled} if unlabelled else {}
    return ImageTree(classes, tree, left_out=left_out, title=title, source=of)


def _read_npz(path: Path) -> ImageTree:
    parts: dict[str, tuple[Any, Any]] = {}
    try:
        with np.load(path) as archive:
            held = set(archive.files)
            for part, pairs in _KEYS.items():
                if pair := next((pair for pair in pairs if held.issuperset(pair)), None):
                    parts[part] = archive[pair[0]], archive[pair[1]]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    # NumPy and zipfile raise errors of many kinds for damaged files, from tokenize.TokenError to zlib.error.
    except Exception as error:
        raise UserError(f"{path} is no NumPy file (.npz) of numbers and texts, or damaged: {error}") from error
    if "train" not in parts:
        named = ", ".join(sorted(held)[:10]) or "nothing"
        raise UserError(
            f"{path} holds {named}; expected the arrays images and labels, and perhaps test_images and test_labels:"
            ' np.savez("digits.npz", images=..., labels=...)'
        )
    return images_from_arrays(parts, path.name, str(path))


def _first_row(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            # A row of 784 pixels has a tenth of it.
            return [cell.strip().strip('"') for cell in file.readline(1 << 16).split(",")]
    except (OSError, UnicodeDecodeError):
        return []


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit()


def _label_column(row: list[str]) -> int | None:
    """Where the label stands in a table with this first row; None where there is none, or no column for each pixel."""
    side = math.isqrt(max(0, len(row) - 1))
    if side < 8 or side * side != len(row) - 1:
        return None
    if all(map(_is_number, row)):
        return 0
    return next((column for column, name in enumerate(row) if name.lower() in ("label", "class", "target")), None)


def _find_pixel_tables(place: Path) -> dict[str, Path]:
    """The tables of "train", "val" and "test" in a folder by their names; or a file, and those beside a file of train.

    Raises:
        UserError: a folder holds several of a part.
    """
    if place.suffix.lower() != ".csv" and not place.is_dir():
        return {}
    files = sorted(place.glob("*.csv")) if place.is_dir() else [place]
    if place.is_file() and "train" in place.stem.lower():
        files += [place.with_name(re.sub("train", part, place.name, flags=re.IGNORECASE)) for part in ("val", "test")]
    found: dict[str, Path] = {}
    for file in files:
        if _label_column(_first_row(file)) is None:
            continue
        part = (part_of(file.stem) if len(files) > 1 else "") or "train"
        if part in found:
            raise UserError(f"{place} holds both {found[part].name} and {file.name}; pass one of them")
        found[part] = file
    return {part: found[part] for part in PARTS if part in found} if "train" in found else {}


def _read_pixel_table(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The images of a table, of shape (n, side, side), and their labels, whole numbers or names of shape (n,).

    Of files called emnist-..., the images are turned as they were written down, and the labels are letters.

    Raises:
        UserError: a cell is no number, or a row has another length.
    """
    row = _first_row(path)
    column = _label_column(row)
    assert column is not None, path
    header = 0 if all(map(_is_number, row)) else 1
    try:
        how: dict[str, Any] = {"comments": None, "delimiter": ",", "quotechar": '"', "encoding": "utf-8-sig"}
        values = np.loadtxt(path, np.float32, skiprows=header, ndmin=2, **how)
    except ValueError as error:
        raise UserError(f"{path}: {error}; expected a label and {len(row) - 1} pixels in each row") from error
    labels, pixels = values[:, column], np.delete(values, column, 1)
    side = math.isqrt(pixels.shape[1])
    images = pixels.reshape(-1, side, side)
    # Whole numbers are from 0 to 255, others from 0 to 1.
    images = images if (images % 1).any() else images.astype(np.int32)
    known = next((name for name in EMNIST if path.stem.lower().startswith(f"{name}-")), None)
    if known is None:
        return images, labels
    numbers = labels.astype(np.int64) - (known == "emnist-letters")
    if not 0 <= numbers.min() <= numbers.max() < len(EMNIST[known]):
        raise UserError(f"{path} holds the labels {labels.min():g} to {labels.max():g}, expected those of {known}")
    return images.transpose(0, 2, 1), np.array(list(EMNIST[known]))[numbers]


def _archives(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.npz") if file.is_file()) if folder.is_dir() else []


def holds_own_images(place: str | Path) -> bool:
    """Whether this is a NumPy file, a list of images, or a folder that holds either, pixels in CSV or image files."""
    place = Path(place)
    return place.suffix.lower() == ".npz" or bool(_archives(place) or _find_pixel_tables(place)) or holds_images(place)


def read_own_images(place: str | Path) -> ImageTree:
    """The images in class folders, of lists of files, of a NumPy file, or of CSV with a pixel in each column.

    Raises:
        UserError: there are none, or what is there cannot be used; the message says what was found.
    """
    place = Path(place)
    archives = [place] if place.suffix.lower() == ".npz" else _archives(place)
    if len(archives) > 1:
        raise UserError(f"{place} holds {len(archives)} NumPy files; pass one of them, such as {archives[0]}")
    if archives:
        if not archives[0].is_file():
            raise UserError(f"there is no file {archives[0]}")
        return _read_npz(archives[0])
    if not (tables := _find_pixel_tables(place)):
        return find_images(place)
    pixels = {part: _read_pixel_table(path) for part, path in tables.items()}
    tree = images_from_arrays(pixels, "", str(place))
    names = ", ".join(f"{part} of {path.name}" for part, path in tables.items())
    tree.notes.append(f"{place} has a pixel in each column: {names}")
    return tree
