"""Compressed files and images that stand for more than memory holds are refused with the size, the limit and a cure."""

import gzip
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


def test_a_compressed_text_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv.gz"
    path.write_bytes(gzip.compress(LINES * 250))
    assert len(read_lines(path, most=1000)) == 250
    for member in (gzip.compress(LINES * 251), gzip.compress(LINES) * 251):
        path.write_bytes(member)
        with pytest.raises(UserError, match=r"pairs.tsv.gz is refused: .* unpack to more than 1,000, .* limit .*1,000"):
            read_lines(path, most=1000)


@pytest.mark.parametrize("lies", [False, True])
def test_a_zip_archive_is_read_up_to_its_limit_whatever_its_directory_says(lies: bool, tmp_path: Path) -> None:
    path = tmp_path / "pairs.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pairs.tsv", LINES * 5000)
    if lies:
        size = struct.pack("<I", len(LINES) * 5000)
        path.write_bytes(path.read_bytes().replace(size, struct.pack("<I", 400)))
        with pytest.raises(UserError, match="is damaged"):
            read_lines(path, most=1000)
    else:
        with pytest.raises(UserError, match=f"unpack to 20,000, and the limit .* is 1,000; {CURE}"):
            read_lines(path, most=1000)
        assert len(read_lines(path)) == 5000


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
