"""Images by tables: a column of paths, one of labels, and perhaps one of parts; in a folder, or in an archive."""

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
# Of several files to a part, as Hugging Face stores large sets.
_SHARDED = (".parquet", ".jsonl", ".ndjson")
_WEAKER_NAMES = {"dev": "val", "eval": "val"}
_UNKNOWN_FILE = "whose file does not exist"
_SEVERAL_FILES = "of a name that several files have"


class Files:
    """The files that tables name: on disk, or in an archive.

    Args:
        folder: the tables' own, as it is shown to people.
        opened: the folder, or the archive, and all files in it by number; on disk it is listed when it is needed.
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
        return os.path.isfile(path)  # noqa: PTH113 - Path's raises for long names.

    @cached_property
    def _by_base(self) -> dict[str, list[str]]:
        """The images in the folder by their names, with and without ending."""
        images = []
        if self.archived is not None:
            images = [path for path in self.archived if is_image(path)]
        else:
            # What cannot be listed there holds no file that could be read.
            with suppress(UserError):
                images = images_below(self.folder)[0]
        found: dict[str, list[str]] = {}
        for path in images:
            base = os.path.basename(path)  # noqa: PTH119
            for name in {base, os.path.splitext(base)[0]}:  # noqa: PTH122
                found.setdefault(name, []).append(path)
        return found

    def find(self, name: str, part: str) -> tuple[str, str]:
        """The file that a cell names, or "" and why there is none.

        It is looked for relative to the table and to the folder of its part, and then, also without its ending, in all
        folders below.
        """
        for spelled in (name, name.replace("\\", "/")):
            for folder in (self.folder, os.path.join(self.folder, part)):  # noqa: PTH118
                path = os.path.normpath(os.path.join(folder, spelled))  # noqa: PTH118
                if self._exists(path):
                    return path, ""
        spelled = name.replace("\\", "/").removeprefix("./")
        ends = []
        for path in self._by_base.get(spelled.rpartition("/")[2], []):
            if f"{os.path.splitext(path)[0]}/".endswith(f"/{spelled}/") or path.endswith(f"/{spelled}"):  # noqa: PTH122
                ends.append(path)
        if len(ends) > 1:
            # train/1.png and test/1.png: the one in the folder of its part.
            here = [path for path in ends if part in map(part_of, path[len(self.folder) :].split("/")[:-1])]
            ends = here or ends
        if len(ends) == 1:
            self.by_stem += 1
            return ends[0], ""
        return "", _SEVERAL_FILES if ends else _UNKNOWN_FILE

    def lines(self, path: str) -> Iterator[str | None] | None:
        """The lines of a table in an archive; None for one on disk."""
        if self.archived is None or self._opened is None:
            return None
        if text_suffix(Path(path)) == ".parquet":
            raise UserError(f"{path} cannot be read in an archive; unpack it, and pass its folder")
        content = self._opened[1].read(self.archived[path])
        return decoded_lines(io.BytesIO(content), path)

    def table(self, paths: Sequence[str]) -> FileTable:
        """These files."""
        if self.archived is None or self._opened is None:
            return FileTable(paths)
        numbers = [self.archived[path] for path in paths]
        return self._opened[1].select(torch.tensor(numbers, dtype=torch.int64))

    def unlisted(self, used: Iterable[str]) -> list[str]:
        """The images that no row names."""
        every = {path for paths in self._by_base.values() for path in paths}
        return sorted(every.difference(used))


@dataclass
class _Listed:
    """What a table lists: files, or their contents, with the line and the label, by part; and what cannot be used."""

    path: str
    part: str
    rows: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    read: int = 0
    faults: Faults = field(default_factory=Faults)
    has_labels: bool = True
    note: str = ""


def _read_list(path: str, part: str, files: Files) -> _Listed:
    """Read a table of one part, or of the parts that its column of parts names."""
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
    """Take a row that has a label, a part and a file, or note why it cannot be used."""
    part = listed.part if columns.part is None else columns.part_of_cell(cells[columns.part])
    label = _text(cells[columns.label])
    label = names.get(label, label)
    image = cells[columns.path]
    content = None
    # Hugging Face's form of an image: its content, and perhaps where it was.
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
    """The tables of "train", "val" and "test" among files, by their names in any case; and the tables of none.

    Raises:
        UserError: there are two of a part.
    """
    strong: dict[str, list[str]] = {part: [] for part in PARTS}
    weak: dict[str, list[str]] = {part: [] for part in PARTS}
    others: list[str] = []
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
            others.append(path)
    found: dict[str, list[str]] = {}
    for part in PARTS:
        tables = strong[part] or weak[part]
        if strong[part]:
            others += weak[part]
        sharded = all(text_suffix(Path(path)) in _SHARDED for path in tables)
        if len(tables) > 1 and not sharded:
            folder = Path(tables[0]).parent
            first, second = (Path(path).name for path in tables[:2])
            raise UserError(f"{folder} holds both {first} and {second}; pass one of them, or remove one")
        if tables:
            found[part] = tables
    if "train" not in found:
        return {}, [*others, *(path for tables in found.values() for path in tables)]
    return found, others


def _beside(place: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The tables that a table brings with it: where it is train's those beside it of the same kind; and the others."""
    suffix = text_suffix(place)
    others = [str(path) for path in place.parent.iterdir() if path != place and text_suffix(path) == suffix]
    if place.name.lower().partition(".")[0] in PART_NAMES["train"]:
        found, unused = find_lists([str(place), *others])
        return found, unused

    def may_be_a_part(path: str) -> bool:
        stem = Path(path).name.partition(".")[0]
        return bool(part_of(stem)) or stem.lower() in _WEAKER_NAMES

    return {"train": [str(place)]}, [path for path in others if may_be_a_part(path)]


