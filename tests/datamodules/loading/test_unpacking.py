"""Compressed files and images that stand for more than memory holds are refused with the size, the limit and a cure."""

import zipfile
from pathlib import Path

import pytest

from datamodules.errors import UserError
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
