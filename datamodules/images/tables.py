"""Makes a data set of images that tables list, with columns of paths, labels and optionally parts."""

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from datamodules.errors import UserError
from datamodules.images.columns import Columns, find_columns, label_names
from datamodules.images.decoding import is_image
from datamodules.images.folders import PART_NAMES, images_below, part_of
from datamodules.images.labels import check_classes, class_order, same_name
from datamodules.images.leaks import note_shared_images
from datamodules.images.source import PARTS, BytesImages, Samples, Source
from datamodules.loading.file_table import FileTable, Folder, files_below
from datamodules.loading.tables import TABLE_SUFFIXES, describe_columns, read_table
from datamodules.loading.text_files import Faults, decoded_lines, text_suffix

_SUFFIXES = (*TABLE_SUFFIXES, ".txt")
# Formats in which a part may have several files, as Hugging Face stores large data sets.
_SHARDED = (".parquet", ".jsonl", ".ndjson")
_WEAKER_NAMES = {"dev": "val", "eval": "val"}
_UNKNOWN_FILE = "whose file does not exist"
_SEVERAL_FILES = "of a name that several files have"


class Files:
    """Lookup of the image files that tables name, on disk or in an archive.

    Args:
        folder: folder of the tables, as it is written in messages.
        opened: tree and files of the folder or archive; None lists a folder on disk when it is needed.
    """

    def __init__(self, folder: str, opened: tuple[Folder, FileTable] | None = None) -> None:
        self.folder = folder
        self._opened = opened
        self.archived: dict[str, int] | None = None
        self.by_stem = 0
        if opened is not None and opened[1].is_archived:
            self.archived = files_below(opened[0])

    def _exists(self, path: str) -> bool:
        if self.archived is not None:
            return path in self.archived
        return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for long names.

    @cached_property
    def _by_base(self) -> dict[str, list[str]]:
        """Paths of the images in the folder, by name with and without suffix."""
        images = []
        if self.archived is not None:
            images = [path for path in self.archived if is_image(path)]
        else:
            # In a folder that cannot be listed, no file can be read either, which is reported for each row.
            with suppress(UserError):
                images = images_below(self.folder)[0]
        paths: dict[str, list[str]] = {}
        for path in images:
            base = os.path.basename(path)  # noqa: PTH119
            for name in {base, os.path.splitext(base)[0]}:  # noqa: PTH122
                paths.setdefault(name, []).append(path)
        return paths

    def find(self, name: str, part: str) -> tuple[str, str]:
        """Return the path of the file that a cell names and "", or "" and the reason why there is none.

        The name is relative to the folder of the table or of the part. Otherwise all folders below are searched, for
        the name with or without suffix.
        """
        for spelled in (name, name.replace("\\", "/")):
            for folder in (self.folder, os.path.join(self.folder, part)):  # noqa: PTH118
                path = os.path.normpath(os.path.join(folder, spelled))  # noqa: PTH118
                if self._exists(path):
                    return path, ""
        spelled = name.replace("\\", "/").removeprefix("./")
        matches = []
        for path in self._by_base.get(spelled.rpartition("/")[2], []):
            if f"{os.path.splitext(path)[0]}/".endswith(f"/{spelled}/") or path.endswith(f"/{spelled}"):  # noqa: PTH122
                matches.append(path)
        if len(matches) > 1:
            # Of train/1.png and test/1.png, the file in the folder of the row's part is meant.
            in_part = [path for path in matches if part in map(part_of, path[len(self.folder) :].split("/")[:-1])]
            matches = in_part or matches
        if len(matches) == 1:
            self.by_stem += 1
            return matches[0], ""
        return "", _SEVERAL_FILES if matches else _UNKNOWN_FILE

    def lines(self, path: str) -> Iterator[str | None] | None:
        """Return the lines of a table in an archive, or None for a table on disk."""
        if self.archived is None or self._opened is None:
            return None
        if text_suffix(Path(path)) == ".parquet":
            raise UserError(f"{path} cannot be read in an archive; unpack it, and pass its folder")
        content = self._opened[1].read(self.archived[path])
        return decoded_lines(io.BytesIO(content), path)

    def table(self, paths: Sequence[str]) -> FileTable:
        """Return the table of the files at these paths, to read images from."""
        if self.archived is None or self._opened is None:
            return FileTable(paths)
        numbers = [self.archived[path] for path in paths]
        return self._opened[1].select(torch.tensor(numbers, dtype=torch.int64))

    def unlisted(self, used: Iterable[str]) -> list[str]:
        """Return the images that no row names."""
        images = {path for paths in self._by_base.values() for path in paths}
        return sorted(images.difference(used))


