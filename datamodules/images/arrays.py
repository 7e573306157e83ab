"""Images in memory and their labels: arrays and NumPy files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.labels import IGNORED, class_order
from datamodules.images.source import ArrayImages, Samples, Source

_MOST_CLASSES = 100_000

_KEYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("X_train", "y_train")),
    "val": (
        *(("val_images", "val_labels"), ("x_val", "y_val"), ("X_val", "y_val")),
        *(("valid_images", "valid_labels"), ("x_valid", "y_valid"), ("X_valid", "y_valid")),
    ),
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
    top = 255
    if pixels.dtype.kind == "f":
        top = 1
    low = pixels.min()
    high = pixels.max()
    # NaN fails each comparison.
    if not (low >= 0 and least * top <= high <= top):
        if np.isnan(high):
            raise UserError(f"{source} hold NaN, the first in image {np.argwhere(np.isnan(pixels))[0][0]}: correct it")
        how = ""
        if 0 <= low <= high < np.inf and high > 0:
            how = f": pass images / {high:g}"
        raise UserError(
            f"{source} are {pixels.dtype} from {low:g} to {high:g}, expected whole numbers from 0 to 255 or floats from"
            f" 0 to 1{how}"
        )
    if top == 255:
        return pixels.astype(np.uint8)
    # By parts: in float64 a large set takes eight times its memory.
    parts = np.array_split(pixels, 1 + len(pixels) // 4096)
    return np.concatenate([(part * 255).round().astype(np.uint8) for part in parts])


def as_array(values: Any, source: str) -> npt.NDArray[Any]:
    """An array of what people pass as one: arrays, tensors (also sparse ones) and lists.

    Raises:
        UserError: it is quantised, or no array.
    """
    if isinstance(values, Tensor):
        if values.is_quantized:
            raise UserError(f"{source} are a quantised tensor; pass its bytes, as images.int_repr() gives them")
        tensor = values.detach().cpu()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.dtype == torch.bfloat16:
            # NumPy has none.
            tensor = tensor.float()
        return tensor.numpy()
    if hasattr(values, "toarray"):  # Those of SciPy.
        return np.asarray(values.toarray())
    try:
        return np.asarray(values)
    except ValueError as error:  # Images of different sizes.
        raise UserError(f"{source} are no array: {error}; pass images of one size") from error


def side_of_rows(shape: tuple[int, ...]) -> int:
    """The side of square images of which each is a row, of shape (n, pixels) or (n, 1, pixels); 0 where they are not.

    Example:
        >>> side_of_rows((12, 784)), side_of_rows((12, 1, 784)), side_of_rows((12, 28, 28)), side_of_rows((12, 640))
        (28, 28, 0, 0)
    """
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 1):
        return 0
    side: int = round(shape[-1] ** 0.5)
    return side if side * side == shape[-1] else 0


def _pixels(images: Any, source: str) -> npt.NDArray[np.uint8]:
    """Bytes of shape (n, height, width) or (n, height, width, channels)."""
    pixels = as_array(images, source)
    if np.ma.is_masked(images):
        raise UserError(f"{source} have masked pixels; fill them, as images.filled(0) does")
    shape = pixels.shape
    if pixels.dtype.kind not in "buif":
        raise UserError(f"{source} are {pixels.dtype}, expected numbers: uint8 from 0 to 255 or floats from 0 to 1")
    side = side_of_rows(shape)
    if side:
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


def _no_label(labels: npt.NDArray[Any]) -> Any:
    """What stands for no label among names, and among numbers."""
    if labels.dtype.kind == "U":
        return ""
    return IGNORED


def _labels(labels: Any, source: str, count: int) -> npt.NDArray[Any]:
    """Whole numbers or texts of shape (n,); -100, or "", where a label is masked."""
    values = as_array(labels, source)
    if np.ma.is_masked(labels):
        values = np.where(np.ma.getmaskarray(labels), _no_label(values), values)
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


def from_arrays(parts: Mapping[str, tuple[Any, Any]], title: str = "arrays", source: str = "") -> Source:
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
        without = labels == _no_label(labels)
        if without.any():
            unlabelled += int(without.sum())
            pixels = pixels[~without]
            labels = labels[~without]
        if not len(labels):
            raise UserError(f"no {part} image{of} has a label")
        found[part] = pixels, labels
    train = found["train"][1]
    if (train == train[0]).all():
        raise UserError(f"the train labels{of} are all {train[0]}; expected two classes or more")
    named = train.dtype.kind == "U"
    if not named and (highest := int(train.max())) >= _MOST_CLASSES:
        raise UserError(
            f"the train labels{of} go to {highest:,}, expected class numbers from 0, below {_MOST_CLASSES:,}; pass"
            " names of the classes, as texts, which are numbered in their order"
        )
    names = train.tolist()
    if not named:
        # Numbers are classes up to the highest one, also those without an image.
        names = [str(number) for number in range(max(2, int(train.max()) + 1))]
    classes = class_order(names)
    numbers = {name: number for number, name in enumerate(classes)}
    targets: dict[str, Tensor] = {}
    for part, (_, labels) in found.items():
        if (labels.dtype.kind == "U") != named:
            raise UserError(f"the {part} labels{of} are {labels.dtype}, and those of train {train.dtype}")
        if named and (unknown := sorted(set(labels.tolist()) - set(classes))):
            raise UserError(f"{part} has classes that train has no image of: {', '.join(unknown[:10])}")
        if named:
            targets[part] = torch.tensor([numbers[name] for name in labels.tolist()])
        else:
            targets[part] = torch.from_numpy(labels.astype(np.int64))
    samples: dict[str, Samples] = {}
    for part, (pixels, _) in found.items():
        samples[part] = Samples(ArrayImages(pixels, f"the {part} images{of}"), targets[part])
    left_out = {}
    if unlabelled:
        left_out["without a label"] = unlabelled
    return Source(classes, samples, title, left_out=left_out)


def _is_pair_of_pairs(samples: Any) -> bool:
    """Whether these are ((x_train, y_train), (x_test, y_test)), as Keras's functions give them."""
    if not isinstance(samples, tuple) or len(samples) != 2:
        return False
    pairs = [pair for pair in samples if isinstance(pair, tuple) and len(pair) == 2]
    return len(pairs) == 2 and all(hasattr(values, "shape") for pair in pairs for values in pair)


def from_samples(samples: Any) -> Source:
    """Images and labels as people pass them in Python: a pair of them, a dict of such pairs by part, or Keras's pairs.

    Raises:
        UserError: for something else, and see `from_arrays`.
    """
    if isinstance(samples, Mapping):
        parts = samples
    elif _is_pair_of_pairs(samples):
        parts = {"train": samples[0], "test": samples[1]}
    else:
        parts = {"train": samples}
    given = {part: pair for part, pair in parts.items() if pair is not None}
    pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in given.values())
    if not pairs or "train" not in given or given.keys() - {"train", "val", "test"}:
        raise UserError("expected (images, labels), or a dict of such pairs with the keys train, val and test")
    return from_arrays(given)


def read_npz(path: Path) -> Source:
    parts: dict[str, tuple[Any, Any]] = {}
    used: list[str] = []
    try:
        with np.load(path) as archive:
            held = set(archive.files)
            for part, pairs in _KEYS.items():
                if pair := next((pair for pair in pairs if held.issuperset(pair)), None):
                    parts[part] = archive[pair[0]], archive[pair[1]]
                    used += pair
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
    source = from_arrays(parts, path.name, str(path))
    unused = sorted(held.difference(used))
    if unused:
        source.notes.append(f"{path}: not used: {', '.join(unused[:10])}")
    return source
