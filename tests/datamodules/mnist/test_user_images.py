from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.mnist.user_images import as_mnist, read_digit, read_digits


def _seven(height: int = 120, width: int = 90) -> np.ndarray:
    """A drawn seven, ink 255 on 0, off centre."""
    canvas = np.zeros((height, width), dtype=np.uint8)
    canvas[10:20, 15:70] = 255
    for row in range(20, 100):
        column = 65 - (row - 20) // 2
        canvas[row, column : column + 10] = 255
    return canvas


EXPECTED = as_mnist(Image.fromarray(_seven())).float()


def _difference(image: Image.Image) -> float:
    """Mean absolute difference from the plain seven, as a share of its ink."""
    return float((as_mnist(image).float() - EXPECTED).abs().sum() / EXPECTED.sum())


def test_a_digit_fills_20_pixels_and_its_mass_is_centred():
    ink = EXPECTED[0] > 0
    rows, columns = ink.any(1).nonzero().flatten(), ink.any(0).nonzero().flatten()
    assert EXPECTED.shape == (1, 28, 28)
    assert int(rows[-1] - rows[0]) + 1 == 20
    assert int(columns[-1] - columns[0]) + 1 <= 20
    mass, places = EXPECTED[0].sum(), torch.arange(28.0)
    for axis in (0, 1):
        centre = float((EXPECTED[0].sum(1 - axis) * places).sum() / mass)
        # As in MNIST, whose centres of mass are between 13.5 and 14.5.
        assert abs(centre - 14) <= 0.51


def test_dark_on_light_is_light_on_dark():
    assert _difference(Image.fromarray(255 - _seven())) == 0


@pytest.mark.parametrize("factor", [2, 9])
def test_the_size_does_not_matter(factor):
    drawn = Image.fromarray(_seven())
    size = (round(drawn.width * factor), round(drawn.height * factor))
    assert _difference(drawn.resize(size, Image.Resampling.BILINEAR)) < 0.12


def test_where_the_digit_stands_does_not_matter():
    moved = np.zeros((300, 400), dtype=np.uint8)
    moved[150:270, 300:390] = _seven()
    assert _difference(Image.fromarray(moved)) < 0.12


@pytest.mark.parametrize("mode", ["L", "RGB", "1", "P", "CMYK", "I;16", "I", "F"])
@pytest.mark.parametrize("dark_on_light", [False, True])
def test_every_mode_of_image_gives_the_same_digit(mode, dark_on_light, tmp_path: Path):
    seven = 255 - _seven() if dark_on_light else _seven()
    if mode == "I;16":
        image = Image.fromarray(seven.astype(np.uint16) * 257)
    elif mode == "I":
        image = Image.fromarray(seven.astype(np.int32) * 257)
    else:
        image = Image.fromarray(seven).convert(mode)
    assert image.mode == mode
    assert _difference(image) < 0.01


def test_16_bits_keep_their_shades():
    # Ink of 40 %: clipped to 255 instead of scaled, paper and ink would both be white.
    shades = np.where(_seven() > 0, 26_000, 65_535).astype(np.uint16)
    assert _difference(Image.fromarray(shades)) < 0.01


@pytest.mark.parametrize("ink", [0, 255])
def test_transparency_is_background_for_dark_and_for_light_ink(ink):
    alpha = _seven()
    rgba = np.stack([np.full_like(alpha, ink)] * 3 + [alpha], axis=-1)
    assert _difference(Image.fromarray(rgba, "RGBA")) == 0


def test_a_photograph_with_uneven_paper_is_cut_out():
    noise = np.random.default_rng(0).normal(0, 6, _seven().shape)
    paper = np.clip(200 - 0.6 * _seven() + noise, 0, 255).astype(np.uint8)
    found = as_mnist(Image.fromarray(paper)).float()
    # Noise may move the rounded centre of mass by a pixel.
    shifted = [found.roll((y, x), (1, 2)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    assert min(float((image - EXPECTED).abs().sum() / EXPECTED.sum()) for image in shifted) < 0.2


@pytest.mark.parametrize("transparent", [False, True])
def test_the_cameras_orientation_is_respected(transparent, tmp_path: Path):
    path = tmp_path / "photo.png"
    turned = Image.fromarray(_seven()).transpose(Image.Transpose.ROTATE_90)
    if transparent:
        turned = Image.merge("RGBA", [turned, turned, turned, Image.new("L", turned.size, 255)])
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    turned.save(path, exif=exif)
    assert (read_digits([str(path)]).pixels[0].float() - EXPECTED).abs().sum() == 0


def test_an_image_of_mnists_own_form_is_left_alone():
    ready = np.zeros((28, 28), dtype=np.uint8)
    ready[3:9, 5:8] = 200
    assert torch.equal(as_mnist(Image.fromarray(ready))[0], torch.from_numpy(ready))


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (5, 400)])
@pytest.mark.parametrize("shade", [0, 128, 255])
def test_an_empty_image_is_black(size, shade):
    image = as_mnist(Image.new("L", size, shade))
    assert image.shape == (1, 28, 28)
    if not (size == (28, 28) and shade == 0):
        assert image.sum() == 0


