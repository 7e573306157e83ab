"""Grids of images with captions: training images and mistakes."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from recipes.figures.drawing import PALETTE, Figure, font

LARGEST_SIDE = 112
"""Pixels of the longer side of an image in a grid; larger images are scaled down."""
_CELL = 96
"""Pixels up to which small images are magnified, by an integer factor."""
_SMALL = 64
"""The longer side up to which images are kept unchanged, as PNG, and shown magnified."""


def displayed(images: Tensor, normalize: nn.Module | None = None, side: int = LARGEST_SIDE) -> Tensor:
    """Convert inputs of a network to images for display: bytes, of a limited size.

    Args:
        images: inputs of a network, of shape (n, channels, height, width).
        normalize: the normalization to undo, with the ``mean`` and ``std`` of the channels as in
            `datamodules.images.augmentation.Normalize`. Without it, the minimum and maximum over all images are mapped
            to 0 and 255, unless `images` are bytes.
        side: the maximum number of pixels of the longer side.

    Returns:
        uint8 of shape (n, channels, height, width), on the CPU.

    Example:
        >>> displayed(torch.tensor([-1.0, 0.0, 1.0]).view(1, 1, 1, 3)).flatten().tolist()
        [0, 128, 255]
    """
    if images.dtype != torch.uint8:
        images = images.detach().float()
        mean = getattr(normalize, "mean", None)
        std = getattr(normalize, "std", None)
        if mean is not None and std is not None:
            shape = (-1, 1, 1)
            means = torch.tensor(mean, device=images.device).view(shape)
            images = images * torch.tensor(std, device=images.device).view(shape) + means
        else:
            low, high = images.aminmax()
            images = (images - low) / (high - low).clamp(min=1e-9)
        images = (images.nan_to_num() * 255).round().clamp(0, 255).byte()
    height, width = images.shape[2:]
    if max(height, width) > side:
        scale = side / max(height, width)
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
        small = nn.functional.interpolate(images.float(), size, mode="area")
        images = small.round().clamp(0, 255).byte()
    return images.cpu()


def _as_pillow(image: Tensor) -> Image.Image:
    """Convert bytes of shape (channels, height, width) to a gray image, or with three or more channels to color."""
    if image.shape[0] < 3:
        return Image.fromarray(image[0].numpy())
    return Image.fromarray(image[:3].permute(1, 2, 0).contiguous().numpy())


@dataclass(frozen=True)
class ImageGrid:
    """Images with a caption each.

    Args:
        title: the title of the grid.
        images: uint8 of shape (n, channels, height, width), as from `displayed`.
        captions: the lines below each image; the first line is emphasized.
        note: a sentence below the grid.
        group: number of successive images that belong together in a row.
    """

    title: str
    images: Tensor
    captions: Sequence[Sequence[str]]
    note: str = ""
    group: int = 1

    def html(self) -> str:
        """Return the grid as an HTML element that contains the images: PNG if they are small, else JPEG."""
        cells = [self._cell(image, lines) for image, lines in zip(self.images, self.captions, strict=True)]
        if self.group == 1:
            return f'<div class="grid">{"".join(cells)}</div>'
        row_tag = f'<div class="row" style="grid-template-columns: repeat({self.group}, minmax(0, 7rem))">'
        starts = range(0, len(cells), self.group)
        rows = [f"{row_tag}{''.join(cells[start : start + self.group])}</div>" for start in starts]
        return f'<div class="rows">{"".join(rows)}</div>'

    def _cell(self, image: Tensor, lines: Sequence[str]) -> str:
        is_small = max(image.shape[1:]) <= _SMALL
        # A group has several images per sample, and PNG takes twice the bytes of JPEG.
        is_png = max(image.shape[1:]) <= (_SMALL if self.group == 1 else _SMALL // 2)
        kind = "png" if is_png else "jpeg"
        file = io.BytesIO()
        if is_png:
            _as_pillow(image).save(file, "png")
        else:
            _as_pillow(image).save(file, "jpeg", quality=82)
        data = base64.b64encode(file.getvalue()).decode()
        css_class = ' class="small"' if is_small else ""
        alt = html.escape(", ".join(lines))
        headline, *other_lines = (html.escape(line) for line in lines)
        caption = "<br>".join((f"<b>{headline}</b>", *other_lines))
        image_tag = f'<img{css_class} src="data:image/{kind};base64,{data}" alt="{alt}">'
        return f"<figure>{image_tag}<figcaption>{caption}</figcaption></figure>"

    def image(self, columns: int = 8) -> Image.Image:
        """Return the grid as one image in RGB; groups are not divided."""
        columns = max(1, round(columns / self.group)) * self.group
        count, _, height, width = self.images.shape
        magnified = max(1, _CELL // max(height, width))
        caption_lines = max(map(len, self.captions), default=0)
        gap = 8
        line_height = 15
        cell = max(_CELL, width)
        cell_width = cell + gap
        cell_height = magnified * height + line_height * caption_lines + gap
        rows = -(-count // columns)
        canvas = Image.new("RGB", (columns * cell_width + gap, rows * cell_height + gap), PALETTE["paper"])
        draw = ImageDraw.Draw(canvas)
        for number, (image, caption) in enumerate(zip(self.images, self.captions, strict=True)):
            x = gap + number % columns * cell_width
            y = gap + number // columns * cell_height
            size = (magnified * width, magnified * height)
            canvas.paste(_as_pillow(image).resize(size, Image.Resampling.NEAREST), (x, y))
            for line_number, line in enumerate(caption):
                while line and font(12).getlength(line) > cell:
                    line = line[:-1]
                color = PALETTE["faint" if line_number else "ink"]
                draw.text((x, y + size[1] + 2 + line_number * line_height), line, fill=color, font=font(12))
        return canvas


Picture = Figure | ImageGrid
"""A picture of a run, with a title and a note, as an HTML element or an image."""
