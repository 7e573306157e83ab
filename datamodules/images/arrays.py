"""Images from Python: data sets of arrays, tensors and NumPy files, and inputs of `predict`."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images import proposals
from datamodules.images.decoding import is_image
from datamodules.images.labels import IGNORED, check_array
from datamodules.images.source import ArrayImages, Samples, Source, named_source
from datamodules.loading.file_table import files_below, list_folder
from datamodules.loading.table_files import parse_columns
from datamodules.notes import warn

_MAX_CLASSES = 100_000

USES = ("images", "labels", "val_images", "val_labels", "test_images", "test_labels")
"""Names of the arrays in a NumPy file. `columns` maps them to other names."""


# Share of the full range that the brightest pixel must reach. A darker set has another scale, such as 0 to 16.
_MIN_BRIGHTNESS = 0.25


def as_bytes(pixels: npt.NDArray[Any], source: str, if_dark: str = "") -> npt.NDArray[np.uint8]:
    """Convert pixels to uint8, in an array of any shape.

    Args:
        pixels: booleans, integers from 0 to 255, or floats from 0 to 1.
        source: name of the pixels for messages, such as "the train images".
        if_dark: advice for images that are meant to be dark, for messages.

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
    if not (low >= 0 and _MIN_BRIGHTNESS * top <= high <= top):
        if np.isnan(high):
            raise UserError(f"{source} hold NaN, the first in image {np.argwhere(np.isnan(pixels))[0][0]}: correct it")
        if low == high == 0:
            raise UserError(f"{source} are all black: every pixel is 0; pass images that show something")
        advice = ""
        if 0 <= low <= high < np.inf and high > 0:
            advice = f": pass images / {high:g}"
            if high < top:
                advice += if_dark
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
    """Convert an array, a dense tensor or a list of numbers to a NumPy array.

    Raises:
        UserError: the values are sparse, quantized or masked, or do not form an array.
    """
    form = ""
    if isinstance(values, Tensor) and values.is_quantized:
        form = "a quantized tensor; pass its bytes, as int_repr() gives them"
    elif isinstance(values, Tensor) and values.layout != torch.strided:
        form = "a sparse tensor; pass to_dense() of it"
    elif hasattr(values, "toarray"):
        form = "a sparse matrix; pass toarray() of it"
    elif np.ma.is_masked(values):
        form = "masked; fill them, as images.filled(0) and labels.filled(-100) do"
    if form:
        raise UserError(f"{source} are {form}")
    if isinstance(values, Tensor):
        # NumPy has no bfloat16.
        values = values.detach().cpu()
        array: npt.NDArray[Any] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return array
    try:
        return np.asarray(values)
    except ValueError as error:  # Images of different sizes.
        raise UserError(f"{source} are no array: {error}; pass images of one size") from error


def side_of_rows(shape: tuple[int, ...]) -> int:
    """Return the side of square images stored as rows of pixels, of shape (n, pixels); 0 for other shapes."""
    side: int = round(shape[-1] ** 0.5)
    return side if len(shape) == 2 and side >= 8 and side * side == shape[1] else 0


def channels_last(pixels: npt.NDArray[Any], source: str) -> npt.NDArray[Any]:
    """Return images of shape (n, height, width), or with 3 or 4 channels in the last dimension.

    Args:
        pixels: shape (n, height, width), or with 1, 3 or 4 channels in the second or the last dimension.
        source: name of the images, for messages.

    Raises:
        UserError: the images have another shape, or the channels may be in either dimension.
    """
    shape = pixels.shape
    axes = [axis for axis in (1, 3) if pixels.ndim == 4 and shape[axis] in (1, 3, 4)]
    if not (pixels.ndim == 3 or len(axes) == 1) or 0 in shape[1:]:
        side = side_of_rows(shape)
        advice = f"; pass images.reshape(-1, {side}, {side})" if side else ""
        if len(axes) == 2:
            advice = "; their channels may be first or last, so pass images of PIL.Image.fromarray"
        raise UserError(
            f"{source} are of shape {shape}, expected (n, height, width), (n, height, width, channels) or (n, channels,"
            f" height, width) with 1, 3 or 4 channels{advice}"
        )
    if axes == [1]:
        pixels = np.moveaxis(pixels, 1, 3)
    return pixels[..., 0] if pixels.ndim == 4 and pixels.shape[3] == 1 else pixels


def _pixels(images: Any, source: str) -> npt.NDArray[np.uint8]:
    """Convert images to uint8 of shape (n, height, width) or (n, height, width, channels)."""
    pixels = as_array(images, source)
    if pixels.dtype.kind not in "buif":
        raise UserError(f"{source} are {pixels.dtype}, expected numbers: uint8 from 0 to 255 or floats from 0 to 1")
    if not len(pixels):
        raise UserError(f"{source} are empty: their shape is {pixels.shape}")
    return as_bytes(channels_last(pixels, source), source)


