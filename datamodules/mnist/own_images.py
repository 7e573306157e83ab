"""Images of your own for the MNIST recipe: class folders, lists of files, a NumPy file or arrays.

Every image takes MNIST's form in one way, that of `predict`. Those of 28 x 28 that are light on dark, as most of a set
are or are not, stay as they are. All others go through `as_mnist`, which resizes, inverts and centres them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.file_table import FileTable
from datamodules.loading.given_images import as_bytes
from datamodules.loading.image_lists import class_order, find_images, holds_images
from datamodules.mnist.pixel_table import find_pixel_tables, read_pixel_table
from datamodules.mnist.user_images import as_mnist, border_of, grey_image

__all__ = ["OwnImages", "holds_own_images", "images_from_arrays", "read_own_images"]

_UNLABELLED = -100

_warn = rank_zero_only(logging.getLogger("lightning_recipes").warning)

_KEYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("X_train", "y_train")),
    "val": (("val_images", "val_labels"), ("x_val", "y_val"), ("X_val", "y_val")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test"), ("X_test", "y_test")),
}
"""The names of images and labels in a NumPy file: ours, MedMNIST's, Keras's and scikit-learn's."""


def in_mnist_form(images: Sequence[Tensor]) -> Tensor:
    """A set of images in MNIST's form, uint8 of shape (n, 28, 28).

    Where those of 28 x 28 are light on dark, they stay as they are; all others are prepared by `as_mnist`.

    Args:
        images: uint8 of shape (height, width), of any sizes.
    """
    same = [image for image in images if image.shape == (28, 28)]
    # Of the set and not of each image: a bag may touch the border where digits do not.
    ready = bool(same) and bool(border_of(torch.stack(same)).median() < 128)
    return torch.stack([image if ready and image.shape == (28, 28) else as_mnist(image) for image in images])


@dataclass(frozen=True)
class _Files:
    """Image files."""

    names: FileTable

    def read(self) -> Tensor:
        images: list[Tensor] = []
        faults: list[str] = []
        for row, name in enumerate(self.names):
            try:
                images.append(grey_image(self.names.read(row), name))
            except (UserError, OSError) as error:
                faults.append(str(error))
        if faults:
            more = f"; and {len(faults) - 5:,} more" * (len(faults) > 5)
            raise UserError(
                f"{len(faults):,} of {len(self.names):,} images cannot be used: {'; '.join(faults[:5])}{more}; correct"
                " or delete them"
            )
        return in_mnist_form(images)

    def describe(self, row: int) -> str:
        return self.names[row]


@dataclass(frozen=True)
class _Array:
    """Images in memory, uint8 of shape (n, height, width) or (n, height, width, channels)."""

    pixels: "np.ndarray[Any, np.dtype[np.uint8]]"
    source: str

    def read(self) -> Tensor:
        if self.pixels.shape[1:] == (28, 28):
            return in_mnist_form(list(torch.tensor(self.pixels)))
        return in_mnist_form([grey_image(Image.fromarray(pixels)) for pixels in np.ascontiguousarray(self.pixels)])

    def describe(self, row: int) -> str:
        return f"row {row} of {self.source}"


@dataclass(frozen=True)
class OwnImages:
    """Images and labels by part: "train", and perhaps "val" and "test".

    Args:
        title: what the set is called.
        classes: the names of the classes, in the order of the labels.
        images: by part; `read` gives the tensor.
        labels: by part, int64 of shape (n,), without samples that have none.
        left_out: files and rows that are not used, by reason.
    """

    title: str
    classes: tuple[str, ...]
    images: dict[str, _Files | _Array]
    labels: dict[str, Tensor]
    left_out: dict[str, int] = field(default_factory=dict)

    def names(self, part: str) -> Sequence[str]:
        """The files of a part; empty for images in memory."""
        images = self.images[part]
        return images.names if isinstance(images, _Files) else ()

    def read(self, part: str) -> tuple[Tensor, Tensor]:
        """Images, uint8 of shape (n, 28, 28), and labels, int64 of shape (n,).

        Raises:
            UserError: images cannot be read; the message names five of them.
        """
        images, labels = self.images[part].read(), self.labels[part]
        blank = (images.flatten(1).amax(1) == 0).nonzero().flatten().tolist()
        if blank:
            first = self.images[part].describe(blank[0])
            some = f"{len(blank):,} of {len(images):,} {part} images"
            _warn(f"note: {some} are blank, such as {first}")
        return images, labels


