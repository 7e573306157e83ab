"""Finds a data set of images at a path: class folders, tables, archives, NumPy files, or a pattern of file names."""

import re
from pathlib import Path
from typing import Literal

import torch

from datamodules.errors import UserError
from datamodules.images.arrays import read_npz
from datamodules.images.folders import find_parts, from_folder, images_below, open_place
from datamodules.images.labels import check_classes, class_order, same_name
from datamodules.images.source import Samples, Source
from datamodules.images.tables import Files, find_lists, from_table, tables_in
from datamodules.loading.archives import is_archive
from datamodules.loading.file_table import FileTable
from datamodules.loading.tables import TABLE_SUFFIXES
from datamodules.loading.text_files import text_members, text_suffix

_CLASS = "{class}"


def from_pattern(pattern: str) -> Source:
    """Make a data set of images whose names contain the class: "photos/{class}_*.jpg" for photos/cat_1.jpg.

    A star matches any text without a slash, and ``{class}`` matches the class.

    Raises:
        UserError: no file matches, or there are fewer than two classes.
    """
    before, _, behind = pattern.partition(_CLASS)
    # Only the folder before the first wildcard is listed. The letter keeps Path from dropping a slash at the end.
    folder = Path(f"{before.partition('*')[0]}x").parent
    prefix, suffix = (re.escape(text).replace(r"\*", "[^/]*") for text in (before, behind))
    expression = re.compile(f"{prefix}(?P<name>[^/]+?){suffix}")
    files: list[str] = []
    other_files: list[str] = []
    if folder.is_dir():
        files, other_files = images_below(folder)
    labels = {}
    for file in files:
        match = expression.fullmatch(file)
        if match:
            labels[file] = same_name(match["name"])
    expected = f"expected images with names such as {pattern.replace(_CLASS, 'cat')}"
    if not labels:
        raise UserError(f"no image in {folder} has a name like {pattern}; {expected}")
    classes = class_order(labels.values())
    check_classes({"train": classes}, f"{pattern} names", expected)
    notes = []
    unmatched = [file for file in files if file not in labels] + other_files
    if unmatched:
        notes.append(f"left out {len(unmatched):,} files in {folder} with other names, such as {unmatched[0]}")
    numbers = {name: number for number, name in enumerate(classes)}
    targets = torch.tensor([numbers[name] for name in labels.values()])
    left_out = {"with other names": len(unmatched)} if unmatched else {}
    samples = Samples(FileTable(list(labels)), targets)
    return Source(classes, {"train": samples}, folder.resolve().name, notes, left_out)


def _numpy_files(path: Path) -> list[Path]:
    """Return the NumPy files in a folder, or the path itself if it is such a file."""
    if path.suffix.lower() == ".npz":
        return [path]
    return sorted(path.glob("*.npz")) if path.is_dir() else []


def _is_table(path: Path) -> bool:
    """Return whether a path is a table, or an archive that holds a table only."""
    if not path.is_file() or text_suffix(path) not in (*TABLE_SUFFIXES, ".txt"):
        return False
    # An archive of images may begin with its table.
    return path.suffix.lower() != ".zip" or len(text_members(path)) == 1


def find_images(place: str | Path, on_faults: Literal["error", "skip"] | None = None) -> Source:
    """Find images in class folders, or in tables if there are no folders train, val and test with class folders.

    Args:
        place: a folder, an archive, a table, or a pattern of names (`from_pattern`).
        on_faults: "error" or "skip" for rows of a table that cannot be used, see `from_table`.

    Raises:
        UserError: there is nothing to train on, or rows cannot be used; see also `from_folder`.
    """
    if _CLASS in str(place):
        return from_pattern(str(place))
    place = Path(place)
    if _is_table(place):
        return from_table(place, on_faults)
    opened = open_place(place)
    top, _ = opened
    files = Files(top.path, opened)
    tables = tables_in(files)

    has_parts = bool(find_parts(top))
    if not has_parts and find_lists(tables)[0]:
        return from_table(place, on_faults, files)
    source = from_folder(place, opened)
    for path in sorted(tables):
        if text_suffix(Path(path)) in TABLE_SUFFIXES:
            source.notes.append(f"{path} is not used: the class folders are")
    return source


def holds_images(place: Path) -> bool:
    """Return whether a path is a pattern, NumPy file, table or archive, or a folder with one of these or images."""
    if _CLASS in str(place) or _numpy_files(place):
        return True
    if place.is_file():
        return is_archive(place) or _is_table(place)
    if not place.is_dir():
        return False
    tables, _ = find_lists(tables_in(Files(str(place))))
    return bool(tables or images_below(place)[0])


def find_small_images(place: Path) -> Source:
    """Find images as `find_images` does, or in a NumPy file.

    Raises:
        UserError: there are no images, or they cannot be used; the message says what was found.
    """
    numpy_files = _numpy_files(place)
    if len(numpy_files) > 1:
        raise UserError(f"{place} holds {len(numpy_files)} NumPy files; pass one of them, such as {numpy_files[0]}")
    if numpy_files:
        return read_npz(numpy_files[0])
    return find_images(place)
