"""Images by lists: text with a path and a label in each line, or a table (CSV, JSON lines) with columns for both.

Parquet files, as Hugging Face's data sets are published, hold a file's bytes and a label in each row.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from datamodules.errors import UserError
from datamodules.images.decoding import HEIC, is_image
from datamodules.images.file_table import FileTable
from datamodules.images.folders import (
    PARTS,
    ImageTree,
    find_parts,
    images_below,
    is_archive,
    open_place,
    part_of,
    scan_tree,
)
from datamodules.loading.archives import Archive
from datamodules.loading.text_files import NOT_UTF8, Faults, column_place, csv_rows, read_lines, text_suffix

__all__ = ["check_columns", "class_order", "find_images", "holds_images", "list_files", "read_lists"]

_SUFFIXES = (".txt", ".csv", ".tsv", ".jsonl")
_METADATA = ("metadata.csv", "metadata.jsonl")
"""Hugging Face's tables, in the folder of a part."""
_NAMES = {
    "path": {"path", "file", "filename", "file name", "filepath", "file path", "image", "image path", "image file"}
    | {"image name", "image id", "img", "id code"},
    "label": {"label", "labels", "class", "class name", "target", "category"},
    "part": {"split", "part", "set", "subset", "is valid"},
}
_IN_IS_VALID = {"true": "val", "1": "val", "false": "train", "0": "train"}
_PARQUET = ({"image", "img"}, {"label", "labels", "fine_label"})
"""The columns of image and label in Parquet files."""
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
    """What a list holds: files and labels by part, the lines that cannot be used, and a note on its columns."""

    path: Path
    part: str
    rows: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)
    read: int = 0
    faults: Faults = field(default_factory=Faults)
    note: str = ""
    repeats: int = 0
    _labels: dict[tuple[str, str], str] = field(default_factory=dict)

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """The images below the list's folder by their names, with and without endings."""
        found: dict[str, list[str]] = {}
        for file in images_below(self.path.parent)[0]:
            for name in (Path(file).name, Path(file).stem):
                found.setdefault(name, []).append(file)
        return found

    def find(self, name: str) -> list[str]:
        """The files of a name: relative to the list or to its part's folder, else in any folder below the list's."""
        for place in (self.path.parent / name, self.path.parent / self.part / name):
            if os.path.isfile(place):  # noqa: PTH113 - Path's raises for long names.
                return [os.path.normpath(place)]
        files = [] if "/" in name else self._by_name.get(name, [])
        above = len(self.path.parent.parts)
        return [file for file in files if self.part in map(part_of, Path(file).parts[above:-1])] or files

    def add(self, number: int, name: str, label: str, part: str) -> None:
        """Take a row, if it has a label and its file is there."""
        files = self.find(name)
        if not label or not name:
            self.faults.add("without a label" if name else "without a path", [number])
        elif len(files) != 1:
            self.faults.add("whose name several files have" if files else "whose file does not exist", [number])
        elif Path(files[0]).suffix.lower() in HEIC and not is_image(files[0]):
            self.faults.add(_HEIC, [number])
        elif (first := self._labels.get((part, files[0]))) is None:
            self._labels[part, files[0]] = label
            self.rows.setdefault(part, []).append((number, files[0], label))
        elif first != label:
            self.faults.add("of a file with another label before", [number])
        else:
            self.repeats += 1


