"""Compressed files and images that stand for more than memory holds are refused with the size, the limit and a cure."""

import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

from datamodules.errors import UserError
from datamodules.images.files import UnreadableImage, load_image
from datamodules.loading.unpacking import unpacked_limit
from datamodules.translation.parallel_corpus import read_lines

LINES = b"a\tb\n"
CURE = "if these are your data, unpack the file and pass what was in it"


def test_an_archive_that_names_files_outside_of_it_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../../outside.tsv", LINES)
    with pytest.raises(UserError, match="holds 0 files, expected one"):
        read_lines(tmp_path / "a.zip")
    assert not (tmp_path.parent.parent / "outside.tsv").exists()


def test_the_limit_follows_the_size_of_the_file() -> None:
    assert unpacked_limit(100, most=1000, always=10, ratio=3) == 300
    assert unpacked_limit(1, most=1000, always=10, ratio=3) == 10
    assert unpacked_limit(500, most=1000, always=10, ratio=3) == 1000


def _png(path: Path, side: int) -> Path:
    """A white PNG, written without decoding it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress((b"\0" + b"\xff" * ((side + 7) // 8)) * side, 9)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return path


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = _png(tmp_path / "white.png", 13_000)
    assert path.stat().st_size < 50_000
    with pytest.raises(UnreadableImage, match=r"white.png .* 13,000 x 13,000 pixels, and the limit is 89,478,485;"):
        load_image(path, 32)


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(tmp_path: Path) -> None:
    Image.new("RGB", (400, 300), "white").save(tmp_path / "a.jpg")
    assert load_image(tmp_path / "a.jpg", 40, most_pixels=10_000).shape == (3, 40, 53)
    with pytest.raises(UnreadableImage, match="400 x 300 pixels, and the limit is 10,000"):
        load_image(tmp_path / "a.jpg", 300, most_pixels=10_000)
