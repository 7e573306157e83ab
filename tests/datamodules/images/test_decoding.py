"""Pixels of other programs: read as they were meant, or rejected for what they are."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datamodules import UserError
from datamodules.images.decoding import _crop_start, crop_box, load_image
from datamodules.images.layouts import find_images


def _tiff(pixels: np.ndarray, path: Path, **tags: int) -> Path:
    """An uncompressed TIFF, one plane after the other, of shape (planes, height, width), as GDAL writes bands."""
    planes, height, width = pixels.shape
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    bits = 8 * pixels.dtype.itemsize
    fields = {
        256: [width],
        257: [height],
        258: [bits] * planes,
        259: [1],
        262: [2 if planes == 3 else 1],
        277: [planes],
    }
    fields |= {278: [height], 284: [2], 339: [kind] * planes}
    sizes = [height * width * pixels.dtype.itemsize] * planes
    # Behind the header and the directory of 11 entries lie the values that do not fit into it, then the pixels.
    start = 8 + 2 + 12 * (len(fields) + 2) + 4
    extra = b""
    entries = []
    data = start + 4 * planes * 2 + 2 * planes * 2
    offsets = [data + sum(sizes[:number]) for number in range(planes)]
    for tag, values, size in [
        *((tag, values, 2) for tag, values in fields.items()),
        (273, offsets, 4),
        (279, sizes, 4),
    ]:
        packed = b"".join(value.to_bytes(size, "little") for value in values)
        if len(packed) > 4:
            entries.append((tag, size, len(values), (start + len(extra)).to_bytes(4, "little")))
            extra += packed
        else:
            entries.append((tag, size, len(values), packed.ljust(4, b"\0")))
    head = b"II*\0" + (8).to_bytes(4, "little") + len(entries).to_bytes(2, "little")
    for tag, size, count, value in sorted(entries):
        head += tag.to_bytes(2, "little") + (3 if size == 2 else 4).to_bytes(2, "little")
        head += count.to_bytes(4, "little") + value
    content = (head + bytes(4) + extra).ljust(data, b"\0")
    path.write_bytes(content + pixels.astype(pixels.dtype.newbyteorder("<")).tobytes())
    return path


RAMP = np.tile(np.arange(64, dtype=np.uint16) * 1000, (3, 48, 1))


def test_pixels_deeper_than_8_bits_are_found_in_the_header(tmp_path: Path):
    deep = "its pixels have more than 8 bits"
    files = {_tiff(RAMP, tmp_path / "planar.tif"): deep}
    files[_tiff(RAMP[:1].astype(np.int8), tmp_path / "signed.tif")] = "its pixels are signed"
    for magic, planes in ((b"P6", 3), (b"P5", 1)):
        path = tmp_path / f"{planes}.ppm"
        rows = np.moveaxis(RAMP[:planes], 0, 2).astype(">u2").tobytes()
        path.write_bytes(magic + b"\n# of a scanner\n64 48\n65535\n" + rows)
        files[path] = "its format is PPM; save all images of the set as PNG" if planes == 3 else deep
    for path, reason in files.items():
        with pytest.raises(UserError, match=f"{path.name} cannot be read as an image: {reason}"):
            load_image(path, 64)
    plain = (RAMP // 256).astype(np.uint8)
    assert np.array_equal(load_image(_tiff(plain, tmp_path / "plain.tif"), 64).numpy(), plain)
    # Pillow scales deeper pixels of these formats to 8 bits.
    for suffix, name in (("ppm", "PPM"), ("jp2", "JPEG2000")):
        Image.fromarray(np.moveaxis(plain, 0, 2)).save(tmp_path / f"plain.{suffix}")
        with pytest.raises(UserError, match=f"its format is {name}; save all images of the set as PNG, with 8 bits"):
            load_image(tmp_path / f"plain.{suffix}", 64)


def test_what_a_file_is_instead_of_an_image_is_told(tmp_path: Path):
    pages = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(3)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    contents = {
        "x.jxl": (b"\xff\x0a" + bytes(50), "it is JPEG XL"),
        "x.dcm": (bytes(128) + b"DICM" + bytes(50), "it is DICOM"),
        "x.tif": (b"II*\0" + bytes(50), "it is a TIFF of pixels that Pillow does not read"),
        "pages.tif": ((tmp_path / "pages.tif").read_bytes(), "it has 3 pages"),
        "x.txt": (b"text", "its content is not an image"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read as an image: {reason}"):
            load_image(tmp_path / name, 8)


def test_heic_photographs_are_read_if_the_library_is_installed(tmp_path: Path):
    pillow_heif = pytest.importorskip("pillow_heif")
    image = Image.new("RGB", (64, 64), (200, 40, 40))
    pillow_heif.from_pillow(image).save(tmp_path / "x.heic")
    assert load_image(tmp_path / "x.heic", 64).float().mean((1, 2))[0] > 150
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.HEIC").write_bytes((tmp_path / "x.heic").read_bytes())
    assert len(find_images(tmp_path).parts["train"].labels) == 2


def test_a_crop_begins_at_each_pixel_equally_often():
    draws = [(number + 0.5) / 8 for number in range(8)]
    assert [_crop_start(draw, 8, 5) for draw in draws] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert _crop_start(1.0, 8, 5) == 3, "float32 rounds the largest numbers to 1"


def test_a_crop_has_the_drawn_area_or_is_the_largest_one():
    middle = [0.5, 0.5, 0.5, 0.5] + [0.0] * 18
    assert crop_box(100, 100, 0.25, middle) == (11, 11, 79, 79), "of 62.5 % of the area"
    # No attempt fits into a strip.
    assert crop_box(10, 300, 0.9, [0.0] * 22) == (0, 143, 10, 13)
    assert crop_box(300, 10, 0.9, [0.0] * 22) == (143, 0, 13, 10)
