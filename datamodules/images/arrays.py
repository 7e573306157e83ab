"""Makes a data set of images and labels in memory: arrays, tensors and NumPy files."""

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
"""Names of the arrays of images and labels in NumPy files: ours, MedMNIST's, Keras's and scikit-learn's."""


def as_bytes(pixels: npt.NDArray[Any], source: str, least: float = 0.0) -> npt.NDArray[np.uint8]:
    """Convert pixels to uint8, in an array of any shape.

    Args:
        pixels: booleans, integers from 0 to 255, or floats from 0 to 1.
        source: name of the pixels for messages, such as "the train images".
        least: share of the full range that the brightest pixel must reach. A darker set has another scale, such as
            integers from 0 to 16.

    Raises:
        UserError: the pixels have another range.
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
        advice = ""
        if 0 <= low <= high < np.inf and high > 0:
            advice = f": pass images / {high:g}"
        raise UserError(
            f"{source} are {pixels.dtype} from {low:g} to {high:g}, expected whole numbers from 0 to 255 or floats from"
            f" 0 to 1{advice}"
        )
    if top == 255:
        return pixels.astype(np.uint8)
    # In chunks, since a float64 copy of a large set would take eight times the memory of its bytes.
    chunks = np.array_split(pixels, 1 + len(pixels) // 4096)
    return np.concatenate([(chunk * 255).round().astype(np.uint8) for chunk in chunks])


def as_array(values: Any, source: str) -> npt.NDArray[Any]:
    """Convert an array, a dense or sparse tensor, a SciPy matrix or a list to a NumPy array.

    Raises:
        UserError: the tensor is quantised, or the values do not form an array.
    """
    if isinstance(values, Tensor):
        if values.is_quantized:
            raise UserError(f"{source} are a quantised tensor; pass its bytes, as images.int_repr() gives them")
        tensor = values.detach().cpu()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.dtype == torch.bfloat16:
            # NumPy has no bfloat16.
            tensor = tensor.float()
        return tensor.numpy()
    if hasattr(values, "toarray"):  # Sparse matrices of SciPy.
        return np.asarray(values.toarray())
    try:
        return np.asarray(values)
    except ValueError as error:  # Images of different sizes.
        raise UserError(f"{source} are no array: {error}; pass images of one size") from error


def side_of_rows(shape: tuple[int, ...]) -> int:
    """Return the side of square images that are stored as rows, of shape (n, pixels) or (n, 1, pixels); 0 for others.

    Example:
        >>> side_of_rows((12, 784)), side_of_rows((12, 1, 784)), side_of_rows((12, 28, 28)), side_of_rows((12, 640))
        (28, 28, 0, 0)
    """
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 1):
        return 0
    side: int = round(shape[-1] ** 0.5)
    return side if side * side == shape[-1] else 0


def _pixels(images: Any, source: str) -> npt.NDArray[np.uint8]:
    """Convert images to uint8 of shape (n, height, width) or (n, height, width, channels)."""
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


def _missing_label(labels: npt.NDArray[Any]) -> Any:
    """Return the value that stands for a missing label: "" among names, -100 among numbers."""
    if labels.dtype.kind == "U":
        return ""
    return IGNORED


def _labels(labels: Any, source: str, count: int) -> npt.NDArray[Any]:
    """Convert labels to integers or strings of shape (n,). Masked labels become -100 or ""."""
    values = as_array(labels, source)
    if np.ma.is_masked(labels):
        values = np.where(np.ma.getmaskarray(labels), _missing_label(values), values)
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
    """Make a data set of images and labels in memory.

    Args:
        parts: images and labels by part, at least "train". Images are uint8 (or other integers) from 0 to 255 or
            floats from 0 to 1, of shape (n, height, width), (n, height, width, channels), (n, channels, height, width)
            or (n, pixels). Labels are integers or names, of shape (n,) or (n, 1). The label -100 is a missing label.
        title: name of the data set.
        source: name of the file, for messages.

    Raises:
        UserError: types, shapes or values are not supported; the message says what to pass.
    """
    of = f" of {source}" if source else ""
    arrays: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]] = {}
    unlabelled = 0
    for part, (images, raw_labels) in parts.items():
        pixels = _pixels(images, f"the {part} images{of}")
        labels = _labels(raw_labels, f"the {part} labels{of}", len(pixels))
        is_missing = labels == _missing_label(labels)
        if is_missing.any():
            unlabelled += int(is_missing.sum())
            pixels = pixels[~is_missing]
            labels = labels[~is_missing]
        if not len(labels):
            raise UserError(f"no {part} image{of} has a label")
        arrays[part] = (pixels, labels)
    train = arrays["train"][1]
    if (train == train[0]).all():
        raise UserError(f"the train labels{of} are all {train[0]}; expected two classes or more")
    has_names = train.dtype.kind == "U"
    if has_names:
        names = train.tolist()
    else:
        highest = int(train.max())
        if highest >= _MOST_CLASSES:
            raise UserError(
                f"the train labels{of} go to {highest:,}, expected class numbers from 0, below {_MOST_CLASSES:,}; pass"
                " names of the classes, as texts, which are numbered in their order"
            )
        # All numbers up to the highest one are classes, even without an image: a label is its own class number.
        names = [str(number) for number in range(max(2, highest + 1))]
    classes = class_order(names)
    numbers = {name: number for number, name in enumerate(classes)}
    targets: dict[str, Tensor] = {}
    for part, (_, labels) in arrays.items():
        if (labels.dtype.kind == "U") != has_names:
            raise UserError(f"the {part} labels{of} are {labels.dtype}, and those of train {train.dtype}")
        if not has_names:
            targets[part] = torch.from_numpy(labels.astype(np.int64))
            continue
        unknown = sorted(set(labels.tolist()) - set(classes))
        if unknown:
            raise UserError(f"{part} has classes that train has no image of: {', '.join(unknown[:10])}")
        targets[part] = torch.tensor([numbers[name] for name in labels.tolist()])
    samples: dict[str, Samples] = {}
    for part, (pixels, _) in arrays.items():
        samples[part] = Samples(ArrayImages(pixels, f"the {part} images{of}"), targets[part])
    left_out = {}
    if unlabelled:
        left_out["without a label"] = unlabelled
    return Source(classes, samples, title, left_out=left_out)


def _is_pair_of_pairs(samples: Any) -> bool:
    """Return whether samples are ((x_train, y_train), (x_test, y_test)), as Keras's `load_data` returns them."""
    if not isinstance(samples, tuple) or len(samples) != 2:
        return False
    pairs = [pair for pair in samples if isinstance(pair, tuple) and len(pair) == 2]
    return len(pairs) == 2 and all(hasattr(values, "shape") for pair in pairs for values in pair)