def from_table(
    place: str | Path, on_faults: Literal["error", "skip"] | None = None, files: Files | None = None
) -> Source:
    """The images that a table lists, or the tables of parts in a folder or beside it; what is wrong is named by line.

    Args:
        place: a table, or a folder with train.csv and perhaps val.csv and test.csv.
        on_faults: what to do about rows that cannot be used, the value of the parameter `on_corrupt`; None is an error
            for a data module without it.
        files: of an archive.

    Raises:
        UserError: see `read_table`; or rows cannot be used, or there are no classes to train on.
    """
    place = Path(place)
    if files is None and place.is_file():
        tables, unused = _beside(place)
        files = Files(str(place.parent))
        whole = False
    else:
        files = files or Files(str(place))
        tables, unused = find_lists(tables_in(files))
        whole = True
    lists = [_read_list(path, part, files) for part, paths in tables.items() for path in paths]
    notes = [one.note for one in lists if one.note]
    left_out: Counter[str] = Counter()
    rows: dict[str, dict[str, tuple[int, str]]] = {part: {} for part in PARTS}
    contents: dict[str, bytes] = {}
    for one in lists:
        without = one.part == "test" and not any(one.rows.values())
        if not one.has_labels or (without and set(one.faults.lines) == {"without a label"}):
            notes.append(f"{one.path} is not used: it has no labels")
        elif one.faults:
            hint = f"; expected columns such as path,label, and paths relative to {files.folder}"
            parameter = on_faults and "on_corrupt"
            note = one.faults.raise_or_report(on_faults or "error", one.path, one.read, parameter, hint)
            notes.append(note)
        left_out.update({reason: len(lines) for reason, lines in one.faults.lines.items()})
        contents |= one.contents
        for part, of_part in one.rows.items():
            rows[part] |= of_part
    where = " and ".join(one.path for one in lists)
    by_part = {part: {label for _, label in of_part.values()} for part, of_part in rows.items() if of_part}
    classes = class_order(by_part.get("train", ()))
    _name_unknown_classes(where, rows, classes)
    notes += check_classes({"train": classes, **by_part}, f"{where} lists", "expected CSV with path,label")
    notes += [
        f"{path} is not used: tables named train, val and test are taken together, one of each"
        for path in sorted(unused)
    ]
    if files.by_stem:
        notes.append(f"{files.by_stem:,} files are found in folders below {files.folder}, by their names")
    if whole and not contents:
        unlisted = files.unlisted(file for of_part in rows.values() for file in of_part)
        if unlisted:
            notes.append(f"left out {len(unlisted):,} images that no table names, such as {unlisted[0]}")
    numbers = {name: number for number, name in enumerate(classes)}
    parts: dict[str, Samples] = {}
    for part, of_part in rows.items():
        both = rows["train"].keys() & of_part.keys()
        if part != "train" and both:
            notes.append(f"{len(both):,} files are in train and in {part}, such as {min(both)}")
        if of_part:
            images: Any = BytesImages(contents, list(of_part)) if contents else files.table(list(of_part))
            parts[part] = Samples(images, torch.tensor([numbers[label] for _, label in of_part.values()]))
    notes += note_shared_images(parts)
    return Source(classes, parts, place.resolve().name, notes, dict(left_out))


def tables_in(files: Files) -> list[str]:
    """The files of a folder, or at the top of an archive, among which there may be tables."""
    if files.archived is not None:
        prefix = f"{files.folder}/"
        return [path for path in files.archived if path.startswith(prefix) and "/" not in path[len(prefix) :]]
    # As Hugging Face's repositories have them: in data/, or metadata.jsonl in the folder of a part.
    top = Path(files.folder)
    found = [path for path in top.iterdir() if path.is_file()]
    for folder in sorted(top.iterdir()):
        if folder.name != "data" and not part_of(folder.name):
            continue
        inner = folder.iterdir() if folder.is_dir() else ()
        found += [path for path in inner if path.is_file() and (folder.name == "data" or path.stem == "metadata")]
    return [str(path) for path in found]


def _name_unknown_classes(
    where: str, rows: Mapping[str, Mapping[str, tuple[int, str]]], classes: Sequence[str]
) -> None:
    known = set(classes)
    for part, of_part in rows.items():
        for line, label in of_part.values():
            if label not in known and known:
                named = ", ".join(classes[:10]) + ", ..." * (len(classes) > 10)
                raise UserError(
                    f"{where}: {part} holds classes that train has no image of, such as {label} in line {line};"
                    f" expected only {named}"
                )
