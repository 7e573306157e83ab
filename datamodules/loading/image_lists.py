"""Images by lists: ``train.txt`` and ``val.txt`` with a path and a label in each line, or CSV with columns for both."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from datamodules.errors import UserError
from datamodules.loading.file_table import FileTable
from datamodules.loading.heic import HEIC
from datamodules.loading.image_tree import (
    PARTS,
    ImageTree,
    find_parts,
    images_below,
    is_archive,
    is_image,
    open_place,
    scan_tree,
)
from datamodules.loading.text_files import NOT_UTF8, Faults, csv_rows, read_lines, text_suffix

__all__ = ["class_order", "find_images", "holds_images", "list_files", "read_lists"]

_SUFFIXES = (".txt", ".csv", ".tsv")
_PATHS = {"path", "file", "filename", "file name", "filepath", "file path", "image", "image path", "image file"}
_LABELS = {"label", "labels", "class", "class name", "target", "category"}
_SPLITS = {"split", "part", "set", "subset"}
_HEIC = "in HEIC (pip install pillow-heif to read them)"


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """The distinct names of classes, sorted; numbers as such, so that the label 10 comes after 9.

    Example:
        >>> class_order(["10", "9", "10"]), class_order(["bee", "ant"])
        (('9', '10'), ('ant', 'bee'))
    """
    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


@dataclass
class _List:
    """What a list holds: files and labels by part, and the lines that cannot be used."""

    path: Path
    part: str
    rows: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)
    read: int = 0
    faults: Faults = field(default_factory=Faults)

    def add(self, number: int, name: str, label: str, part: str) -> None:
        """Take a row, if it has a label and its file is there: relative to the list, or to the folder of its part."""
        places = (self.path.parent / name, self.path.parent / self.part / name)
        found = next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113 - Path's raises for long names.
        if not label or not name:
            self.faults.add("without a label" if name else "without a path", [number])
        elif found is None:
            self.faults.add("whose file does not exist", [number])
        elif found.suffix.lower() in HEIC and not is_image(found):
            self.faults.add(_HEIC, [number])
        else:
            self.rows.setdefault(part, []).append((number, str(found), label))


def _text_rows(lines: list[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """The path and the label of each line; the label is what follows the last space or tab."""
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            yield number, [cell.strip() for cell in line.strip().rsplit(None, 1)]


def _columns(cells: list[str]) -> dict[str, int]:
    """The columns of path, label and part, where the first row names them; nothing where it does not."""
    names = [cell.lower().replace("_", " ").replace("-", " ") for cell in cells]
    kinds = {"path": _PATHS, "label": _LABELS, "part": _SPLITS}
    found = {kind: next((i for i, name in enumerate(names) if name in of_kind), -1) for kind, of_kind in kinds.items()}
    return found if found["path"] >= 0 and found["label"] >= 0 else {}


def _read_list(path: Path, part: str) -> _List:
    listed = _List(path, part)
    lines = read_lines(path)
    rows = _text_rows(lines, listed.faults) if text_suffix(path) == ".txt" else csv_rows(lines, listed.faults)
    columns: dict[str, int] | None = None
    part_of = {name: part for part, names in PARTS.items() for name in names}
    for number, cells in rows:
        if not any(cells):
            continue
        if columns is None:
            columns = _columns(cells) if text_suffix(path) != ".txt" else {}
            if columns:
                continue
            columns = {"path": 0, "label": 1, "part": -1}
        listed.read += 1
        name, label = (cells[columns[kind]] if columns[kind] < len(cells) else "" for kind in ("path", "label"))
        of_row = part
        if columns["part"] >= 0:
            text = cells[columns["part"]].lower() if columns["part"] < len(cells) else ""
            if text not in part_of:
                listed.faults.add("of no part (train, val or test)", [number])
                continue
            of_row = part_of[text]
        listed.add(number, name, label, of_row)
    listed.read += len(listed.faults.lines.get(NOT_UTF8, ()))
    return listed


def list_files(place: Path) -> dict[str, Path]:
    """The lists of "train", "val" and "test": in a folder, or a file and, where it is train's, those beside it.

    Raises:
        UserError: there are two lists of a part.
    """
    folder, suffixes = place, list(_SUFFIXES)
    if place.is_file():
        if text_suffix(place) not in _SUFFIXES:
            return {}
        if place.stem.lower() not in PARTS["train"]:
            return {"train": place}
        folder, suffixes = place.parent, [place.suffix]
    found: dict[str, Path] = {}
    for part, names in PARTS.items():
        files = [file for name in names for suffix in suffixes if (file := folder / f"{name}{suffix}").is_file()]
        if len(files) > 1:
            raise UserError(f"{folder} holds both {files[0].name} and {files[1].name}; pass one of them, or remove one")
        if files:
            found[part] = files[0]
    return found if "train" in found else {}


def read_lists(files: dict[str, Path], on_faults: Literal["error", "skip"] | None = None) -> ImageTree:
    """The images of lists, with what is wrong in them by line.

    Args:
        files: the list of each part, at least of "train"; one with a column "split" holds several parts.
        on_faults: what to do about rows that cannot be used, the value of the parameter `on_corrupt`; None is an error
            for a data module without it.

    Raises:
        UserError: rows cannot be used, or there is nothing to train on.
    """
    lists = [_read_list(path, part) for part, path in files.items()]
    notes = []
    for one in lists:
        if one.faults:
            columns = "path and label" if text_suffix(one.path) == ".txt" else "columns such as path,label"
            hint = f"; expected {columns}, and paths relative to {one.path.parent}"
            note = one.faults.settle(on_faults or "error", str(one.path), one.read, on_faults and "on_corrupt", hint)
            notes.append(note)
    rows = {part: [row for one in lists for row in one.rows.get(part, ())] for part in PARTS}
    where = " and ".join(str(one.path) for one in lists)
    classes = class_order(label for _, _, label in rows["train"])
    if len(classes) < 2:
        what = f"images of one class only, {classes[0]}" if classes else "no image to train on"
        raise UserError(f"{where} lists {what}; expected lines such as ants/1.jpg 0, or CSV with path,label")
    numbers = {name: number for number, name in enumerate(classes)}
    parts = {}
    for part, of_part in rows.items():
        if unknown := [(number, label) for number, _, label in of_part if label not in numbers]:
            raise UserError(
                f"{where}: {part} holds classes that train has no image of, such as {unknown[0][1]} in line"
                f" {unknown[0][0]}; expected only {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            )
        if of_part:
            targets = torch.tensor([numbers[label] for _, _, label in of_part])
            parts[part] = (FileTable(file for _, file, _ in of_part), targets)
    for part in ("val", "test"):
        if both := set(parts["train"][0]) & set(parts.get(part, ((), ()))[0]):
            notes.append(f"{len(both):,} files are in train and in {part}, such as {min(both)}")
    left_out = {reason: len(at) for one in lists for reason, at in one.faults.lines.items()}
    return ImageTree(classes, parts, notes, left_out)


def find_images(place: str | Path, on_faults: Literal["error", "skip"] | None = None) -> ImageTree:
    """The images in class folders, or in lists where there are no folders train, val and test with classes.

    Raises:
        UserError: see `scan_tree` and `read_lists`.
    """
    place = Path(place)
    if place.is_file() and not is_archive(place) and (files := list_files(place)):
        return read_lists(files, on_faults)
    opened = open_place(place)
    if place.is_dir() and not find_parts(opened.folder) and (files := list_files(place)):
        return read_lists(files, on_faults)
    return scan_tree(place, opened)


def holds_images(place: Path) -> bool:
    """Whether this is a list of images, an archive, or a folder with such a list or with image files."""
    if place.is_file():
        return is_archive(place) or text_suffix(place) in _SUFFIXES
    return place.is_dir() and (bool(list_files(place)) or bool(images_below(place)[0]))
