from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.arrays import InputImages, collect_images
from datamodules.images.tensor_pipeline import Digits, as_mnist, gray_image, read_digits


def _seven(height: int = 120, width: int = 90) -> np.ndarray:
    """A drawn seven, ink 255 on 0, off center."""
    canvas = np.zeros((height, width), dtype=np.uint8)
    canvas[10:20, 15:70] = 255
    for row in range(20, 100):
        column = 65 - (row - 20) // 2
        canvas[row, column : column + 10] = 255
    return canvas


def _form(image: Image.Image | np.ndarray, invert: bool = False) -> Tensor:
    opened = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return as_mnist(gray_image(opened, invert=invert)).float()


def _read(images: Any, invert: bool = False) -> Digits:
    return read_digits(collect_images(images, color=False), invert)


EXPECTED = _form(_seven())


def _likeness(image: Image.Image | np.ndarray, invert: bool = False) -> float:
    """The correlation with the plain seven, at the best of the shifts by a pixel."""
    found = _form(image, invert)
    shifted = [found.roll((y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    return max(float(torch.corrcoef(torch.stack((one.flatten(), EXPECTED.flatten())))[0, 1]) for one in shifted)


def test_a_digit_fills_20_pixels():
    ink = EXPECTED > 0
    rows, columns = ink.any(1).nonzero().flatten(), ink.any(0).nonzero().flatten()
    assert EXPECTED.shape == (28, 28)
    assert int(rows[-1] - rows[0]) + 1 == 20
    assert int(columns[-1] - columns[0]) + 1 <= 20
    assert EXPECTED.max() == 255


def test_the_mass_of_a_digit_is_centered():
    for axis in (0, 1):
        center = float((EXPECTED.sum(1 - axis) * torch.arange(28.0)).sum() / EXPECTED.sum())
        # As in MNIST, whose centers of mass are between 13.5 and 14.5.
        assert abs(center - 14) <= 0.51


def test_neither_size_place_mode_nor_noise_of_an_image_matters():
    drawn, moved = Image.fromarray(_seven()), np.zeros((300, 400), dtype=np.uint8)
    moved[150:270, 300:390] = _seven()
    noise = np.random.default_rng(0).normal(0, 6, _seven().shape)
    light = np.where(np.arange(90) < 40, 0.7, 1.0)
    assert _likeness(255 - _seven(), invert=True) > 0.99
    assert _likeness(drawn.resize((180, 240))) > 0.97
    assert _likeness(moved) > 0.9
    assert _likeness(np.clip(200 - 0.6 * _seven() + noise, 0, 255).astype(np.uint8), invert=True) > 0.93
    assert _likeness(((230 - 0.7 * _seven()) * light).astype(np.uint8), invert=True) > 0.93, "light from a side"
    for mode in ("RGB", "1", "P", "CMYK"):
        assert _likeness(drawn.convert(mode)) > 0.99
    ink = np.zeros_like(_seven())
    transparent = Image.fromarray(np.stack([ink, ink, ink, _seven()], -1), "RGBA")
    assert _likeness(transparent, invert=True) > 0.99, "transparency is paper"


def test_the_cameras_orientation_is_respected(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    Image.fromarray(_seven()).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "photo.png", exif=exif)
    (found,) = _read([str(tmp_path / "photo.png")]).pixels
    assert (found.float() - EXPECTED).abs().max() < 8


def test_an_image_of_mnists_own_form_is_left_alone():
    ready = torch.zeros(28, 28, dtype=torch.uint8)
    ready[3:9, 5:8] = 200
    assert torch.equal(as_mnist(ready), ready)
    assert torch.equal(as_mnist(255 - ready), 255 - ready)
    inverted = _read([Image.fromarray(255 - ready.numpy())], invert=True)
    assert torch.equal(inverted.pixels[0], ready)
    assert inverted.borders.tolist() == [0.0]


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (400, 5), (1, 90)])
@pytest.mark.parametrize("shade", [0, 128, 255])
def test_only_an_image_without_a_line_is_blank(size: tuple[int, int], shade: int):
    image = Image.new("L", size, shade)
    assert _read([image]).blank.tolist() == [True]
    if max(size) > 28:
        image.putpixel((0, size[1] // 2), 255 - shade // 2)
        image.putpixel((0, 0), (shade + 100) % 256)
        assert as_mnist(gray_image(image)).max() == 255
        assert _read([image]).blank.tolist() == [False]


def test_each_file_that_cannot_be_read_is_named(tmp_path: Path):
    good = tmp_path / "good.png"
    Image.fromarray(_seven()).save(good)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:100])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    names = ["text.png", "cut.png", "empty.png", "folder.png", "nothing.png"]
    files = [str(good), *(str(tmp_path / name) for name in names), str(good)]
    found = read_digits(InputImages(files, [*files]))
    assert found.numbers.tolist() == [0, 6]
    assert found.pixels.shape == (2, 28, 28)
    assert torch.equal(found.pixels[0].float(), EXPECTED)
    assert list(found.unreadable) == [1, 2, 3, 4, 5]
    for name, error in zip(names, found.unreadable.values(), strict=True):
        assert error.subject == str(tmp_path / name)
        assert error.problem.startswith("cannot be read as an image: ")
        assert str(error) == f"{error.subject} {error.problem}"
    assert str(found.unreadable[5]).endswith("No such file or directory")
