"""Images as CSV with a pixel in each column: Kaggle's ``label,pixel0,...,pixel783``, or the same without a header."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.errors import UserError
from datamodules.loading.image_tree import part_of
from datamodules.mnist.idx import EMNIST

__all__ = ["find_pixel_tables", "read_pixel_table"]

_LABELS = ("label", "class", "target")


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
    return next((column for column, name in enumerate(row) if name.lower() in _LABELS), None)


def find_pixel_tables(place: Path) -> dict[str, Path]:
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
    return {part: found[part] for part in ("train", "val", "test") if part in found} if "train" in found else {}


def read_pixel_table(path: Path) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
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
        values = np.loadtxt(
            path,
            np.float32,
            comments=None,
            delimiter=",",
            skiprows=header,
            ndmin=2,
            encoding="utf-8-sig",
            quotechar='"',
        )
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
