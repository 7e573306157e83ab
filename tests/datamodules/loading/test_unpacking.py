import zipfile
from pathlib import Path

import pytest

from datamodules.errors import UserError
from datamodules.translation.parallel_corpus import read_lines


def test_an_archive_that_names_files_outside_of_it_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../../outside.tsv", b"a\tb\n")
    with pytest.raises(UserError, match="holds 0 files, expected one"):
        read_lines(tmp_path / "a.zip")
    assert not (tmp_path.parent.parent / "outside.tsv").exists()