@dataclass
class _Listed:
    """Contents of a table: for each part, line number and label by file; contents of files; and faulty lines."""

    path: str
    part: str
    rows: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    read: int = 0
    faults: Faults = field(default_factory=Faults)
    has_labels: bool = True
    note: str = ""


def _read_list(path: str, part: str, files: Files) -> _Listed:
    """Read a table of one part, or of the parts in its column of parts."""
    if text_suffix(Path(path)) == ".txt":
        stem = Path(path).stem
        raise UserError(f"{path} is no table; write it as {stem}.csv, with a line path,label above its rows")
    table = read_table(Path(path), files.lines(path))
    if not table.names:
        raise UserError(f"{path} is empty; expected the names of the columns, such as path,label, and rows")
    columns = find_columns(table, may_lack_labels=part == "test")
    listed = _Listed(path, part, read=table.read, faults=table.faults, has_labels=columns.label >= 0)
    listed.note = describe_columns(table, columns.names(table), columns.guessed)
    if listed.has_labels:
        names = label_names(table, columns)
        for number, cells in table.rows:
            _add_row(listed, files, columns, number, cells, names)
    return listed


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _add_row(
    listed: _Listed, files: Files, columns: Columns, number: int, cells: Sequence[Any], names: Mapping[str, str]
) -> None:
    """Add a row with its label, part and file, or add the reason why it cannot be used."""
    part = listed.part if columns.part is None else columns.part_of_cell(cells[columns.part])
    label = _text(cells[columns.label])
    label = names.get(label, label)
    image = cells[columns.path]
    content = None
    # Hugging Face stores an image as its content and optionally its former path.
    if isinstance(image, Mapping):
        content = image.get("bytes")
        image = image.get("path") or f"row {number}"
    name = _text(image)
    reason = ""
    file = ""
    if not part:
        reason = "of no part (train, val or test)"
    elif not label.strip():
        reason = "without a label"
    elif not name.strip():
        reason = "without a path"
    elif content is not None:
        file = f"{listed.path}/{number}/{name}"
    else:
        file, reason = files.find(name, listed.part or part)
    if not reason and file in listed.rows.get(part, {}):
        reason = "of a file that was listed before"
    if reason:
        listed.faults.add(reason, [number])
        return
    listed.rows.setdefault(part, {})[file] = number, same_name(label)
    if content is not None:
        listed.contents[file] = content


