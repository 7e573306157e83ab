"""Lines about the data can be written wherever a log goes."""

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from datamodules import notes
from datamodules.images.pixel_cache import PixelCache
from datamodules.loading.download import file_lock
from datamodules.notes import warn


def test_a_name_in_another_encoding_is_escaped(caplog) -> None:
    warn("two files: %s and %s", "\udce9.png", "é.png")
    assert caplog.messages == ["two files: \\udce9.png and é.png"]


def _hold_file_lock(path: Path) -> AbstractContextManager[Any]:
    return FileLock(path)


@contextmanager
def _hold_cache(path: Path) -> Iterator[None]:
    with (path / "lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_lock(path: Path) -> None:
    with file_lock(path):
        pass


def _fill_cache(path: Path) -> None:
    PixelCache(path, 1, 1000).put(0, 1, torch.zeros(3, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("hold", "wait", "name"), [(_hold_file_lock, _open_lock, "a.lock"), (_hold_cache, _fill_cache, "cache")]
)
def test_who_waits_for_a_lock_names_it(hold, wait, name, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(notes, "PATIENCE", 0.05)
    path = tmp_path / name
    wait(path)
    assert not caplog.messages
    waiting = threading.Thread(target=wait, args=(path,))
    with caplog.at_level("WARNING", "lightning_recipes"):
        with hold(path):
            waiting.start()
            end = time.monotonic() + 120
            while not caplog.messages and time.monotonic() < end:
                time.sleep(0.01)
            assert waiting.is_alive()
        waiting.join(120)
    assert not waiting.is_alive()
    (line,) = caplog.messages
    assert f"waiting for another process, which holds {path}" in line
