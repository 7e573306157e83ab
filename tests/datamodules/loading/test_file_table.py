"""Files by number."""

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from datamodules.loading.file_table import FileTable

NAMES = ["b/\u00e4 \U0001f41c.jpg", "a/1.jpg", "odd \udcff.png", "", "a/10.jpg"]


def test_names_come_back_whatever_letters_they_have():
    table = FileTable(NAMES, root="x/")
    assert list(table) == [f"x/{name}" for name in NAMES]
    assert [table[row] for row in range(-5, 5)] == [f"x/{name}" for name in NAMES] * 2
    assert (len(table), "x/a/10.jpg" in table) == (5, True)
    for row in (5, -6):
        with pytest.raises(IndexError):
            table[row]
    assert list(FileTable()) == []


def test_selections_share_the_names():
    table = FileTable(NAMES)
    chosen = table.select(torch.tensor([4, 0, 0])).select(torch.tensor([1, 0]))
    assert list(chosen) == [NAMES[0], NAMES[4]]
    assert chosen._names is table._names


def test_a_selection_survives_pickling():
    chosen = FileTable(NAMES).select(torch.tensor([0, 4]))
    for again in (pickle.loads(pickle.dumps(chosen)), pickle.loads(bytes(ForkingPickler.dumps(chosen)))):
        assert list(again) == [NAMES[0], NAMES[4]]


def test_only_equal_tables_have_the_same_digest():
    table = FileTable(["1", "2", "3"], root="a/")
    assert (
        table.digest()
        == FileTable(["1", "2", "3"], root="a/").digest()
        == table.select(torch.arange(2)).base_table().digest()
    )
    names = (["1", "23"], ["1", "3", "2"], ["1", "2", "3", ""])
    parts = [table.select(torch.tensor(rows)) for rows in ([0, 1], [1, 2])]
    others = [table, *parts, FileTable(table, root="b/"), *(FileTable(name, root="a/") for name in names)]
    assert len({other.digest() for other in others}) == 7


def test_files_are_read_as_they_are_now(tmp_path: Path):
    table = FileTable(["1", "2"], root=f"{tmp_path}/")
    (tmp_path / "1").write_bytes(b"one")
    before = table.stamp(0)
    assert (table.read(0), before[0]) == (b"one", 3)
    (tmp_path / "1").write_bytes(b"two")
    assert (table.read(0), table.stamp(0) != before) == (b"two", True)
    with pytest.raises(FileNotFoundError):
        table.read(1)
