"""Figures of simple shapes: as SVG for a page in light and dark, and with Pillow as images.

A figure is laid out once, in pixels. Its colors are names: a page defines them for light and for dark; `PALETTE` has
the light colors, also for images.

Tested in `tests/recipes/figures/test_plots.py`.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageFont

Color = Literal["paper", "ink", "faint", "grid", "train", "val"]
"""Background, text, secondary text, lines behind the data, and the data of training and of validation."""

PALETTE: dict[Color, tuple[int, int, int]] = {
    "paper": (255, 255, 255),
    "ink": (23, 27, 33),
    "faint": (92, 102, 115),
    "grid": (221, 225, 230),
    "train": (31, 95, 191),
    "val": (201, 84, 0),
}

DARK: dict[Color, tuple[int, int, int]] = {
    "paper": (20, 23, 28),
    "ink": (230, 233, 238),
    "faint": (154, 164, 178),
    "grid": (52, 59, 70),
    "train": (116, 171, 255),
    "val": (255, 154, 77),
}
"""The dark colors of a page."""


def color_style() -> str:
    """Return the style sheet with the colors of the figures, light or dark as the reader prefers."""
    light = _variables(PALETTE)
    dark = _variables(DARK)
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def _variables(palette: dict[Color, tuple[int, int, int]]) -> str:
    return " ".join(f"--{name}: #{bytes(rgb).hex()};" for name, rgb in palette.items())


# Pixels of an image per pixel of a figure. Twice this number takes twice as long to compress.
_SCALE = 1.5
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf")


@dataclass(frozen=True)
class Line:
    """A line through points.

    Args:
        points: (x, y) in pixels, from the upper left corner.
        width: width in pixels.
    """

    points: Sequence[tuple[float, float]]
    color: Color
    width: float = 1.0


@dataclass(frozen=True)
class Dot:
    """A filled circle around (x, y)."""

    x: float
    y: float
    color: Color
    radius: float = 2.5


@dataclass(frozen=True)
class Box:
    """A filled rectangle whose upper left corner is (x, y).

    Args:
        opacity: a number from 0, which shows the background, to 1.
    """

    x: float
    y: float
    width: float
    height: float
    color: Color
    opacity: float = 1.0


@dataclass(frozen=True)
class Text:
    """A line of text whose baseline is at y.

    Args:
        size: size of the font in pixels.
        anchor: the part of the text at x.
        rises: whether the text runs upwards from (x, y).
    """

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: Literal["start", "middle", "end"] = "start"
    color: Color = "faint"
    rises: bool = False


Shape = Line | Dot | Box | Text


@dataclass(frozen=True)
class Figure:
    """Shapes with a title.

    Args:
        width: width in pixels.
        height: height in pixels.
        shapes: the shapes in the order in which they are drawn.
        note: a sentence below the figure.
        name: a description for readers who cannot see the figure.
    """

    title: str
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)
    note: str = ""
    name: str = ""

    def html(self) -> str:
        """Return the figure as an SVG element; the page defines a variable ``--NAME`` for each `Color`."""
        label = html.escape(self.name or self.title)
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        return f'<svg {size} role="img" aria-label="{label}">{"".join(map(_as_svg, self.shapes))}</svg>'

    def image(self) -> Image.Image:
        """Return the figure in RGB, at 1.5 times its size."""
        canvas = Image.new("RGB", (round(_SCALE * self.width), round(_SCALE * self.height)), PALETTE["paper"])
        draw = ImageDraw.Draw(canvas)
        for shape in self.shapes:
            _draw(canvas, draw, shape, _SCALE)
        return canvas


def _as_svg(shape: Shape) -> str:
    color = f"var(--{shape.color})"
    match shape:
        case Line():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{shape.width:g}"/>'
        case Dot():
            return f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" fill="{color}"/>'
        case Box():
            geometry = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
            return f'<rect {geometry} fill="{color}" fill-opacity="{shape.opacity:.3f}"/>'
        case Text():
            rotation = f' transform="rotate(-90 {shape.x:.1f} {shape.y:.1f})"' if shape.rises else ""
            geometry = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
            return f'<text {geometry} fill="{color}"{rotation}>{html.escape(shape.text)}</text>'


@cache
def font(size: int) -> Any:
    """Return a font of this size in pixels: DejaVu Sans, which has most scripts, if installed, else Pillow's."""
    for name in _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def _blend(color: Color, opacity: float) -> tuple[int, ...]:
    """Return a color blended with the background."""
    pairs = zip(PALETTE[color], PALETTE["paper"], strict=True)
    return tuple(round(opacity * above + (1 - opacity) * below) for above, below in pairs)


def _draw(canvas: Image.Image, draw: ImageDraw.ImageDraw, shape: Shape, scale: float) -> None:
    color = PALETTE[shape.color]
    match shape:
        case Line():
            points = [(scale * x, scale * y) for x, y in shape.points]
            draw.line(points, fill=color, width=max(1, round(scale * shape.width)), joint="curve")
        case Dot():
            left = scale * (shape.x - shape.radius)
            top = scale * (shape.y - shape.radius)
            right = scale * (shape.x + shape.radius)
            bottom = scale * (shape.y + shape.radius)
            draw.ellipse((left, top, right, bottom), fill=color)
        case Box():
            left = scale * shape.x
            top = scale * shape.y
            # Pillow's rectangles include the lower right corner.
            right = left + scale * shape.width - 1
            bottom = top + scale * shape.height - 1
            if right >= left and bottom >= top:
                draw.rectangle((left, top, right, bottom), fill=_blend(shape.color, shape.opacity))
        case Text():
            letters = font(round(scale * shape.size))
            if shape.rises:
                _draw_rising(canvas, shape, letters, scale)
            else:
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                draw.text((scale * shape.x, scale * shape.y), shape.text, fill=color, font=letters, anchor=anchor)


def _draw_rising(canvas: Image.Image, shape: Text, letters: Any, scale: float) -> None:
    # Pillow writes horizontally only: the text is drawn as a mask, rotated, and pasted in its color.
    ascent, descent = letters.getmetrics()
    length = round(letters.getlength(shape.text)) + 1
    mask = Image.new("L", (length, ascent + descent))
    ImageDraw.Draw(mask).text((0, ascent), shape.text, fill=255, font=letters, anchor="ls")
    mask = mask.transpose(Image.Transpose.ROTATE_90)
    offset = {"start": length, "middle": length // 2, "end": 0}[shape.anchor]
    left = round(scale * shape.x) - ascent
    top = round(scale * shape.y) - offset
    canvas.paste(PALETTE[shape.color], (left, top, left + mask.width, top + mask.height), mask)
