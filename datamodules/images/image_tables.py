"""Data sets of images that are listed in tables, with the columns path, label and optionally split, or other names.

Tested in `tests/datamodules/images/test_layouts.py`.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from datamodules.errors import UserError, spelled
from datamodules.images import proposals
from datamodules.images.decoding import is_image
from datamodules.images.labels import same_name
from datamodules.images.source import PART_FOLDERS, PART_WORDS, PARTS, BytesImages, Source, named_source, part_folders
from datamodules.loading.file_table import FileTable, Folder, files_below
from datamodules.loading.table_files import TABLE_SUFFIXES, Table, decoded_lines, parse_columns, read_table, text_suffix

OnFaults = Literal["error", "skip"] | None

USES = ("path", "label", "split", "train", "val", "test")
"""Uses of the columns of a table. Cells of the last three columns are yes or no."""
_NO_PART = "of no part"
_NO_LABEL = "without a label"
_NO_FILE = "whose file does not exist"
_YES_OR_NO = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_SHARD = re.compile(r"-\d+-of-\d+$")
_MEASURED = re.compile(r"[+-]?\d*\.\d*[1-9]\d*(e[+-]?\d+)?")
_TEMPLATE = re.compile(r"\{([^}]+)\}")


def _part_of_table(path: Path) -> str:
    """Return the part of a table by its name: PART.csv, PART/metadata.csv or PART-00000-of-00002.parquet; else ""."""
    stem = path.name.partition(".")[0]
    name = path.parent.name if stem == "metadata" else _SHARD.sub("", stem)
    return PART_FOLDERS.get(name.lower(), "") if text_suffix(path) in TABLE_SUFFIXES else ""


def find_tables(top: Folder) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tables of "train", "val" and "test" in a folder, named as for `_part_of_table`, and the other tables.

    Hugging Face's tables may be in a folder "data". Class folders take precedence over tables beside them.

    Raises:
        UserError: a part has two tables.
    """
    by_part: dict[str, list[str]] = {}
    others = []
    hub_folders = [folder for name, folder in top.folders.items() if name == "data" or name.lower() in PART_FOLDERS]
    for folder in [top, *hub_folders]:
        for path in sorted(folder.prefix + name for name in folder.files):
            is_hub_form = folder is top or folder.name == "data" or Path(path).name.startswith("metadata.")
            part = _part_of_table(Path(path)) if is_hub_form else ""
            if part:
                by_part.setdefault(part, []).append(path)
            elif folder is top and text_suffix(Path(path)) in TABLE_SUFFIXES:
                others.append(path)
    has_metadata = any(Path(path).name.startswith("metadata.") for paths in by_part.values() for path in paths)
    if "train" not in by_part or (part_folders(top) and not has_metadata):
        return {}, others + [path for paths in by_part.values() for path in paths]
    for paths in by_part.values():
        if len(paths) > 1 and not all(_SHARD.search(Path(path).name.partition(".")[0]) for path in paths):
            raise UserError(f"{top.path} holds both {paths[0]} and {paths[1]}; pass one of them, or remove one")
    return by_part, others


def other_parts(table: Path) -> list[str]:
    """Return the tables of other parts beside a table of "train" that was passed alone."""
    if _part_of_table(table) != "train" or table.name.startswith("metadata."):
        return []
    return [str(path) for path in sorted(table.parent.iterdir()) if _part_of_table(path) in ("val", "test")]


