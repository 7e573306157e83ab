"""Strokes of a pen in a photograph, cut out and brought into MNIST's form.

Light differs over a photograph by more than paper and pencil do, so no threshold fits all of it. The paper is found as
the grey-scale closing of the image (Serra, 1982), which removes what is darker than all around it and thinner than a
window, as strokes are, and keeps the edges of shadows. What is darker than its paper, in proportion, is ink.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CLOSE", "SEARCHED", "Strokes", "connected_components", "find_strokes", "mnist_form"]

SEARCHED = 320
"""Pixels of the longer side of the images in which strokes are searched for."""
CLOSE = 100
"""A digit of fewer pixels there is looked at closely."""
_WIDEST = 0.22  # Of the shorter side: strokes are thinner, and shadows wider.
_FAINTEST = 0.12  # Of the light of the paper.
_ABOVE_NOISE = 4
_SMALLEST = 0.04  # Of the longer side of the image.
_ROUND = 0.45  # Thickness of a stroke, of its length.
_SOFTEST, _SOFTEST_AT_BORDER = 1.2, 0.4  # Pixels of the edge for each of the ink: shadows have wide edges.
_SPECK = 0.02  # Of the ink of the digit.
_OTHER_DIGIT = 0.3


@dataclass(frozen=True)
class Strokes:
    """What `find_strokes` found.

    Args:
        ink: float32 of shape (height, width), from 0 for paper to 1 for ink; without specks.
        box: top, bottom, left and right of the ink, the second and the fourth exclusive.
        others: how many other groups of strokes are about as large: further digits.
        at_border: whether strokes touch the border of the image, in `ink` or elsewhere.
    """

    ink: Tensor
    box: tuple[int, int, int, int]
    others: int
    at_border: bool


def _largest(image: Tensor, side: int) -> Tensor:
    """The maximum of the square of this side, which is odd, around each pixel."""
    image = F.pad(image, (side // 2,) * 4, value=-torch.inf)
    for axis in (0, 1):
        covered = 1
        while covered < side:
            step = min(covered, side - covered)
            length = image.shape[axis] - step
            image = torch.maximum(image.narrow(axis, 0, length), image.narrow(axis, step, length))
            covered += step
    return image


def _blurred(image: Tensor, sigma: float) -> Tensor:
    radius = max(1, round(2.5 * sigma))
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    image = F.pad(image[None, None], (radius,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(image, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))[0, 0]


def _ink(grey: Tensor, side: int) -> Tensor:
    """How much darker or lighter than its paper each pixel is, from 0 to 1."""
    lightest, darkest = _largest(grey, side), -_largest(-grey, side)
    # Most of the pixels around strokes are paper.
    if ((grey - (lightest + darkest) / 2) * (lightest - darkest)).sum() < 0:
        return (grey - _largest(darkest, side)) / 259
    paper = -_largest(-lightest, side)
    return (paper - grey) / (paper + 4)


def connected_components(mask: Tensor) -> tuple[Tensor, int]:
    """Number the regions of a mask whose pixels touch, also at corners.

    Args:
        mask: bool of shape (height, width).

    Returns:
        int64 of shape (height, width): 0 outside, and 1 to the number of regions, which is the second value.

    Example:
        >>> connected_components(torch.tensor([[True, False, True], [False, False, True]]))
        (tensor([[1, 0, 2],
                [0, 0, 2]]), 2)
    """
    height, width = mask.shape
    padded = np.zeros((height, width + 2), dtype=np.int8)
    padded[:, 1:-1] = mask.numpy()
    # Runs of each row, in the order of the rows: where they start, and where they have ended.
    rows, starts = np.nonzero(np.diff(padded, axis=1) == 1)
    ends = np.nonzero(np.diff(padded, axis=1) == -1)[1]
    # A run touches those of the next row from the first that ends at its start to the last that starts at its end.
    place = rows * (width + 2)
    first = np.searchsorted(place + ends, place + starts + width + 2, "left")
    last = np.searchsorted(place + starts, place + ends + width + 2, "right")
    counts = np.maximum(last - first, 0)
    above = np.repeat(np.arange(len(rows)), counts)
    below = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    label = np.arange(len(rows))
    while (label[above] != label[below]).any():
        low = np.minimum(label[above], label[below])
        np.minimum.at(label, label[above], low)
        np.minimum.at(label, label[below], low)
        label = label[label]
    numbers = np.unique(label, return_inverse=True)[1] + 1
    found = np.zeros((height, width), dtype=np.int64)
    found[mask.numpy()] = np.repeat(numbers, ends - starts)
    return torch.from_numpy(found), int(numbers.max(initial=0))


def find_strokes(grey: Tensor) -> Strokes | None:
    """The strokes of the largest digit in an image; None where there is nothing but paper.

    Args:
        grey: float32 of shape (height, width), from 0 to 255; the ink may be dark or light.
    """
    height, width = grey.shape
    ink = _ink(_blurred(grey, 0.8), 2 * max(1, round(_WIDEST * min(height, width) / 2)) + 1)
    noise = float(ink.quantile(0.2))
    strongest = float(ink.flatten().topk(min(ink.numel(), 24)).values[-1])
    if strongest < max(_FAINTEST, _ABOVE_NOISE * noise):
        return None
    numbers, count = connected_components(ink > max(0.4 * strongest, 2 * noise))
    weights = torch.zeros(count + 1).index_add_(0, numbers.flatten(), ink.flatten())
    weights[0] = 0
    boxes = _boxes(numbers, count)
    large = (boxes[:, 1::2] - boxes[:, ::2]).amax(1) >= _SMALLEST * max(height, width)
    pieces = {n: _as_box(boxes[n]) for n in (large & (weights >= _SPECK * weights.max())).nonzero().flatten().tolist()}
    pieces = {n: box for n, box in pieces.items() if _is_stroke(numbers, n, box)}
    # The edge of the paper touches the border of the image, and a digit seldom does.
    inside = {n: box for n, box in pieces.items() if box[0] and box[2] and box[1] < height and box[3] < width}
    at_border = len(inside) < len(pieces)
    if inside and weights[list(inside)].max() > 0.1 * weights.max():
        pieces = inside
    if not pieces:
        return None
    main = max(pieces, key=lambda number: float(weights[number]))
    kept, others = [main], 0
    for number in pieces.keys() - {main}:
        share = weights[number] / weights[main]
        place = _place(pieces[number], pieces[main])
        if place == "far" or (place == "beside" and share > _OTHER_DIGIT):
            others += bool(share > _OTHER_DIGIT)
        elif share > _SPECK:
            kept.append(number)
    chosen = torch.isin(numbers, torch.tensor(kept))
    core = ink[chosen].quantile(0.75)
    # The threshold is in the middle of the edge; around it are the shades between paper and ink.
    ink = ((ink - 0.25 * core) / (0.5 * core)).clamp(0, 1) * (_largest(chosen.float(), 5) > 0)
    black = ink > 0.5
    softest = _SOFTEST if main in inside else _SOFTEST_AT_BORDER
    if not black.any() or ((ink > 0.02) & (ink < 0.98)).sum() > softest * black.sum():
        return None
    return Strokes(ink, _box(black), others, at_border)


def _box(mask: Tensor) -> tuple[int, int, int, int]:
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _boxes(numbers: Tensor, count: int) -> Tensor:
    """The boxes of regions by number, int64 of shape (count + 1, 4): top, bottom, left, right."""
    found = []
    for axis, length in enumerate(numbers.shape):
        places = torch.arange(length).unsqueeze(1 - axis).expand(numbers.shape).flatten()
        for reduce, outermost in (("amin", length), ("amax", -1)):
            start = torch.full((count + 1,), outermost)
            found.append(start.scatter_reduce(0, numbers.flatten(), places, reduce) + (reduce == "amax"))
    return torch.stack(found, 1)


def _as_box(row: Tensor) -> tuple[int, int, int, int]:
    top, bottom, left, right = row.tolist()
    return top, bottom, left, right


def _is_stroke(numbers: Tensor, number: int, box: tuple[int, int, int, int]) -> bool:
    """Whether a region may be a stroke: nothing round, and not the strip between paper and border."""
    (height, width), (top, bottom, left, right) = numbers.shape, box
    mask = numbers[top:bottom, left:right] == number
    around = F.pad(mask.float(), (1, 1, 1, 1))
    outline = mask & (_largest(1 - around, 3)[1:-1, 1:-1] > 0)
    thickness = 2 * float(mask.sum()) / max(1, int(outline.sum()))
    borders = (
        (top == 0, mask[0], width),
        (bottom == height, mask[-1], width),
        (left == 0, mask[:, 0], height),
        (right == width, mask[:, -1], height),
    )
    along = max((float(edge.sum()) / length for touches, edge, length in borders if touches), default=0.0)
    strip = along > 0.8 and box != (0, height, 0, width)
    return thickness <= _ROUND * max(bottom - top, right - left) and not strip


def _place(box: tuple[int, int, int, int], main: tuple[int, int, int, int]) -> Literal["near", "beside", "far"]:
    """Where a piece of ink is: near the main one, beside it and as high, as another digit is, or far from it."""
    height, width = main[1] - main[0], main[3] - main[2]
    gap_y, gap_x = (max(main[i] - box[i + 1], box[i] - main[i + 1]) for i in (0, 2))
    if max(gap_y, gap_x) > 0.25 * max(height, width):
        return "far"
    return "beside" if gap_x > 0 and box[1] - box[0] > 0.6 * height else "near"


def mnist_form(strokes: Strokes) -> Tensor:
    """Strokes as MNIST has them: 20 pixels high or wide, with the centre of mass in the middle (LeCun et al., 1998).

    Returns:
        uint8 of shape (1, 28, 28).
    """
    top, bottom, left, right = strokes.box
    ink = strokes.ink[top:bottom, left:right]
    factor = 20 / max(ink.shape)
    size = [max(1, round(side * factor)) for side in ink.shape]
    small = F.interpolate(ink[None, None], size=size, mode="bilinear", align_corners=False, antialias=True)[0, 0]
    small = small / small.max()
    canvas = torch.zeros(28, 28)
    corner = []
    for axis in (0, 1):
        along = small.sum(1 - axis)
        centre = float((along * torch.arange(len(along))).sum() / small.sum())
        # The centres of mass of MNIST's images lie between 13.5 and 14.5, counted from 0.
        corner.append(min(max(0, round(14 - centre)), 28 - small.shape[axis]))
    canvas[corner[0] : corner[0] + small.shape[0], corner[1] : corner[1] + small.shape[1]] = small
    return canvas.mul(255).round().to(torch.uint8).unsqueeze(0)
