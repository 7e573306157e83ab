"""Images by lists: CSV with columns for the path and the label, and perhaps the part."""

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from datamodules.errors import UserError
from datamodules.images.folders import PART_NAMES, find_parts, from_folder, images_below, open_place
from datamodules.images.labels import check_classes, class_order, same_name
from datamodules.images.source import PARTS, Samples, Source
from datamodules.loading.archives import is_archive
from datamodules.loading.file_table import FileTable
from datamodules.loading.text_files import Faults, csv_rows, iter_lines, text_suffix

_SUFFIXES = (".csv", ".tsv", ".txt")
_NAMES = {
    "path": ("path", "file", "filename", "file name", "filepath", "file path", "image", "image path"),
    "label": ("label", "class", "class name", "target", "category"),
    "part": ("split", "part", "set"),
}
"""What the columns of a table are called."""


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
            of_part[file] = number, same_name(label)
            return
        self.faults.add(reason, [number])


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
    if text_suffix(path) == ".txt":
        raise UserError(f"{path} is no table; write it as {path.stem}.csv, with a line path,label above its rows")
    listed = _List(path, part)
    rows = [(number, cells) for number, cells in csv_rows(iter_lines(path), listed.faults) if any(cells)]
    places = _find_columns(path, rows.pop(0)[1] if rows else [])
    part_names = {known: part for part, names in PART_NAMES.items() for known in names}
    listed.read = len(rows) + len(listed.faults)
    for number, cells in rows:
        cells += [""] * (max(places.values()) + 1 - len(cells))
        of_row = part if places["part"] < 0 else part_names.get(cells[places["part"]].lower(), "")
        listed.add(number, cells[places["path"]], cells[places["label"]], of_row)
    return listed


def _list_files(place: Path) -> dict[str, Path]:
    """The lists of "train", "val" and "test": in a folder, or a file and, where it is train's, those beside it."""
    folder, suffixes = place, list(_SUFFIXES)
    if place.is_file():
        if text_suffix(place) not in _SUFFIXES:
            return {}
        if place.stem.lower() not in PART_NAMES["train"]:
            return {"train": place}
        folder, suffixes = place.parent, [place.suffix]
    found: dict[str, Path] = {}
    for part, names in PART_NAMES.items():
        files = [folder / f"{name}{suffix}" for name in names for suffix in suffixes]
        files = [file for file in files if file.is_file()]
        if len(files) > 1:
            raise UserError(f"{folder} holds both {files[0].name} and {files[1].name}; pass one of them, or remove one")
        if files:
            found[part] = files[0]
    if place.is_file():  # Train.csv, too.
        found.setdefault("train", place)
    return found if "train" in found else {}


def from_table(files: dict[str, Path], on_faults: Literal["error", "skip"] | None = None) -> Source:
    """The images that tables list, with what is wrong in them by line; `on_faults` as of `find_images`."""
    lists = [_read_list(path, part) for part, path in files.items()]
    notes: list[str] = []
    left_out: Counter[str] = Counter()
    rows: dict[str, dict[str, tuple[int, str]]] = {part: {} for part in PARTS}
    for one in lists:
        if one.part == "test" and not any(one.rows.values()) and set(one.faults.lines) == {"without a label"}:
            notes.append(f"{one.path} is not used: it has no labels")
        elif one.faults:
            hint = f"; expected columns such as path,label, and paths relative to {one.path.parent}"
            note = one.faults.settle(on_faults or "error", str(one.path), one.read, on_faults and "on_corrupt", hint)
            notes.append(note)
        left_out.update({reason: len(lines) for reason, lines in one.faults.lines.items()})
        for part, of_part in one.rows.items():
            if part:
                rows[part] |= of_part
    where = " and ".join(str(one.path) for one in lists)
    classes = class_order(label for _, label in rows["train"].values())
    numbers = {name: number for number, name in enumerate(classes)}
    for of_part in rows.values():
        for line, label in of_part.values():
            if label not in numbers and classes:
                known = ", ".join(classes[:10]) + ", ..." * (len(classes) > 10)
                raise UserError(
                    f"{where}: a part holds classes that train has no image of, such as {label} in line {line};"
                    f" expected only {known}"
                )
    by_part = {part: {label for _, label in of_part.values()} for part, of_part in rows.items() if of_part}
    notes += check_classes({"train": classes, **by_part}, f"{where} lists", "expected CSV with path,label")
    parts: dict[str, Samples] = {}
    for part, of_part in rows.items():
        if part != "train" and (both := rows["train"].keys() & of_part.keys()):
            notes.append(f"{len(both):,} files are in train and in {part}, such as {min(both)}")
        if of_part:
            parts[part] = Samples(FileTable(of_part), torch.tensor([numbers[label] for _, label in of_part.values()]))
    return Source(classes, parts, notes=notes, left_out=dict(left_out))


def find_images(place: str | Path, on_faults: Literal["error", "skip"] | None = None) -> Source:
    """The images in class folders, or in lists where there are no folders train, val and test with classes.

    Args:
        on_faults: what to do about rows of a list that cannot be used, the value of the parameter `on_corrupt`; None is
            an error for a data module without it.

    Raises:
        UserError: there is nothing to train on, or rows cannot be used; see `from_folder`, too.
    """
    place = Path(place)
    if place.is_file() and (files := _list_files(place)):
        source = from_table(files, on_faults)
    else:
        opened = open_place(place)
        if place.is_dir() and not find_parts(opened[0]) and (files := _list_files(place)):
            source = from_table(files, on_faults)
        else:
            source = from_folder(place, opened)
    return replace(source, title=place.resolve().name)


def holds_images(place: Path) -> bool:
    """Whether this is a list of images, an archive, or a folder with such a list or with image files."""
    if place.is_file():
        return is_archive(place) or text_suffix(place) in _SUFFIXES
    return place.is_dir() and bool(_list_files(place) or images_below(place)[0])