class _Rows:
    """Images in the rows of all tables, by part.

    Args:
        folder: folder of the data set.
        opened: tree and files of the folder or archive; None if the path is a table.
    """

    def __init__(self, folder: str, opened: tuple[Folder, FileTable] | None) -> None:
        self.folder = folder
        self.opened = opened
        files = files_below(opened[0]) if opened else {}
        self.listed = {os.path.normpath(path): number for path, number in files.items()}
        self.is_archived = opened is not None and opened[1].is_archived
        self.labels: dict[str, dict[str, str]] = {part: {} for part in PARTS}
        self.contents: dict[str, bytes] = {}
        self.notes: list[str] = []
        self.left_out: Counter[str] = Counter()

    def _find(self, name: str, table_folder: str) -> str:
        """Return the path of a file that is named relative to the table or to the data set; "" if it does not exist."""
        for folder in (table_folder, self.folder):
            path = os.path.normpath(os.path.join(folder, name))  # noqa: PTH118
            # Path.is_file raises for long names.
            if path in self.listed or (not self.is_archived and os.path.isfile(path)):  # noqa: PTH113
                return path
        return ""

    def read(self, path: str, part: str, columns: Mapping[str, str], on_faults: OnFaults) -> None:
        """Read a table whose rows belong to `part`, unless a column assigns them to another part."""
        if text_suffix(Path(path)) not in TABLE_SUFFIXES and not columns:
            raise UserError(proposals.headless(path))
        table = read_table(Path(path), columns, self._lines(path))
        num_lines = table.read
        indices = _indices(table, columns, part, list(self.listed))
        label_column = table.names[indices["label"]]
        # On Hugging Face's Hub, -1 is a missing label.
        class_names = {str(number): name for number, name in enumerate(table.class_names.get(label_column, []))}
        is_used = False
        for number, cells in table.rows:
            image = _image(table, cells, indices["path"], columns.get("path", ""))
            label = _label(table, cells, indices["label"], number)
            label = class_names.get(label, "") if class_names else label
            reason = self._add(table, _part(cells, indices, part), label, image, number)
            if reason:
                table.faults.add(reason, [number])
            is_used = is_used or not reason
        used = {index for index in indices.values() if index >= 0}
        unused = [name for index, name in enumerate(table.names) if index not in used and name not in _fields(columns)]
        if unused:
            self.notes.append(f"{path}: not used: {', '.join(map(repr, unused[:6]))}{', ...' * (len(unused) > 6)}")
        # Competitions publish test tables without labels, or with an empty label column.
        if part == "test" and not is_used and set(table.faults.lines) <= {_NO_LABEL}:
            self.notes.append(f"{path} is not used: it has no labels")
        elif table.faults:
            self.notes.append(_report(table, num_lines, on_faults))
        self.left_out.update({reason: len(numbers) for reason, numbers in table.faults.lines.items()})

    def _lines(self, path: str) -> Iterator[str | None] | None:
        """Return the lines of a table in an archive; None for a table on disk."""
        if not self.is_archived or self.opened is None:
            return None
        if text_suffix(Path(path)) == ".parquet":
            raise UserError(f"{path} cannot be read in an archive; unpack it, and pass its folder")
        return decoded_lines(io.BytesIO(self.opened[1].read(self.listed[path])), path)

    def _add(self, table: Table, part: str, label: str, image: Any, number: int) -> str:
        """Add a row, and return ""; if it cannot be used, return the reason."""
        name = "" if image is None else str(image)
        content = None
        # Hugging Face stores an image as its content and optionally its original path.
        if isinstance(image, Mapping):
            content = image.get("bytes")
            name = image.get("path") or f"row {number}"
        if not part:
            return _NO_PART
        if not label.strip():
            return _NO_LABEL
        if not name.strip():
            return "without a path"
        if content is not None:
            file = f"{table.where}/{number}/{name}"
            self.contents[file] = content
        else:
            file = self._find(name, os.path.dirname(table.where))  # noqa: PTH120
        if not file:
            return _NO_FILE
        if file in self.labels[part]:
            return "of a file that was listed before"
        self.labels[part][file] = same_name(label)
        return ""

    def images(self, part: str) -> Any:
        """Return the images of a part."""
        paths = list(self.labels[part])
        if self.contents:
            return BytesImages(self.contents, paths)
        if self.is_archived and self.opened:
            return self.opened[1].select(torch.tensor([self.listed[path] for path in paths], dtype=torch.int64))
        return FileTable(paths)


def _report(table: Table, num_lines: int, on_faults: OnFaults) -> str:
    """Return a line about the rows that are left out, or raise a UserError."""
    hints = {
        _NO_FILE: f"; expected paths relative to {os.path.dirname(table.where) or '.'}",  # noqa: PTH120
        _NO_PART: f"; expected {', '.join(PART_WORDS)} in the column of parts",
    }
    hint = "".join(text for reason, text in hints.items() if reason in table.faults.lines)
    # A data module without the parameter `on_corrupt` has no advice to pass it.
    parameter = on_faults and "on_corrupt"
    return table.faults.raise_or_report(on_faults or "error", table.where, num_lines, parameter, hint)


def _fields(columns: Mapping[str, str]) -> list[str]:
    """Return the columns in braces in a path template, such as id in "images/{id}.png"."""
    return _TEMPLATE.findall(columns.get("path", ""))


def _image(table: Table, cells: Sequence[Any], index: int, template: str) -> Any:
    """Return the image cell of a row, or the path template filled with the cells of the row."""
    if index >= 0:
        return cells[index]
    return _TEMPLATE.sub(lambda match: str(cells[table.index(match[1])]), template)