def test_a_single_dot_and_lines_along_the_border_are_no_digit():
    for box in ((50, 50, 51, 51), (99, 0, 100, 100), (0, 0, 100, 4)):
        image = Image.new("L", (100, 100), 0)
        image.paste(255, box)
        assert read_digit(image)[1] == "no strokes found"


def test_files_come_in_their_order_as_one_tensor(tmp_path: Path):
    Image.fromarray(_seven()).save(tmp_path / "a.png")
    Image.fromarray(255 - np.rot90(_seven())).save(tmp_path / "b.jpg", quality=95)
    found = read_digits([str(tmp_path / "b.jpg"), str(tmp_path / "a.png")]).pixels
    assert found.shape == (2, 1, 28, 28)
    assert found.dtype == torch.uint8
    assert torch.equal(found[1].float(), EXPECTED)
    assert not torch.equal(found[0], found[1])


def _damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(data)


def test_each_file_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path):
    good = tmp_path / "good.png"
    Image.fromarray(_seven()).save(good)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:100])
    (tmp_path / "flipped.png").write_bytes(good.read_bytes())
    _damaged(tmp_path / "flipped.png")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    names = ["text.png", "cut.png", "flipped.png", "empty.png", "folder.png", "nothing.png"]
    found = read_digits([str(good), *(str(tmp_path / name) for name in names), str(good)])
    assert found.numbers.tolist() == [0, 7]
    assert torch.equal(found.pixels[0], found.pixels[1])
    assert list(found.unreadable) == [1, 2, 3, 4, 5, 6]
    for name, message in zip(names[:-1], found.unreadable.values()):
        assert message.startswith(f"{tmp_path / name} cannot be read as an image: ")
    assert found.unreadable[1].endswith("its content is not an image")
    assert found.unreadable[4].endswith("the file is empty")
    assert found.unreadable[6] == f"{tmp_path / 'nothing.png'} does not exist"


def test_a_decompression_bomb_is_refused(tmp_path: Path):
    path = tmp_path / "bomb.png"
    Image.new("1", (16_000, 12_000)).save(path)
    assert "bomb" in read_digits([str(path)]).unreadable[0]


def _likeness(image: Image.Image) -> float:
    """The correlation with the plain seven, at the best of the shifts by a pixel."""
    found = as_mnist(image).float()
    shifted = [found.roll((y, x), (1, 2)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    return max(float(torch.corrcoef(torch.stack((one.flatten(), EXPECTED.flatten())))[0, 1]) for one in shifted)


@pytest.mark.parametrize("light_on_dark", [False, True])
def test_a_shadow_across_a_digit_leaves_its_strokes(light_on_dark):
    page = np.full((300, 400), 230.0)
    page[80:200, 150:240] -= 0.7 * _seven()
    y, x = np.mgrid[0:300, 0:400]
    lit = page * np.where(x + 0.6 * y < 270, 0.4, 1.0) * (1 - 0.0005 * y)
    image = Image.fromarray((230 - page if light_on_dark else lit).astype(np.uint8))
    assert _likeness(image) > 0.93


def test_a_small_digit_in_a_large_photograph_is_looked_at_closely():
    page = np.full((3000, 4000), 235, dtype=np.uint8)
    page[2000:2240, 700:880] -= (0.8 * _seven().repeat(2, 0).repeat(2, 1)).astype(np.uint8)
    assert _likeness(Image.fromarray(page)) > 0.93


def test_a_digit_that_is_cut_out_up_to_its_strokes_is_read():
    assert _likeness(Image.fromarray(255 - _seven()[10:100, 15:70])) > 0.93


def test_dust_and_the_edge_of_the_paper_are_left_out():
    page = np.full((300, 400), 230, dtype=np.uint8)
    page[80:200, 150:240] -= (0.7 * _seven()).astype(np.uint8)
    page[:, :30] = 40
    page[20:23, 300:303] = 60
    page[250:252, 120:124] = 60
    assert _likeness(Image.fromarray(page)) > 0.93


def test_two_digits_are_called_that_and_one_is_not():
    page = np.full((300, 500), 230, dtype=np.uint8)
    for left in (100, 220):
        page[80:200, left : left + 90] -= (0.7 * _seven()).astype(np.uint8)
    assert read_digit(Image.fromarray(page))[1] == "2 digits or more"
    assert read_digit(Image.fromarray(page[:, :200]))[1] == ""


def test_paper_in_a_shadow_shows_no_strokes():
    y, x = np.mgrid[0:300, 0:400]
    noise = np.random.default_rng(0).normal(0, 3, x.shape)
    for light in (np.ones_like(x), 1 - x / 800, np.where(x < 200, 0.5, 1), 0.5 + 0.5 / (1 + np.exp((y - 150) / 20))):
        page = (220 * light + noise).clip(0, 255).astype(np.uint8)
        assert read_digit(Image.fromarray(page))[1] == "no strokes found"


def test_mnists_own_form_in_black_on_white_is_inverted_and_nothing_else():
    assert torch.equal(as_mnist(Image.fromarray(255 - EXPECTED[0].byte().numpy())), EXPECTED.byte())
