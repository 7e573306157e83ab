"""Pictures of many kinds, as files that a script writes: formats, modes, orientations, transparency and odd sizes."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

_ORIENTATION = 0x0112


def _colors(number: int, width: int, height: int) -> Image.Image:
    """A picture with fine and coarse structure, other than its mirror images."""
    draws = np.random.default_rng(number)
    coarse = Image.fromarray(draws.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height), 3)
    noise = draws.normal(0, 40, (height, width, 3))
    return Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))


def _mask(image: Image.Image, soft: bool = False) -> Image.Image:
    """A disc, on top of which nothing is seen, or a ramp."""
    rows, columns = np.mgrid[: image.height, : image.width]
    alpha = 255 * ((rows - image.height / 2) ** 2 + (columns - image.width / 2) ** 2 < (min(image.size) / 3) ** 2)
    if soft:
        alpha = 255 * columns / max(1, image.width - 1)
    return Image.fromarray(alpha.astype(np.uint8))


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    return exif


def write_pictures(folder: Path, copies: int = 2) -> list[Path]:
    """Write `copies` pictures of each of 31 kinds; the file names begin with the kind."""
    folder.mkdir(parents=True, exist_ok=True)
    return [path for copy in range(copies) for path in _write_kinds(folder, copy)]


def _write_kinds(folder: Path, copy: int) -> list[Path]:
    draws = np.random.default_rng(copy)
    number = 100 * copy

    def color(width: int | None = None, height: int | None = None) -> Image.Image:
        nonlocal number
        number += 1
        sizes = draws.integers(70, 400, 2).tolist()
        return _colors(number, width or sizes[0], height or sizes[1])

    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        f"jpeg_exif_{turn}.jpg": (color(), {"exif": _exif(turn), "quality": 92}) for turn in range(1, 9)
    }
    cut_out = color()
    black = Image.composite(cut_out, Image.new("RGB", cut_out.size), _mask(cut_out))
    black.putalpha(_mask(cut_out))
    soft = color()
    soft.putalpha(_mask(soft, soft=True))
    gray = color().convert("L")
    gray_soft = gray.copy().convert("LA")
    gray_soft.putalpha(_mask(gray, soft=True))
    palette = color().quantize(60)
    bits = color().convert("1")
    kinds |= {
        "png_exif_6.png": (color(), {"exif": _exif(6)}),
        "png_exif_7_alpha.png": (soft.transpose(Image.Transpose.ROTATE_90), {"exif": _exif(7)}),
        "cut_out.png": (black, {}),
        "alpha.png": (soft, {}),
        "gray_alpha.png": (gray_soft, {}),
        "gray.png": (gray, {}),
        "gray.jpg": (gray, {"quality": 85}),
        "cmyk.jpg": (color().convert("CMYK"), {"quality": 90}),
        "palette.png": (palette, {}),
        "palette_transparent.png": (palette, {"transparency": 3}),
        "color_key.png": (color().quantize(8).convert("RGB"), {"transparency": (0, 0, 0)}),
        "one_bit.png": (bits, {}),
        "wide.png": (color(300, 1), {}),
        "tall.png": (color(1, 300), {}),
        "tiny.png": (color(5, 7), {}),
        "large.jpg": (color(1203, 905), {"quality": 95}),
        "odd.png": (color(61 + copy, 43 + copy), {}),
        "progressive.jpg": (color(), {"progressive": True, "quality": 75}),
        "full_chroma.jpg": (color(), {"subsampling": 0}),
        "lossy.webp": (color(), {"quality": 80}),
        "animation.gif": (color(120, 90), {"save_all": True, "append_images": [color(120, 90)]}),
        "pixels.tiff": (color(), {}),
        "pixels.bmp": (color(), {}),
    }
    paths = []
    for name, (image, options) in kinds.items():
        path = folder / f"{Path(name).stem}_{copy}{Path(name).suffix}"
        image.save(path, **options)
        paths.append(path)
    return paths


def has_transparency(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA") or "transparency" in image.info


def upright_rgb(path: Path) -> Image.Image:
    """A picture as users of Pillow make it ready: upright, and on white where it is transparent."""
    image = ImageOps.exif_transpose(Image.open(path))
    if has_transparency(image):
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")
