"""Compressed files and images that stand for more than memory holds are refused with the size, the limit and a cure."""

import gzip
import struct
import zipfile
from pathlib import Path

import pytest

from datamodules.errors import UserError
from datamodules.loading.unpacking import unpacked_limit
from datamodules.mnist.idx import read_idx
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


def test_idx_files_are_read_no_further_than_their_header_says(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 28, 28)))
    with pytest.raises(UserError, match=rf"unpack to 1,683,627,180,032 by its header, and the limit .*; {CURE}"):
        read_idx(path, 3)
    path.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 3) + bytes(100_000)))
    with pytest.raises(UserError, match="18 in all; found 19 or more: there is more after the last row"):
        read_idx(path, 3)
    path.write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 100_000) + bytes(100_000)))
    assert len(read_idx(path, 1)) == 100_000  # Labels in order: 600 to 1, and true.
    with pytest.raises(UserError, match="unpack to 100,000 by its header"):
        read_idx(path, 1, always=1000)
