"""Images wherever people have them: class folders, tables, archives, NumPy files, or names that hold the class."""

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
    """Images whose class stands in their names, such as "photos/{class}_*.jpg" for photos/cat_1.jpg.

    A star stands for any text within a name, and ``{class}`` for the class.

    Raises:
        UserError: no file has such a name, or there are fewer than two classes.
    """
    before, _, behind = pattern.partition(_CLASS)
    # Names are matched below the last folder that the pattern spells out.
    folder = Path(f"{before.partition('*')[0]}x").parent
    forms = [re.escape(text).replace(r"\*", "[^/]*") for text in (before, behind)]
    expression = re.compile(f"{forms[0]}(?P<name>[^/]+?){forms[1]}")
    files: list[str] = []
    others: list[str] = []
    if folder.is_dir():
        files, others = images_below(folder)
    labels = {}
    for file in files:
        found = expression.fullmatch(file)
        if found:
            labels[file] = same_name(found["name"])
    expected = f"expected images with names such as {pattern.replace(_CLASS, 'cat')}"
    if not labels:
        raise UserError(f"no image in {folder} has a name like {pattern}; {expected}")
    classes = class_order(labels.values())
    check_classes({"train": classes}, f"{pattern} names", expected)
    notes = []
    rest = [file for file in files if file not in labels] + others
    if rest:
        notes.append(f"left out {len(rest):,} files in {folder} with other names, such as {rest[0]}")
    numbers = {name: number for number, name in enumerate(classes)}
    targets = torch.tensor([numbers[name] for name in labels.values()])
    left_out = {"with other names": len(rest)} if rest else {}
    return Source(classes, {"train": Samples(FileTable(list(labels)), targets)}, folder.resolve().name, notes, left_out)


def _arrays(place: Path) -> list[Path]:
    """The NumPy files in a folder, or such a file itself."""
    if place.suffix.lower() == ".npz":
        return [place]
    return sorted(place.glob("*.npz")) if place.is_dir() else []


def _is_table(place: Path) -> bool:
    """Whether this is a table, or an archive of one alone."""
    if not place.is_file() or text_suffix(place) not in (*TABLE_SUFFIXES, ".txt"):
        return False
    return place.suffix.lower() != ".zip" or len(text_members(place)) == 1


def find_images(place: str | Path, on_faults: Literal["error", "skip"] | None = None) -> Source:
    """The images in class folders, or in tables where there are no folders train, val and test with classes.

    Args:
        place: a folder, an archive, a table, or a pattern of names (`from_pattern`).
        on_faults: what to do about rows of a table that cannot be used, see `from_table`.

    Raises:
        UserError: there is nothing to train on, or rows cannot be used; see also `from_folder`.
    """
    if _CLASS in str(place):
        return from_pattern(str(place))
    place = Path(place)
    if _is_table(place):
        return from_table(place, on_faults)
    opened = open_place(place)
    files = Files(opened[0].path, opened)
    beside = tables_in(files)
    has_parts = bool(find_parts(opened[0]))
    if not has_parts and find_lists(beside)[0]:
        return from_table(place, on_faults, files)
    source = from_folder(place, opened)
    for path in sorted(beside):
        if text_suffix(Path(path)) in TABLE_SUFFIXES:
            source.notes.append(f"{path} is not used: the class folders are")
    return source


def holds_images(place: Path) -> bool:
    """Whether this is a NumPy file, a table of images, an archive, or a folder that holds one, or image files."""
    if _CLASS in str(place) or _arrays(place):
        return True
    if place.is_file():
        return is_archive(place) or _is_table(place)
    return place.is_dir() and bool(find_lists(tables_in(Files(str(place))))[0] or images_below(place)[0])


def find_small_images(place: Path) -> Source:
    """As `find_images`, and the images of a NumPy file.

    Raises:
        UserError: there are none, or what is there cannot be used; the message says what was found.
    """
    archives = _arrays(place)
    if len(archives) > 1:
        raise UserError(f"{place} holds {len(archives)} NumPy files; pass one of them, such as {archives[0]}")
    return read_npz(archives[0]) if archives else find_images(place)