def _part(cells: Sequence[Any], indices: Mapping[str, int], part: str) -> str:
    """Return the part of a row by its part columns; `part` if there are none, "" if a cell is not a part."""
    for use in ("split", "train", "val", "test"):
        if indices.get(use, -1) < 0:
            continue
        cell = str(cells[indices[use]]).strip().lower()
        if use == "split":
            part = PART_WORDS.get(cell, "")
        elif cell not in _YES_OR_NO:
            part = ""
        elif use == "train":
            # Rows that are not for training are the test part.
            part = "train" if _YES_OR_NO[cell] else "test"
        elif _YES_OR_NO[cell]:
            part = use
    return part


def _label(table: Table, cells: Sequence[Any], index: int, number: int) -> str:
    """Return the label of a row, or "".

    Raises:
        UserError: the cell holds several labels, an object or a measured number.
    """
    label = cells[index] if index >= 0 else None
    if isinstance(label, (list, Mapping)):
        raise UserError(f"{table.where}: line {number} has the label {label!r}: several labels an image: not supported")
    # NaN, which is not equal to itself, is a missing number.
    text = "" if label is None or label != label else str(label)
    if _MEASURED.fullmatch(text):
        raise UserError(f"{table.where}: line {number} has the label {text}: measured numbers are no classes")
    return text


def _indices(table: Table, columns: Mapping[str, str], part: str, files: Sequence[str]) -> dict[str, int]:
    """Return the column index of each use, or -1.

    Raises:
        UserError: a column is missing, or an unused column may hold the parts.
    """
    stem = Path(table.where).name.partition(".")[0]
    path = "file_name" if stem == "metadata" else "image" if _SHARD.search(stem) else "path"
    names = {"path": path, "label": "label", "split": "split", **columns}
    indices = {use: table.index(name) for use, name in names.items() if use in USES}
    fields = _fields(columns)
    missing = [name for name in fields if table.index(name) < 0]
    for use, name in columns.items():
        if use in USES and name and indices[use] < 0 and not (use == "path" and fields):
            missing.append(name)
    lacks_path = not fields and indices["path"] < 0
    lacks_label = indices["label"] < 0 and part != "test"
    if not table.names:
        raise UserError(f"{table.where} is empty; expected the names of the columns, such as path,label, and rows")
    if missing or lacks_path or lacks_label:
        raise UserError(proposals.other_columns(table, names, missing, files))
    if not columns.keys() & {"split", "train", "val", "test"} and indices["split"] < 0:
        used = {*indices.values(), *map(table.index, fields)}
        proposals.check_parts(table, [index for index in range(len(table.names)) if index not in used], columns)
    return indices


def from_tables(
    data_path: Path,
    tables: Mapping[str, Sequence[str]],
    columns: str | None,
    on_faults: OnFaults,
    opened: tuple[Folder, FileTable] | None = None,
    others: Sequence[str] = (),
) -> Source:
    """Make a data set from the images in the tables of its parts.

    Args:
        data_path: path of the data set or of a table.
        tables: paths of the tables of each part.
        columns: declared columns, see `parse_columns`.
        on_faults: "error" or "skip" for unusable rows, the parameter `on_corrupt`. None raises an error, for a data
            module without that parameter.
        opened: tree and files of the folder or archive; None if the path is a table.
        others: unused tables.

    Raises:
        UserError: rows are unusable, or there are fewer than two classes; see also `read_table`.
    """
    declared = parse_columns(columns, USES)
    rows = _Rows(opened[0].path if opened else str(data_path.parent), opened)
    for part, paths in tables.items():
        for path in paths:
            rows.read(path, part, declared, on_faults)
    if others:
        whole = "" if opened else f"; pass {spelled('data_dir', str(data_path.parent))} for all parts"
        rows.notes.append(f"not used: {', '.join(others)}{whole}")
    if opened and not rows.contents:
        used = {path for labels in rows.labels.values() for path in labels}
        unlisted = [path for path in rows.listed if is_image(path) and path not in used]
        if unlisted:
            rows.notes.append(f"left out {len(unlisted):,} images that no table names, such as {unlisted[0]}")
            rows.left_out["in no table"] = len(unlisted)
    parts = {part: (rows.images(part), list(labels.values())) for part, labels in rows.labels.items() if labels}
    where = " and ".join(path for paths in tables.values() for path in paths)
    return named_source(
        parts, data_path.resolve().name, f"{where} lists", "expected path,label", rows.notes, dict(rows.left_out)
    )
