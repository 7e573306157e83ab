"""The images of large folders and archives in a file, so that only the first run lists them.

The file is memory-mapped: the processes of a node share one copy of it.
"""

import hashlib
import logging
import os
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from datamodules.loading.file_table import FileTable
from datamodules.loading.file_tree import state_of
from datamodules.loading.heic import reads_heic
from datamodules.loading.image_tree import ImageTree

__all__ = ["cached_tree"]

log = logging.getLogger("lightning_recipes")

_FORMAT = 1  # Of the file, and of the rules of listing and of what is an image.
_LEAST = 10_000  # Files; fewer are listed in a tenth of a second.
_MOST_KEPT = 16  # Listings: of a million files each takes 60 MB.
# Nanoseconds that the clocks of file systems may be coarse: a later change within them leaves the same time.
_COARSE = 2 * 10**9


def _key(place: str) -> str:
    described = repr((_FORMAT, reads_heic(), place, str(Path(place).absolute())))
    return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _read(path: Path) -> ImageTree | None:
    """The tree in a file; None where there is none, it is damaged, or a folder or archive has changed since."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return None
        kept = torch.load(path, mmap=True, weights_only=True)
        if any(state_of(listed) != state for listed, state in kept["states"].items()):
            return None
        os.utime(path)
    # A missing file, and damage, which shows in errors of many kinds.
    except Exception:
        return None
    parts = {part: (FileTable.from_state(files), targets) for part, (files, targets) in kept["parts"].items()}
    return ImageTree(**{**kept, "parts": parts})


def _write(tree: ImageTree, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
        try:
            parts = {part: (files.state(), targets) for part, (files, targets) in tree.parts.items()}
            torch.save({**vars(tree), "parts": parts}, partial)
            partial.close()
            Path(partial.name).replace(path)
        except BaseException:
            Path(partial.name).unlink()
            raise
    kept = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for file in kept[:-_MOST_KEPT]:
        file.unlink()


def cached_tree(folder: Path, place: str, make: Callable[[], ImageTree]) -> ImageTree:
    """The images of a place, from a file where nothing has changed since they were listed, or listed anew.

    Only folders and archives of 10,000 files or more are kept. A file that is damaged or cannot be written costs the
    time of listing, and nothing else.

    Args:
        folder: for such files; it is made where there is none.
        place: what is listed.
        make: lists it.
    """
    path = folder / _key(place)
    if (found := _read(path)) is not None:
        return found
    begun = time.time_ns()
    tree = make()
    settled = all(changed < begun - _COARSE for _, changed, _, _ in tree.states.values())
    if tree.states and settled and sum(len(files) for files, _ in tree.parts.values()) >= _LEAST:
        try:
            _write(tree, path)
        # Of a full disk torch raises RuntimeError.
        except (OSError, RuntimeError) as error:
            log.info("the listing of %s is not kept: %s cannot be written (%s)", place, folder, error)
    return tree
