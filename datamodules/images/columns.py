"""Which columns of a table hold images, labels and parts: by their names, and where these are open by the cells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datamodules.errors import UserError
from datamodules.images.folders import PART_NAMES, part_of
from datamodules.loading.tables import Table

_PATHS = ("path", "file", "filename", "file name", "filepath", "file path", "image", "image path", "image name")
_IDS = ("image id", "imageid", "id", "id code")
_LABELS = ("label", "labels", "class", "class name", "class label", "class id", "classid", "target", "category")
# Columns that are made for parts; what is in one of the first three and names no part is a fault.
_SURE_PARTS = ("split", "part", "set")
_PARTS = (*_SURE_PARTS, "subset", "partition", "usage", "phase", "data split", "datasplit", "dataset", "data set")
_FLAGS = {"is test": "test", "is valid": "val", "is val": "val", "is validation": "val", "is train": "train"}
"""Columns that say yes or no of a part."""
_FLAGS |= {"is training": "train", "is training image": "train"}
_FURTHER_NAMES = {"dev": "val", "eval": "val", "development": "val", "evaluation": "val", "holdout": "test"}
_YES_OR_NO = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_NUMBERS = {"0": "train", "1": "val", "2": "test"}
"""Of CelebA's partitions."""


@dataclass
class Columns:
    """The places of columns in a table, and what a cell says of its part.

    Attributes:
        path, label: -1 where there is none.
        part: None where no column says it.
        part_of_cell: the part by a cell of that column, "" for none.
        guessed: what is not known by a name that is made for it: "path", "label", "part".
    """

    path: int
    label: int
    part: int | None = None
    part_of_cell: Callable[[Any], str] = str
    guessed: list[str] = field(default_factory=list)

    def names(self, table: Table) -> dict[str, str]:
        """The names of the columns by what they are."""
        places = {"path": self.path, "label": self.label, "part": self.part}
        return {kind: table.names[place] for kind, place in places.items() if place is not None and place >= 0}


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ").replace("-", " ")


def _first(known: Sequence[str], wanted: Sequence[str]) -> int:
    """The place of the first column with one of these names; -1 where there is none."""
    return next((place for place, name in enumerate(known) if name in wanted), -1)


def _part_of_cell(cell: Any) -> str:
    """The part that a cell names, as in "Training" and "PublicTest"; "" where it names none."""
    word = str(cell).strip().lower()
    for part, names in PART_NAMES.items():
        if word in names:
            return part
    return _FURTHER_NAMES.get(word) or part_of(str(cell))


def _by_flag(part: str) -> Callable[[Any], str]:
    """What a cell with yes or no says where yes is `part`; what is not trained on is held back for the test."""

    def part_of_flag(cell: Any) -> str:
        value = _YES_OR_NO.get(str(cell).strip().lower())
        if value is None:
            return ""
        if value:
            return part
        return "test" if part == "train" else "train"

    return part_of_flag


def _by_number(cell: Any) -> str:
    return _NUMBERS.get(str(cell).strip(), "")


def _find_part(table: Table, known: Sequence[str], columns: Columns) -> None:
    """Find the column of parts: by its name, or because each of its cells names one."""
    for name in _SURE_PARTS:
        if name in known:
            columns.part = known.index(name)
            columns.part_of_cell = _part_of_cell
            cells = {str(cell).strip() for cell in table.column(columns.part)}
            if cells and cells <= _NUMBERS.keys():
                columns.part_of_cell = _by_number
                columns.guessed.append("part")
            return
    for place, name in enumerate(known):
        if place in (columns.path, columns.label):
            continue
        cells = {str(cell).strip() for cell in table.column(place)}
        reading: Callable[[Any], str] = _part_of_cell
        if name in _FLAGS:
            reading = _by_flag(_FLAGS[name])
        elif name == "partition" and cells <= _NUMBERS.keys():
            reading = _by_number
        elif name not in _PARTS and any(_plain(cell) not in _words_of_parts() for cell in cells):
            # Of another column only plain words count: "test_17" may be anything.
            continue
        if cells and all(reading(cell) for cell in cells):
            columns.part = place
            columns.part_of_cell = reading
            columns.guessed.append("part")
            return


def _words_of_parts() -> set[str]:
    return {name for names in PART_NAMES.values() for name in names} | set(_FURTHER_NAMES)


def find_columns(table: Table, may_lack_labels: bool = False) -> Columns:
    """The columns of path, label and part.

    Args:
        may_lack_labels: whether a table without labels is one, as that of a published test part.

    Raises:
        UserError: the table has no such columns; the message says how they may be called.
    """
    known = [_plain(name) for name in table.names]
    columns = Columns(_first(known, _PATHS), _first(known, _LABELS))
    if columns.path < 0:
        columns.path = _first(known, _IDS)
    # Of two columns the other one is what is missing, as in id,breed.
    if len(known) == 2 and (columns.path < 0) != (columns.label < 0):
        if columns.label < 0:
            columns.label = 1 - columns.path
            columns.guessed.append("label")
        else:
            columns.path = 1 - columns.label
            columns.guessed.append("path")
    if columns.path < 0 or (columns.label < 0 and not may_lack_labels):
        raise UserError(
            f"{table.where}: the first line is {','.join(table.names[:8])[:200]}; expected the names of the columns, of"
            f" which one is called {', '.join(_PATHS)}, and one {', '.join(_LABELS)}"
        )
    _find_part(table, known, columns)
    return columns


def label_names(table: Table, columns: Columns) -> Mapping[str, str]:
    """The names of numbers in the column of labels, where the file has them."""
    names = table.class_names.get(table.names[columns.label], []) if columns.label >= 0 else []
    return {str(number): name for number, name in enumerate(names)}