def from_arrays(parts: Mapping[str, tuple[Any, Any]], title: str = "arrays", source: str = "") -> Source:
    """Make a data set from images and labels in memory.

    Args:
        parts: images and labels by part, at least "train". Images are uint8 (or other integers) from 0 to 255 or
            floats from 0 to 1, of shape (n, height, width), (n, height, width, channels) or (n, channels, height,
            width). Labels are integers or names, of shape (n,) or (n, 1). The label -100 or "" is a missing label.
        title: name of the data set.
        source: name of the file, for messages.

    Raises:
        UserError: types, shapes or values are not supported.
    """
    of = f" of {source}" if source else ""
    arrays: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]] = {}
    unlabeled = 0
    for part, (images, raw_labels) in parts.items():
        pixels = _pixels(images, f"the {part} images{of}")
        labels_from = f"the {part} labels{of}"
        labels = check_array(as_array(raw_labels, labels_from), labels_from, len(pixels))
        has_label = labels != ("" if labels.dtype.kind == "U" else IGNORED)
        unlabeled += int((~has_label).sum())
        if not has_label.any():
            raise UserError(f"no {part} image{of} has a label")
        arrays[part] = (pixels[has_label], labels[has_label]) if not has_label.all() else (pixels, labels)
    train = arrays["train"][1]
    if (train == train[0]).all():
        raise UserError(f"the train labels{of} are all {train[0]}; expected two classes or more")
    for part, (_, labels) in arrays.items():
        if (labels.dtype.kind == "U") != (train.dtype.kind == "U"):
            raise UserError(f"the {part} labels{of} are {labels.dtype}, and the train labels {train.dtype}")
    left_out = {"without a label": unlabeled} if unlabeled else {}
    images_of = {part: ArrayImages(pixels, f"the {part} images{of}") for part, (pixels, _) in arrays.items()}
    if train.dtype.kind == "U":
        named = {part: (images_of[part], labels.tolist()) for part, (_, labels) in arrays.items()}
        return named_source(named, title, source or title, "expected classes of train only", (), left_out)
    highest = int(train.max())
    if highest >= _MAX_CLASSES:
        raise UserError(
            f"the train labels{of} go to {highest:,}, expected class numbers from 0, below {_MAX_CLASSES:,}; pass"
            " names of the classes, as texts, which are numbered in their order"
        )
    # A label is a class number, so every number up to the highest one is a class, even without an image.
    classes = tuple(str(number) for number in range(max(2, highest + 1)))
    samples: dict[str, Samples] = {}
    notes: list[str] = []
    for part, (_, labels) in arrays.items():
        samples[part] = Samples(images_of[part], torch.from_numpy(labels.astype(np.int64)))
        missing = sorted(set(train.tolist()) - set(labels.tolist()))
        if missing:
            notes.append(f"{part} has no image of {', '.join(map(str, missing))}: scores say nothing about them")
    return Source(classes, samples, title, notes, left_out)


def from_samples(samples: Any) -> Source:
    """Make a data set from (images, labels), or from a dict of such pairs by part.

    Raises:
        UserError: the samples have another form; see also `from_arrays`.
    """
    pairs = samples if isinstance(samples, Mapping) else {"train": samples}
    pairs = {part: pair for part, pair in pairs.items() if pair is not None}
    are_pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs.values())
    if not are_pairs or "train" not in pairs or pairs.keys() - {"train", "val", "test"}:
        raise UserError("expected (images, labels), or a dict of such pairs with the keys train, val and test")
    if isinstance(samples, tuple) and all(isinstance(pair, tuple) for pair in samples):
        raise UserError("expected (images, labels), found two pairs; pass {'train': data[0], 'test': data[1]}")
    return from_arrays(pairs)


def read_npz(path: Path, columns: str | None = None) -> Source:
    """Read a data set from the arrays of a NumPy file, named as in `USES`. The parts val and test are optional.

    Args:
        path: path of the file.
        columns: other names of the arrays, see `parse_columns`.

    Raises:
        UserError: the file cannot be read, or lacks images or labels; see also `from_arrays`.
    """
    names = {**{use: use for use in USES}, **parse_columns(columns, USES)}
    arrays: dict[str, Any] = {}
    try:
        # np.load does not unpickle by default, so a file of objects raises an error.
        with np.load(path) as archive:
            keys = archive.files
            arrays = {use: archive[name] for use, name in names.items() if name in keys}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    # NumPy and zipfile raise many kinds of errors for damaged files, from tokenize.TokenError to zlib.error.
    except Exception as error:
        raise UserError(f"{path} is no NumPy file (.npz) of numbers and texts, or damaged: {error}") from error
    declared = [use for use in names if names[use] != use and use not in arrays]
    if declared or not {"images", "labels"} <= arrays.keys():
        raise UserError(proposals.other_arrays(str(path), keys, USES))
    parts: dict[str, tuple[Any, Any]] = {}
    for part, prefix in (("train", ""), ("val", "val_"), ("test", "test_")):
        images, labels = f"{prefix}images", f"{prefix}labels"
        if (images in arrays) != (labels in arrays):
            raise UserError(f"{path} holds only one of {names[images]} and {names[labels]}; expected both or neither")
        if images in arrays:
            parts[part] = arrays[images], arrays[labels]
    source = from_arrays(parts, path.name, str(path))
    unused = sorted(set(keys) - {names[use] for use in arrays})
    if unused:
        source.notes.append(f"{path}: not used: {', '.join(unused[:10])}")
    return source