def _pixels(images: Any, source: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
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


def _labels(labels: Any, source: str, count: int) -> "np.ndarray[Any, Any]":
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


def _classes(train: "np.ndarray[Any, Any]", source: str) -> tuple[str, ...]:
    if (train == train[0]).all():
        raise UserError(f"{source} are all {train[0]}; expected two classes or more")
    if train.dtype.kind == "U":
        return class_order(train.tolist())
    return tuple(map(str, range(max(2, int(train.max()) + 1))))


def images_from_arrays(parts: dict[str, tuple[Any, Any]], title: str, source: str = "") -> OwnImages:
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
    images: dict[str, _Files | _Array] = {}
    found: dict[str, np.ndarray[Any, Any]] = {}
    left_out: dict[str, int] = {}
    for part, (given_images, given_labels) in parts.items():
        pixels = _pixels(given_images, f"the {part} images{of}")
        labels = _labels(given_labels, f"the {part} labels{of}", len(pixels))
        if labels.dtype.kind == "i" and (unlabelled := int((labels == _UNLABELLED).sum())):
            left_out["without a label"] = left_out.get("without a label", 0) + unlabelled
            pixels, labels = pixels[labels != _UNLABELLED], labels[labels != _UNLABELLED]
        if not len(labels):
            raise UserError(f"no {part} image{of} has a label")
        images[part], found[part] = _Array(pixels, f"the {part} images{of}"), labels
    classes = _classes(found["train"], f"the train labels{of}")
    numbers = {name: number for number, name in enumerate(classes)}
    targets: dict[str, Tensor] = {}
    for part, labels in found.items():
        if (labels.dtype.kind == "U") != (found["train"].dtype.kind == "U"):
            raise UserError(f"the {part} labels{of} are {labels.dtype}, and those of train {found['train'].dtype}")
        if labels.dtype.kind == "U":
            if unknown := sorted(set(labels.tolist()) - set(classes)):
                raise UserError(f"{part} has classes that train has no image of: {', '.join(unknown[:10])}")
            targets[part] = torch.tensor([numbers[name] for name in labels.tolist()])
        else:
            targets[part] = torch.from_numpy(labels.astype(np.int64))
    return OwnImages(title, classes, images, targets, left_out)


def _read_npz(path: Path) -> OwnImages:
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


def _archives(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.npz") if file.is_file()) if folder.is_dir() else []


def holds_own_images(place: str | Path) -> bool:
    """Whether this is a NumPy file, a list of images, or a folder that holds either, pixels in CSV or image files."""
    place = Path(place)
    return place.suffix.lower() == ".npz" or bool(_archives(place) or find_pixel_tables(place)) or holds_images(place)


def read_own_images(place: str | Path) -> OwnImages:
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
    if tables := find_pixel_tables(place):
        names = ", ".join(f"{part} of {path.name}" for part, path in tables.items())
        _warn(f"note: {place} has a pixel in each column: {names}")
        return images_from_arrays(
            {part: read_pixel_table(path) for part, path in tables.items()}, place.resolve().name, str(place)
        )
    found = find_images(place)
    for note in found.notes:
        _warn(f"note: {note}")
    return OwnImages(
        place.resolve().name,
        found.classes,
        {part: _Files(files) for part, (files, _) in found.parts.items()},
        {part: labels for part, (_, labels) in found.parts.items()},
        found.left_out,
    )