def find_lists(paths: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tables of "train", "val" and "test" among files, by their names in any case, and the other tables.

    Raises:
        UserError: a part has two tables.
    """
    strong: dict[str, list[str]] = {part: [] for part in PARTS}
    weak: dict[str, list[str]] = {part: [] for part in PARTS}
    other_tables: list[str] = []
    for path in sorted(paths):
        suffix = text_suffix(Path(path))
        if suffix not in _SUFFIXES:
            continue
        stem = Path(path).name.lower().partition(".")[0]
        part = next((part for part, names in PART_NAMES.items() if stem in names), "")
        if not part and suffix in _SHARDED:
            part = part_of(stem)
        if stem == "metadata":
            part = part_of(Path(path).parent.name)
        if part:
            strong[part].append(path)
        elif stem in _WEAKER_NAMES:
            weak[_WEAKER_NAMES[stem]].append(path)
        elif suffix != ".txt":
            other_tables.append(path)
    by_part: dict[str, list[str]] = {}
    for part in PARTS:
        tables = strong[part] or weak[part]
        if strong[part]:
            other_tables += weak[part]
        sharded = all(text_suffix(Path(path)) in _SHARDED for path in tables)
        if len(tables) > 1 and not sharded:
            folder = Path(tables[0]).parent
            first, second = (Path(path).name for path in tables[:2])
            raise UserError(f"{folder} holds both {first} and {second}; pass one of them, or remove one")
        if tables:
            by_part[part] = tables
    if "train" not in by_part:
        return {}, [*other_tables, *(path for tables in by_part.values() for path in tables)]
    return by_part, other_tables


def _beside(table: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Return the tables of all parts for a table: beside train's, those of val and test; and the unused tables."""
    suffix = text_suffix(table)
    other_tables = [str(path) for path in table.parent.iterdir() if path != table and text_suffix(path) == suffix]
    if table.name.lower().partition(".")[0] in PART_NAMES["train"]:
        by_part, unused = find_lists([str(table), *other_tables])
        return by_part, unused

    def may_be_a_part(path: str) -> bool:
        stem = Path(path).name.partition(".")[0]
        return bool(part_of(stem)) or stem.lower() in _WEAKER_NAMES

    return {"train": [str(table)]}, [path for path in other_tables if may_be_a_part(path)]


def from_table(
    place: str | Path, on_faults: Literal["error", "skip"] | None = None, files: Files | None = None
) -> Source:
    """Make a data set of the images in a table and in the tables of other parts beside it, or in a folder's tables.

    Args:
        place: a table, or a folder with train.csv and perhaps val.csv and test.csv.
        on_faults: "error" or "skip" for rows that cannot be used: the parameter `on_corrupt`. None raises an error for
            a data module without that parameter.
        files: files of an archive, or of a folder that was listed before.

    Raises:
        UserError: rows cannot be used, or there are no classes to train on; see also `read_table`.
    """
    place = Path(place)
    if files is None and place.is_file():
        tables, unused = _beside(place)
        files = Files(str(place.parent))
        is_folder = False
    else:
        files = files or Files(str(place))
        tables, unused = find_lists(tables_in(files))
        is_folder = True
    lists = [_read_list(path, part, files) for part, paths in tables.items() for path in paths]
    notes = [listed.note for listed in lists if listed.note]
    left_out: Counter[str] = Counter()
    rows: dict[str, dict[str, tuple[int, str]]] = {part: {} for part in PARTS}
    contents: dict[str, bytes] = {}
    for listed in lists:
        # Competitions publish test tables without labels, or with an empty column of labels.
        is_empty_test = listed.part == "test" and not any(listed.rows.values())
        if not listed.has_labels or (is_empty_test and set(listed.faults.lines) == {"without a label"}):
            notes.append(f"{listed.path} is not used: it has no labels")
        elif listed.faults:
            hint = f"; expected columns such as path,label, and paths relative to {files.folder}"
            parameter = on_faults and "on_corrupt"
            note = listed.faults.raise_or_report(on_faults or "error", listed.path, listed.read, parameter, hint)
            notes.append(note)
        left_out.update({reason: len(lines) for reason, lines in listed.faults.lines.items()})
        contents |= listed.contents
        for part, part_rows in listed.rows.items():
            rows[part] |= part_rows
    where = " and ".join(listed.path for listed in lists)
    by_part = {part: {label for _, label in part_rows.values()} for part, part_rows in rows.items() if part_rows}
    classes = class_order(by_part.get("train", ()))
    _name_unknown_classes(where, rows, classes)
    notes += check_classes({"train": classes, **by_part}, f"{where} lists", "expected CSV with path,label")
    notes += [
        f"{path} is not used: tables named train, val and test are taken together, one of each"
        for path in sorted(unused)
    ]
    if files.by_stem:
        notes.append(f"{files.by_stem:,} files are found in folders below {files.folder}, by their names")
    if is_folder and not contents:
        unlisted = files.unlisted(file for part_rows in rows.values() for file in part_rows)
        if unlisted:
            notes.append(f"left out {len(unlisted):,} images that no table names, such as {unlisted[0]}")
    numbers = {name: number for number, name in enumerate(classes)}
    parts: dict[str, Samples] = {}
    for part, part_rows in rows.items():
        shared = rows["train"].keys() & part_rows.keys()
        if part != "train" and shared:
            notes.append(f"{len(shared):,} files are in train and in {part}, such as {min(shared)}")
        if part_rows:
            images: Any = BytesImages(contents, list(part_rows)) if contents else files.table(list(part_rows))
            parts[part] = Samples(images, torch.tensor([numbers[label] for _, label in part_rows.values()]))
    notes += note_shared_images(parts)
    return Source(classes, parts, place.resolve().name, notes, dict(left_out))


def tables_in(files: Files) -> list[str]:
    """Return the files of a folder, or at the top of an archive, that may be tables."""
    if files.archived is not None:
        prefix = f"{files.folder}/"
        return [path for path in files.archived if path.startswith(prefix) and "/" not in path[len(prefix) :]]
    # Repositories of Hugging Face have tables in data/, or a metadata.jsonl in the folder of each part.
    top = Path(files.folder)
    paths = [path for path in top.iterdir() if path.is_file()]
    for folder in sorted(top.iterdir()):
        if folder.name != "data" and not part_of(folder.name):
            continue
        inner = folder.iterdir() if folder.is_dir() else ()
        paths += [path for path in inner if path.is_file() and (folder.name == "data" or path.stem == "metadata")]
    return [str(path) for path in paths]


def _name_unknown_classes(
    where: str, rows: Mapping[str, Mapping[str, tuple[int, str]]], classes: Sequence[str]
) -> None:
    """Raise an error with part and line if a row has a class that train lacks."""
    known = set(classes)
    for part, part_rows in rows.items():
        for line, label in part_rows.values():
            if label not in known and known:
                listed = ", ".join(classes[:10]) + ", ..." * (len(classes) > 10)
                raise UserError(
                    f"{where}: {part} holds classes that train has no image of, such as {label} in line {line};"
                    f" expected only {listed}"
                )