def _images_below(folder: str | Path) -> tuple[list[str], list[str]]:
    """Return the sorted paths of the images in a folder and its subfolders, and of the other files, by suffix."""
    files = files_below(list_folder(Path(folder))[0])
    return [file for file in files if is_image(file)], [file for file in files if not is_image(file)]


@dataclass
class InputImages:
    """Images to predict, in the order of the input."""

    names: list[str]
    """File of each image, or its index, such as "images[3]"."""
    contents: list[str | Image.Image]
    """File of each image, or the image itself."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> str:
        return self.names[row]

    def read(self, row: int) -> str | Image.Image:
        """Return the path of an image file, or an image in memory."""
        return self.contents[row]


def collect_images(inputs: Any, color: bool) -> InputImages:
    """Collect the images to predict: from files, folders with their subfolders, PIL images, arrays and tensors.

    Args:
        inputs: one input or a list. Arrays hold integers from 0 to 255, or floats from 0 to 1, of shape
            (height, width), (height, width, channels) or (channels, height, width), or a batch of such images.
        color: whether an array of shape (3, height, width) is one color image; otherwise it is three gray images.

    Raises:
        UserError: there is no image, or an input is not an image.

    Example:
        >>> import torch
        >>> collect_images([torch.zeros(2, 28, 28), "photo.png"], color=False).names
        ['images[0]', 'images[1]', 'photo.png']
    """
    items = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    names: list[str] = []
    notes: list[str] = []
    contents: list[str | Image.Image] = []
    for item in items:
        if isinstance(item, (str, Path)):
            files = [str(item)]
            if os.path.isdir(item):  # noqa: PTH112 - Path.is_dir raises for long names.
                files, other_files = _images_below(item)
                if not files:
                    only = f", only {proposals.describe_left_out(other_files)}" if other_files else ""
                    notes.append(f"the folder {item} holds no images{only}")
                elif other_files:
                    count = f"{len(other_files):,} of {len(files) + len(other_files):,} files in the folder {item}"
                    notes.append(
                        f"{count} are left out, no images by their endings: {proposals.describe_left_out(other_files)}"
                    )
            names += files
            contents += files
            continue
        images = [item]
        if not isinstance(item, Image.Image):
            images = list(_images_of(item, color))
        names += [f"images[{i}]" for i in range(len(names), len(names) + len(images))]
        contents += images
    if not names:
        raise UserError(notes[0] if notes else "no image to predict; pass the names of image files or folders")
    for note in notes:
        warn(f"warning: {note}")
    return InputImages(names, contents)


def _images_of(array: Any, color: bool) -> Iterator[Image.Image]:
    """Return the images of an array or a tensor."""
    expected = "expected a file, a folder, a PIL image, an array or a tensor"
    if not isinstance(array, np.ndarray | Tensor):
        raise UserError(f"images of {type(array).__name__} cannot be predicted; {expected}")
    pixels = as_array(array, "the images")
    shape = pixels.shape
    if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3, 4) or 0 in shape[1:]:
        raise UserError(f"an array of {pixels.dtype} and shape {shape} holds no images; {expected}")
    # Checked for gray images only: the width of a photograph may be a square number by chance.
    side = side_of_rows(shape)
    if not color and side and shape[0] != shape[1]:
        raise UserError(
            f"an array of shape {shape} is {shape[0]:,} rows of {side} x {side} pixels, or images of another form; pass"
            f" images.reshape(-1, {side}, {side}), or a PIL image"
        )
    # Three dimensions with channels are one image.
    if pixels.ndim == 2 or (pixels.ndim == 3 and (shape[2] in (1, 3, 4) or (color and shape[0] in (1, 3, 4)))):
        pixels = pixels[None]
    pixels = channels_last(pixels, "the images")
    if pixels.any():
        pixels = as_bytes(pixels, "the images", ", or PIL.Image.fromarray(image) if it is meant to be dark")
    # The scale of black images is unknown, and not needed.
    return map(Image.fromarray, np.ascontiguousarray(pixels.astype(np.uint8, copy=False)))