def _text_rows(lines: list[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """The path and the label of each line; the label is what follows the last space or tab."""
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            yield number, [cell.strip() for cell in line.strip().rsplit(None, 1)]


def _json_rows(lines: list[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """The values of each line's object, after the keys of the first as row 0."""
    keys: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            row = dict(json.loads(line or "{}"))
        except (TypeError, ValueError):
            faults.add("without a JSON object", [number])
            continue
        if row and not keys:
            keys = list(row)
            yield 0, keys
        yield number, ["" if row.get(key) is None else str(row[key]) for key in keys]


def _find_columns(
    listed: _List, rows: list[tuple[int, list[str]]], columns: Sequence[str] | None
) -> tuple[dict[str, int], bool]:
    """The places of path, label and part, by their names or by what they hold; and whether the first row is a header.

    It is one if it names columns so, or if it holds neither an image nor a label of another row.
    """
    number, names = rows[0]
    known = ["" if is_image(name) else name.lower().replace("_", " ").replace("-", " ") for name in names]
    places = {kind: next((i for i, name in enumerate(known) if name in _NAMES[kind]), -1) for kind in _NAMES}
    if columns is not None:
        places["path"], places["label"] = (column_place(column, names, listed.path) for column in columns)
    is_known = min(places["path"], places["label"]) >= 0
    is_named = is_known and not all(column.isdigit() for column in columns or known)
    others = [i for i in range(len(names)) if i not in places.values()]
    if places["path"] < 0:
        by_ending = [i for i in others if any(is_image(cells[i]) for _, cells in rows[:100])]
        candidates = by_ending or others[: 1 if places["label"] < 0 else None]
        places["path"] = candidates[0] if len(candidates) == 1 else -1
        others = [i for i in others if i != places["path"]]
    if places["label"] < 0 and len(others) == 1:
        places["label"] = others[0]
    if min(places["path"], places["label"]) < 0:
        some = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
        likely = f"{names[max(0, places['path'])]},{names[others[-1] if others else -1]}"
        raise UserError(
            f"{listed.path}: which of the columns {some} hold the image and the label is not clear;"
            f" pass the two by their names or numbers, such as columns={likely!r}"
        )
    path, label = (names[places[kind]] for kind in ("path", "label"))
    labels = {"", *(cells[places["label"]] for _, cells in rows[1:])}
    is_header = not number or is_named or not (label in labels or is_image(path) or listed.find(path))
    if is_header and not is_known:
        listed.note = f"{listed.path}: the column of images is {path}, that of labels {label}"
    return places, is_header


def _read_list(path: Path, part: str, columns: Sequence[str] | None) -> _List:
    listed = _List(path, part)
    read = {".txt": _text_rows, ".jsonl": _json_rows}.get(text_suffix(path), csv_rows)
    rows = [(number, cells) for number, cells in read(read_lines(path), listed.faults) if any(cells)]
    width = max([2, *(len(cells) for _, cells in rows)])
    rows = [(number, cells + [""] * (width - len(cells))) for number, cells in rows]
    places, has_header = _find_columns(listed, rows, columns) if rows else ({"part": -1}, False)
    part_names = {known: part for part, names in PARTS.items() for known in names}
    if has_header and rows.pop(0)[1][places["part"]].lower().startswith("is"):
        part_names = _IN_IS_VALID
    listed.read = len(rows) + len(listed.faults)
    for number, cells in rows:
        of_row = part if places["part"] < 0 else part_names.get(cells[places["part"]].lower(), "")
        if of_row:
            listed.add(number, cells[places["path"]], cells[places["label"]], of_row)
        else:
            listed.faults.add("of no part (train, val or test)", [number])
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
    # Beside folders of classes it is about something else.
    is_flat = place.is_dir() and sum(inner.is_dir() for inner in place.iterdir()) < 2
    for part, names in PARTS.items():
        inner = ("", *names) if is_flat and part == "train" else names
        files = [folder / f"{name}{suffix}" for name in names for suffix in suffixes]
        files += [folder / name / table for name in inner for table in _METADATA if place.is_dir()]
        files = [file for file in files if file.is_file()]
        if len(files) > 1:
            raise UserError(f"{folder} holds both {files[0].name} and {files[1].name}; pass one of them, or remove one")
        if files:
            found[part] = files[0]
    if place.is_file():  # Train.csv, too.
        found.setdefault("train", place)
    return found if "train" in found else {}


def read_lists(
    files: dict[str, Path], on_faults: Literal["error", "skip"] | None = None, columns: Sequence[str] | None = None
) -> ImageTree:
    """The images of lists, with what is wrong in them by line.

    Args:
        files: the list of each part, at least of "train"; one with a column "split" holds several parts.
        on_faults: what to do about rows that cannot be used, the value of the parameter `on_corrupt`; None is an error
            for a data module without it.
        columns: of path and label in a table, by name or by number from 1; by default their names or contents tell.

    Raises:
        UserError: rows cannot be used, or there is nothing to train on.
    """
    lists = [_read_list(path, part, columns) for part, path in files.items()]
    notes = [one.note for one in lists if one.note]
    notes += [f"{one.path}: {one.repeats:,} lines repeat a file and count once" for one in lists if one.repeats]
    for one in lists:
        if one.part == "test" and not one.rows and set(one.faults.lines) == {"without a label"}:
            notes.append(f"{one.path} is not used: it has no labels")
        elif one.faults:
            expected = "path and label" if text_suffix(one.path) == ".txt" else "columns such as path,label"
            hint = f"; expected {expected}, and paths relative to {one.path.parent}"
            note = one.faults.settle(on_faults or "error", str(one.path), one.read, on_faults and "on_corrupt", hint)
            notes.append(note)
    rows = {part: [row for one in lists for row in one.rows.get(part, ())] for part in PARTS}
    left_out = dict(Counter(reason for one in lists for reason, at in one.faults.lines.items() for _ in at))
    parts = {part: (FileTable(file for _, file, _ in of_part), of_part) for part, of_part in rows.items()}
    for part in ("val", "test"):
        if both := set(parts["train"][0]) & set(parts[part][0]):
            notes.append(f"{len(both):,} files are in train and in {part}, such as {min(both)}")
    labels = {part: (table, [(n, label) for n, _, label in of_part]) for part, (table, of_part) in parts.items()}
    return _as_tree(" and ".join(str(one.path) for one in lists), labels, notes, left_out)


def _as_tree(
    where: str, parts: dict[str, tuple[FileTable, list[tuple[int, str]]]], notes: list[str], left_out: dict[str, int]
) -> ImageTree:
    """Files with the numbers of their lines and their labels, by part."""
    of_train = [label for _, label in parts["train"][1]]
    classes = class_order(of_train)
    if len(classes) < 2:
        what = f"images of one class only, {classes[0]}" if classes else "no image to train on"
        raise UserError(f"{where} lists {what}; expected lines such as ants/1.jpg 0, or CSV with path,label")
    if len(classes) > max(10, len(of_train) * 3 // 4):
        raise UserError(
            f"{where} lists {len(classes):,} different labels for {len(of_train):,} images, such as {of_train[0]};"
            " expected two images or more of a class: pass the columns of path and label, such as columns='path,label'"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    found = {}
    for part, (files, labels) in parts.items():
        if unknown := [(line, label) for line, label in labels if label not in numbers]:
            raise UserError(
                f"{where}: {part} holds classes that train has no image of, such as {unknown[0][1]} in line"
                f" {unknown[0][0]}; expected only {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            )
        if labels:
            found[part] = (files, torch.tensor([numbers[label] for _, label in labels]))
    return ImageTree(classes, found, notes, left_out)


class _ParquetImages(Archive):
    """The bytes of images in memory, by number."""

    def __init__(self, file: Path, images: Any) -> None:
        super().__init__(str(file), torch.empty(0, 5), (0, file.stat().st_mtime_ns))
        self._images = images

    def size(self, row: int) -> int:
        """Bytes that a file holds."""
        return len(self.read(row))

    def read(self, row: int) -> bytes:
        """What a file holds."""
        image = self._images[row].as_py()
        return bytes(image["bytes"] if isinstance(image, dict) else image)


def _parquet_files(place: Path) -> dict[str, list[Path]]:
    """The files of each part, by their names, in a folder that has no other than data; or a file alone."""
    if place.suffix == ".parquet":
        return {"train": [place]}
    found: dict[str, list[Path]] = {}
    if any(inner.is_dir() and inner.name != "data" and inner.name[0] != "." for inner in place.glob("*")):
        return found
    for file in sorted([*place.glob("*.parquet"), *place.glob("data/*.parquet")]):
        found.setdefault(part_of(file.name) or "train", []).append(file)
    return found


def _read_parquet(files: dict[str, list[Path]]) -> tuple[dict[str, tuple[FileTable, list[tuple[int, str]]]], int]:
    """The images of each part, in memory, and the numbers and labels of their rows; and how many have no label.

    Raises:
        UserError: pyarrow is not installed, a file is damaged, or it has other columns.
    """
    parts = {part: (FileTable(), list[tuple[int, str]]()) for part in PARTS}
    unlabelled = 0
    for part, of_part in files.items():
        try:
            import pyarrow.parquet

            table = pyarrow.concat_tables(map(pyarrow.parquet.read_table, of_part))
        except ImportError as error:
            raise UserError(f"pyarrow reads {of_part[0]}, and is not installed: pip install pyarrow") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{' and '.join(map(str, of_part))} cannot be read: {error}") from error
        image, label = ([name for name in table.column_names if name in known] for known in _PARQUET)
        if len(image) != 1 or len(label) != 1:
            found = ", ".join(table.column_names)
            raise UserError(f"{of_part[0]} has the columns {found}; expected one called image, and one called label")
        about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        names = about.get("features", {}).get(label[0], {}).get("names")
        labels = table[label[0]].to_pylist()
        # -1 is how test sets are published without their labels.
        rows = [(row, names[y] if names else str(y)) for row, y in enumerate(labels) if y not in (None, -1)]
        unlabelled += len(labels) - len(rows)
        every = FileTable(
            map(str, range(len(labels))), f"{of_part[0].parent}/{part}/", _ParquetImages(of_part[0], table[image[0]])
        )
        parts[part] = (every.select(torch.tensor([row for row, _ in rows], dtype=torch.int64)), rows)
    return parts, unlabelled


def check_columns(columns: Sequence[str] | str | None, label_pattern: str | None) -> list[str] | None:
    """Check parameters that say where the labels are, and give ``columns`` as a list."""
    try:
        groups = re.compile(label_pattern or "()").groups
    except re.error:
        groups = -1
    if groups != 1:
        raise UserError(f"label_pattern={label_pattern!r}: expected a regular expression with one group, as '^(.+)_'")
    if columns is not None:
        columns = [str(column) for column in (columns.split(",") if isinstance(columns, str) else columns)]
        if len(columns) != 2:
            raise UserError(f"columns={columns}: expected the two of path and label, such as columns='image,label'")
    return columns


def find_images(
    place: str | Path,
    on_faults: Literal["error", "skip"] | None = None,
    columns: Sequence[str] | None = None,
    label_pattern: str | None = None,
) -> ImageTree:
    """The images in class folders, or in lists where there are no folders train, val and test with classes.

    Args:
        on_faults: see `read_lists`.
        columns: see `read_lists`.
        label_pattern: a regular expression with one group, the class in a file's name; folders are no classes then.

    Raises:
        UserError: see `scan_tree` and `read_lists`.
    """
    place = Path(place)
    if place.is_file() and not (is_archive(place) or label_pattern) and (files := list_files(place)):
        return read_lists(files, on_faults, columns)
    if shards := _parquet_files(place):
        parts, unlabelled = _read_parquet(shards)
        return _as_tree(str(place), parts, [], {"without a label": unlabelled} if unlabelled else {})
    opened = open_place(place)
    if place.is_dir() and not (label_pattern or find_parts(opened[0])) and (files := list_files(place)):
        return read_lists(files, on_faults, columns)
    if columns:
        raise UserError(
            f"columns={','.join(columns)!r} are those of a table, and {place} is none; pass data_dir='train.csv'"
        )
    return scan_tree(place, opened, label_pattern)


def holds_images(place: Path) -> bool:
    """Whether this is a list of images, an archive, or a folder with such a list or with image files."""
    if place.is_file():
        return is_archive(place) or text_suffix(place) in (*_SUFFIXES, ".parquet")
    return place.is_dir() and bool(list_files(place) or _parquet_files(place) or images_below(place)[0])