def from_samples(samples: Any) -> Source:
    """Make a data set of (images, labels), of a dict of such pairs by part, or of Keras's pairs.

    Raises:
        UserError: the samples have another form, or see `from_arrays`.
    """
    if isinstance(samples, Mapping):
        parts = samples
    elif _is_pair_of_pairs(samples):
        parts = {"train": samples[0], "test": samples[1]}
    else:
        parts = {"train": samples}
    pairs = {part: pair for part, pair in parts.items() if pair is not None}
    are_pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs.values())
    if not are_pairs or "train" not in pairs or pairs.keys() - {"train", "val", "test"}:
        raise UserError("expected (images, labels), or a dict of such pairs with the keys train, val and test")
    return from_arrays(pairs)


def read_npz(path: Path) -> Source:
    """Read a data set of images and labels from a NumPy file.

    Raises:
        UserError: the file cannot be read or holds no images and labels, or see `from_arrays`.
    """
    parts: dict[str, tuple[Any, Any]] = {}
    used: list[str] = []
    try:
        # np.load unpickles nothing by default: a file of objects raises an error.
        with np.load(path) as archive:
            keys = set(archive.files)
            for part, key_pairs in _KEYS.items():
                for images_key, labels_key in key_pairs:
                    if images_key in keys and labels_key in keys:
                        parts[part] = (archive[images_key], archive[labels_key])
                        used += [images_key, labels_key]
                        break
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    # NumPy and zipfile raise errors of many kinds for damaged files, from tokenize.TokenError to zlib.error.
    except Exception as error:
        raise UserError(f"{path} is no NumPy file (.npz) of numbers and texts, or damaged: {error}") from error
    if "train" not in parts:
        listed = ", ".join(sorted(keys)[:10]) or "nothing"
        raise UserError(
            f"{path} holds {listed}; expected the arrays images and labels, and perhaps test_images and test_labels:"
            ' np.savez("digits.npz", images=..., labels=...)'
        )
    source = from_arrays(parts, path.name, str(path))
    unused = sorted(keys.difference(used))
    if unused:
        source.notes.append(f"{path}: not used: {', '.join(unused[:10])}")
    return source
