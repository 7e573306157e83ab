"""Images to predict, as users give them: files, folders, PIL images, arrays and tensors."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.arrays import as_array, as_bytes, side_of_rows
from datamodules.images.folders import describe_left_out, images_below
from datamodules.notes import warn

_COLOURS = (1, 3, 4)


@dataclass
class GivenImages:
    """Images in the order in which they were given."""

    names: list[str]
    """Of each, its file or its place, such as "images[3]"."""
    contents: list[str | Image.Image]
    """Of each, its file or the image."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> str:
        return self.names[row]

    def read(self, row: int) -> str | Image.Image:
        """The name of a file, or an image."""
        return self.contents[row]


def given_images(inputs: Any, colour: bool) -> GivenImages:
    """Take images apart: a file, a folder with its subfolders, a PIL image, an array or a tensor, or several of these.

    Args:
        inputs: arrays hold bytes, whole numbers from 0 to 255, or floats from 0 to 1, and are of shape (height, width),
            (height, width, channels), (channels, height, width) or with a first dimension for several images.
        colour: what an array of shape (3, height, width) is: one image in colour, or three in grey.

    Raises:
        UserError: there is no image, or what was given is none.

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
            if os.path.isdir(item):  # noqa: PTH112 - Path's raises for long names.
                files, others = images_below(item)
                if not files:
                    only = f", only {describe_left_out(others)}" if others else ""
                    notes.append(f"the folder {item} holds no images{only}")
                elif others:
                    count = f"{len(others):,} of {len(files) + len(others):,} files in the folder {item}"
                    notes.append(f"{count} are left out, no images by their endings: {describe_left_out(others)}")
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
    """The images of an array or a tensor."""
    pixels = array
    if isinstance(array, Tensor) or hasattr(array, "toarray"):
        pixels = as_array(array, "the images")
    expected = "expected a file, a folder, a PIL image, an array or a tensor"
    if not isinstance(pixels, np.ndarray):
        raise UserError(f"images of {type(array).__name__} cannot be predicted; {expected}")
    shape = pixels.shape
    if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3, 4) or 0 in shape[1:]:
        raise UserError(f"an array of {pixels.dtype} and shape {shape} holds no images; {expected}")
    side = side_of_rows(shape)
    # Rows of pixels are those of small grey images; a photograph may be so wide by chance.
    if not colour and side >= 8 and (pixels.ndim == 3 or shape[0] != shape[1]):
        raise UserError(
            f"an array of shape {shape} is {shape[0]:,} rows of {side} x {side} pixels, or images of another form; pass"
            f" images.reshape(-1, {side}, {side}), or a PIL image"
        )
    pixels = as_bytes(pixels, "the images")
    if pixels.ndim == 2 or (pixels.ndim == 3 and (_channels_last(shape) or (colour and shape[0] in _COLOURS))):
        pixels = pixels[None]
    if pixels.ndim == 4:
        if not _channels_last(pixels.shape):
            if pixels.shape[1] not in _COLOURS:
                raise UserError(f"an array of shape {shape} holds no images of 1, 3 or 4 channels")
            pixels = pixels.transpose(0, 2, 3, 1)
        if pixels.shape[3] == 1:
            pixels = pixels[..., 0]
    return map(Image.fromarray, np.ascontiguousarray(pixels))


def _channels_last(shape: tuple[int, ...]) -> bool:
    return shape[-1] in _COLOURS and shape[-3] not in _COLOURS
