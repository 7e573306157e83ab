"""Images by lists: text with a path and a label in each line, or CSV with columns for both, and perhaps the part."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from datamodules.errors import UserError
from datamodules.images.file_table import FileTable
from datamodules.images.folders import PARTS, ImageTree, find_parts, images_below, is_archive, open_place, scan_tree
from datamodules.loading.text_files import NOT_UTF8, Faults, csv_rows, iter_lines, text_suffix

_SUFFIXES = (".txt", ".csv", ".tsv")
_NAMES = {
    "path": ("path", "file", "filename", "file name", "filepath", "file path", "image", "image path"),
    "label": ("label", "class", "class name", "target", "category"),
    "part": ("split", "part", "set"),
}
"""What the columns of a table are called."""


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
    """What a list holds: lines, files and labels by part, and the lines that cannot be used."""

    path: Path
    part: str
    rows: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    read: int = 0
    faults: Faults = field(default_factory=Faults)

    def add(self, number: int, name: str, label: str, part: str) -> None:
        """Take a row whose file is there, relative to the list or to its part's folder, if it has a label."""
        of_part = self.rows.setdefault(part, {})
        places = (self.path.parent / name, self.path.parent / self.part / name)
        file = next((os.path.normpath(place) for place in places if os.path.isfile(place)), "")  # noqa: PTH113 - Path's raises for long names.
        if not part:
            reason = "of no part (train, val or test)"
        elif not label or not name:
            reason = "without a label" if name else "without a path"
        elif not file:
            reason = "whose file does not exist"
        elif file in of_part:
            reason = "of a file that was listed before"
        else:
            of_part[file] = number, label
            return
        self.faults.add(reason, [number])


def _text_rows(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """The path and the label of each line; the label is what follows the last space or tab."""
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            yield number, [cell.strip() for cell in line.strip().rsplit(None, 1)]


def _find_columns(path: Path, names: list[str]) -> dict[str, int]:
    """The places of path, label and part in a table; that of a column that there is not is -1."""
    known = [name.lower().replace("_", " ").replace("-", " ") for name in names]
    places = {kind: next((i for i, name in enumerate(known) if name in _NAMES[kind]), -1) for kind in _NAMES}
    if min(places["path"], places["label"]) < 0:
        paths, labels = (", ".join(_NAMES[kind]) for kind in ("path", "label"))
        raise UserError(
            f"{path}: the first line is {','.join(names[:8])[:200]}; expected the names of the columns, of which one is"
            f" called {paths}, and one {labels}"
        )
    return places


def _read_list(path: Path, part: str) -> _List:
    listed = _List(path, part)
    is_table = text_suffix(path) != ".txt"
    found = (csv_rows if is_table else _text_rows)(iter_lines(path), listed.faults)
    rows = [(number, cells) for number, cells in found if any(cells)]
    places = _find_columns(path, rows.pop(0)[1]) if is_table and rows else {"path": 0, "label": 1, "part": -1}
    part_names = {known: part for part, names in PARTS.items() for known in names}
    listed.read = len(rows) + len(listed.faults)
    for number, cells in rows:
        cells += [""] * (max(places.values()) + 1 - len(cells))
        of_row = part if places["part"] < 0 else part_names.get(cells[places["part"]].lower(), "")
        listed.add(number, cells[places["path"]], cells[places["label"]], of_row)
    return listed


def _list_files(place: Path) -> dict[str, Path]:
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
        files = [folder / f"{name}{suffix}" for name in names for suffix in suffixes]
        files = [file for file in files if file.is_file()]
        if len(files) > 1:
            raise UserError(f"{folder} holds both {files[0].name} and {files[1].name}; pass one of them, or remove one")
        if files:
            found[part] = files[0]
    if place.is_file():  # Train.csv, too.
        found.setdefault("train", place)
    return found if "train" in found else {}


def _read_lists(files: dict[str, Path], on_faults: Literal["error", "skip"] | None = None) -> ImageTree:
    """The images of lists, with what is wrong in them by line.

    Args:
        files: the list of each part, at least of "train"; one with a column "split" holds several parts.
        on_faults: what to do about rows that cannot be used, the value of the parameter `on_corrupt`; None is an error
            for a data module without it.

    Raises:
        UserError: rows cannot be used, or there is nothing to train on.
    """
    lists, notes = [_read_list(path, part) for part, path in files.items()], []
    for one in lists:
        if one.part == "test" and not any(one.rows.values()) and set(one.faults.lines) == {"without a label"}:
            notes.append(f"{one.path} is not used: it has no labels")
        elif one.faults:
            expected = "path and label" if text_suffix(one.path) == ".txt" else "columns such as path,label"
            hint = f"; expected {expected}, and paths relative to {one.path.parent}"
            note = one.faults.settle(on_faults or "error", str(one.path), one.read, on_faults and "on_corrupt", hint)
            notes.append(note)
    where, left_out = " and ".join(str(one.path) for one in lists), Counter[str]()
    for one in lists:
        left_out.update({reason: len(at) for reason, at in one.faults.lines.items()})
    rows = {part: {file: row for one in lists for file, row in one.rows.get(part, {}).items()} for part in PARTS}
    classes = class_order(label for _, label in rows["train"].values())
    if len(classes) < 2:
        what = f"images of one class only, {classes[0]}" if classes else "no image to train on"
        raise UserError(f"{where} lists {what}; expected lines such as ants/1.jpg 0, or CSV with path,label")
    numbers, parts = {name: number for number, name in enumerate(classes)}, {}
    for part, of_part in rows.items():
        if unknown := [(line, label) for line, label in of_part.values() if label not in numbers]:
            raise UserError(
                f"{where}: {part} holds classes that train has no image of, such as {unknown[0][1]} in line"
                f" {unknown[0][0]}; expected only {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            )
        if part != "train" and (both := rows["train"].keys() & of_part.keys()):
            notes.append(f"{len(both):,} files are in train and in {part}, such as {min(both)}")
        if of_part:
            parts[part] = FileTable(of_part), torch.tensor([numbers[label] for _, label in of_part.values()])
    return ImageTree(classes, parts, notes, dict(left_out))


def find_images(place: str | Path, on_faults: Literal["error", "skip"] | None = None) -> ImageTree:
    """The images in class folders, or in lists where there are no folders train, val and test with classes.

    Args:
        on_faults: see `_read_lists`.

    Raises:
        UserError: see `scan_tree` and `_read_lists`.
    """
    place = Path(place)
    if place.is_file() and (files := _list_files(place)):
        return _read_lists(files, on_faults)
    opened = open_place(place)
    if place.is_dir() and not find_parts(opened[0]) and (files := _list_files(place)):
        return _read_lists(files, on_faults)
    return scan_tree(place, *opened)


def holds_images(place: Path) -> bool:
    """Whether this is a list of images, an archive, or a folder with such a list or with image files."""
    if place.is_file():
        return is_archive(place) or text_suffix(place) in _SUFFIXES
    return place.is_dir() and bool(_list_files(place) or images_below(place)[0])
