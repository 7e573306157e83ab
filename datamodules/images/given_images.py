"""Collects the images to predict from files, folders, PIL images, arrays and tensors."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.arrays import as_array, as_bytes, channels_last, side_of_rows
from datamodules.images.folders import describe_left_out, images_below
from datamodules.notes import warn


@dataclass
class GivenImages:
    """Sequence of the images to predict, in the order of the input."""

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


def given_images(inputs: Any, colour: bool) -> GivenImages:
    """Collect the images of a file, a folder with its subfolders, a PIL image, an array or a tensor, or of several.

    Args:
        inputs: one input or a list. Arrays hold integers from 0 to 255, or floats from 0 to 1, of shape
            (height, width), (height, width, channels) or (channels, height, width), or several such images with a
            first dimension more.
        colour: whether an array of shape (3, height, width) is one image in colour, or three in grey.

    Raises:
        UserError: there is no image, or an input is not an image.

    Example:
        >>> import torch
        >>> given_images([torch.zeros(2, 28, 28), "photo.png"], colour=False).names
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
                files, other_files = images_below(item)
                if not files:
                    only = f", only {describe_left_out(other_files)}" if other_files else ""
                    notes.append(f"the folder {item} holds no images{only}")
                elif other_files:
                    count = f"{len(other_files):,} of {len(files) + len(other_files):,} files in the folder {item}"
                    notes.append(f"{count} are left out, no images by their endings: {describe_left_out(other_files)}")
            names += files
            contents += files
            continue
        images = [item]
        if not isinstance(item, Image.Image):
            images = list(_images_of(item, colour))
        names += [f"images[{i}]" for i in range(len(names), len(names) + len(images))]
        contents += images
    if not names:
        raise UserError(notes[0] if notes else "no image to predict; pass the names of image files or folders")
    for note in notes:
        warn(f"warning: {note}")
    return GivenImages(names, contents)


def _images_of(array: Any, colour: bool) -> Iterator[Image.Image]:
    """Return the images of an array or a tensor."""
    expected = "expected a file, a folder, a PIL image, an array or a tensor"
    if not isinstance(array, np.ndarray | Tensor):
        raise UserError(f"images of {type(array).__name__} cannot be predicted; {expected}")
    pixels = as_array(array, "the images")
    shape = pixels.shape
    if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3, 4) or 0 in shape[1:]:
        raise UserError(f"an array of {pixels.dtype} and shape {shape} holds no images; {expected}")
    # The width of a photograph may be a square number by chance, that of a small gray image is not by rows of pixels.
    side = side_of_rows(shape)
    if not colour and side and shape[0] != shape[1]:
        raise UserError(
            f"an array of shape {shape} is {shape[0]:,} rows of {side} x {side} pixels, or images of another form; pass"
            f" images.reshape(-1, {side}, {side}), or a PIL image"
        )
    # Three dimensions with channels are one image.
    if pixels.ndim == 2 or (pixels.ndim == 3 and (shape[2] in (1, 3, 4) or (colour and shape[0] in (1, 3, 4)))):
        pixels = pixels[None]
    pixels = as_bytes(channels_last(pixels, "the images"), "the images")
    return map(Image.fromarray, np.ascontiguousarray(pixels))
