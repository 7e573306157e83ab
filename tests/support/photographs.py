"""Synthetic photographs of handwritten digits, made from images of MNIST's form.

``python -m tests.support.photographs FOLDER --data DIR`` writes 200 of them, JPEG files whose names begin with the
label, from MNIST's test images. Reflectance and illumination are modelled apart, so ink in a shadow is as much darker
than its paper as ink beside it.
"""

import argparse
import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

from datamodules.mnist.data_module import find_files
from datamodules.mnist.idx import read_idx

__all__ = ["mnist_photographs", "photograph"]

# Reflectance of paper and pens, in red, green and blue.
_PAPERS = [(0.97, 0.97, 0.95), (0.93, 0.90, 0.80), (0.80, 0.80, 0.80), (0.95, 0.88, 0.62), (0.72, 0.80, 0.88)]
_PENS = [
    *((0.08, 0.08, 0.10), (0.10, 0.15, 0.55), (0.60, 0.10, 0.12), (0.10, 0.40, 0.18)),
    (0.38, 0.38, 0.40),  # pencil
    (0.15, 0.30, 0.75),
]
_TABLES = [(0.30, 0.20, 0.13), (0.12, 0.12, 0.13), (0.45, 0.42, 0.40)]


def _stroke(digit: np.ndarray, side: int, level: float) -> np.ndarray:
    """The digit at another size with the sharp edges of a pen: ink from 0 to 1, of shape (side, side).

    Args:
        level: where the edge of a stroke is taken to be, from 0 to 1; strokes are the thinner the higher it is.
    """
    large = np.asarray(Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    return 1 / (1 + np.exp(-3.2 * side / 28 * (large - level)))


def _perspective(draw: np.random.Generator, centre: tuple[float, float], side: float) -> list[float]:
    """PIL's eight coefficients of a map from the photograph to the page: turned by up to 10 degrees, seen aslant."""
    angle = math.radians(draw.uniform(-10, 10))
    shear = draw.uniform(-0.06, 0.06)
    cos, sin = math.cos(angle), math.sin(angle)
    a, b, c, d = cos, -sin + shear, sin, cos
    g, h = draw.uniform(-0.12, 0.12, 2) / side
    (x, y) = centre
    # About the centre: (u, v) -> centre + [a b; c d] (u - x, v - y) / (1 + g (u - x) + h (v - y)).
    coefficients = [
        *(a + x * g, b + x * h, x - a * x - b * y - x * (g * x + h * y)),
        *(c + y * g, d + y * h, y - c * x - d * y - y * (g * x + h * y)),
        *(g, h),
    ]
    return [value / (1 - g * x - h * y) for value in coefficients]


def _blur(image: np.ndarray, sigma: float) -> np.ndarray:
    radius = max(1, math.ceil(3 * sigma))
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    for axis in (0, 1):
        padded = np.pad(image, [(radius, radius) if i == axis else (0, 0) for i in range(image.ndim)], "edge")
        length = image.shape[axis]
        shifted = (padded[i : i + length] if axis == 0 else padded[:, i : i + length] for i in range(len(kernel)))
        image = sum(weight * part for weight, part in zip(kernel, shifted))
    return image


def _illumination(draw: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Light from a side, a lamp's falling off, and in two of three photographs the shadow of a hand or a telephone."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    direction = draw.uniform(0, 2 * math.pi)
    slope = draw.uniform(0, 0.6)
    light = 1 + slope * (np.cos(direction) * (x - x.mean()) + np.sin(direction) * (y - y.mean()))
    light *= 1 - draw.uniform(0, 0.35) * ((x - draw.uniform(0, 1)) ** 2 + (y - draw.uniform(0, 1)) ** 2)
    if draw.random() < 2 / 3:
        turn = draw.uniform(0, 2 * math.pi)
        distance = np.cos(turn) * (x - x.mean()) + np.sin(turn) * (y - y.mean()) - draw.uniform(-0.2, 0.2)
        if draw.random() < 0.5:
            # A finger's or an arm's: it ends on the other side, too.
            distance = np.abs(distance) - draw.uniform(0.08, 0.25)
        softness = draw.uniform(0.004, 0.06)
        light *= 1 - draw.uniform(0.3, 0.65) / (1 + np.exp(np.clip(distance / softness, -50, 50)))
    return light * draw.uniform(0.7, 1.0)


def photograph(digit: np.ndarray, seed: int) -> bytes:
    """A photograph of a digit on paper, as a JPEG file.

    Args:
        digit: uint8 of shape (28, 28), light on dark.
        seed: of all that is drawn: size, place, angle, colours, light, noise and compression.
    """
    draw = np.random.default_rng([seed, 28])
    width, height = (int(side) for side in draw.integers(200, 900, 2))
    side = int(min(width, height) * draw.uniform(0.5, 1.1))
    centre = (*(length / 2 + draw.uniform(-0.5, 0.5) * max(0.0, length - side) for length in (width, height)),)
    page = Image.new("F", (width, height))
    corner = tuple(round(middle - side / 2) for middle in centre)
    page.paste(Image.fromarray(_stroke(digit, side, draw.uniform(0.35, 0.65)).astype(np.float32)), corner)
    for _ in range(draw.integers(0, 5)):
        # Specks of dust and of the pen.
        left, top = int(draw.integers(0, width)), int(draw.integers(0, height))
        page.paste(draw.uniform(0.4, 1), (left, top, left + int(draw.integers(1, 4)), top + int(draw.integers(1, 4))))
    page = page.transform(
        page.size, Image.Transform.PERSPECTIVE, _perspective(draw, centre, side), Image.Resampling.BICUBIC
    )
    ink = np.clip(np.asarray(page, dtype=np.float64), 0, 1)[..., None] * draw.uniform(0.75, 1)
    paper = np.array(_PAPERS[draw.integers(len(_PAPERS))]) * np.ones((height, width, 1))
    grain = _blur(draw.normal(0, 1, (height, width)), 1.5)
    paper = paper * (1 + 0.02 * grain / grain.std())[..., None]
    seen = paper * (1 - ink) + ink * np.array(_PENS[draw.integers(len(_PENS))])
    if draw.random() < 0.2:
        # The table shows beside the paper, where there is room beside the digit.
        table = np.array(_TABLES[draw.integers(len(_TABLES))])
        gap = int(corner[0] + 0.1 * side)
        if gap > 12:
            edge = draw.uniform(2, gap / 2) + np.tan(math.radians(draw.uniform(-3, 3))) * np.arange(height)
            seen = np.where((np.arange(width)[None, :] < edge[:, None])[..., None], table, seen)
    image = seen * _illumination(draw, height, width)[..., None]
    image = 255 * np.clip(image, 0, 1) ** (1 / draw.uniform(1.0, 1.6))
    image = _blur(image, draw.uniform(0.4, 0.004 * side + 0.6))
    image = image + draw.normal(0, draw.uniform(1, 7), image.shape)
    file = io.BytesIO()
    result = Image.fromarray(np.clip(image, 0, 255).round().astype(np.uint8))
    result.save(file, "JPEG", quality=int(draw.integers(40, 96)))
    return file.getvalue()


def mnist_photographs(
    data_dir: Path, count: int = 200, seed: int = 1, part: str = "test"
) -> list[tuple[int, int, bytes]]:
    """The label, MNIST's number and the JPEG file of `count` photographs of different digits of a part of MNIST."""
    files = find_files("mnist", data_dir)
    assert files is not None, f"{data_dir} holds no MNIST files"
    images, labels = (read_idx(file, dimensions).numpy() for file, dimensions in zip(files[part], (3, 1)))
    chosen = np.random.default_rng(seed).choice(len(labels), count, replace=False)
    return [
        (int(labels[row]), int(row), photograph(images[row], seed=1000 * seed + place))
        for place, row in enumerate(chosen)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=("train", "test"), default="test")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, row, data in mnist_photographs(options.data, options.count, options.seed, options.part):
        (options.folder / f"{number}_{row:05}.jpg").write_bytes(data)
