"""Finds the columns of a table that hold images, labels and parts, by their names or by their cells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datamodules.errors import UserError
from datamodules.images.folders import PART_NAMES, part_of
from datamodules.loading.tables import Table

_PATHS = ("path", "file", "filename", "file name", "filepath", "file path", "image", "image path", "image name")
_IDS = ("image id", "imageid", "id", "id code")
_LABELS = ("label", "labels", "class", "class name", "class label", "class id", "classid", "target", "category")
# Names of columns that are always taken as parts, so that a cell that names no part is a fault.
_SURE_PARTS = ("split", "part", "set")
_PARTS = (*_SURE_PARTS, "subset", "partition", "usage", "phase", "data split", "datasplit", "dataset", "data set")
_FLAGS = {
    **{"is test": "test", "is valid": "val", "is val": "val", "is validation": "val"},
    **{"is train": "train", "is training": "train", "is training image": "train"},
}
"""Names of columns that hold yes or no, and the part that yes stands for."""
_FURTHER_NAMES = {"dev": "val", "eval": "val", "development": "val", "evaluation": "val", "holdout": "test"}
_YES_OR_NO = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_NUMBERS = {"0": "train", "1": "val", "2": "test"}
"""Parts by the numbers of CelebA's partitions."""


@dataclass
class Columns:
    """Indices of the columns in a table, and the function that reads the part from a cell.

    Attributes:
        path, label: index of the column, or -1 if there is none.
        part: index of the column, or None if there is none.
        part_of_cell: function from a cell of that column to the part, or "" if the cell names no part.
        guessed: uses whose column was not found by its own name: "path", "label", "part".
    """

    path: int
    label: int
    part: int | None = None
    part_of_cell: Callable[[Any], str] = str
    guessed: list[str] = field(default_factory=list)

    def names(self, table: Table) -> dict[str, str]:
        """Return the names of the columns by their use."""
        indices = {"path": self.path, "label": self.label, "part": self.part}
        return {use: table.names[index] for use, index in indices.items() if index is not None and index >= 0}


def _plain(name: str) -> str:
    """Return a name in lower case with spaces: "Image_Path" and "image-path" become "image path"."""
    return name.strip().lower().replace("_", " ").replace("-", " ")


def _first_index(names: Sequence[str], accepted: Sequence[str]) -> int:
    """Return the index of the first column whose name is accepted, or -1."""
    for index, name in enumerate(names):
        if name in accepted:
            return index
    return -1


def _part_of_cell(cell: Any) -> str:
    """Return the part that a cell names, as "Training" and "PublicTest" do, or ""."""
    word = str(cell).strip().lower()
    for part, names in PART_NAMES.items():
        if word in names:
            return part
    return _FURTHER_NAMES.get(word) or part_of(str(cell))


def _by_flag(part: str) -> Callable[[Any], str]:
    """Return a function that reads a cell with yes or no, where yes means `part`.

    No in a column "is_train" means "test", since the data set's author holds these samples out. No in any other column
    means "train".
    """

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


def _find_part(table: Table, names: Sequence[str], columns: Columns) -> None:
    """Set the column of parts in `columns`, by its name or because each of its cells names a part."""
    for name in _SURE_PARTS:
        if name in names:
            columns.part = names.index(name)
            columns.part_of_cell = _part_of_cell
            cells = {str(cell).strip() for cell in table.column(columns.part)}
            if cells and cells <= _NUMBERS.keys():
                columns.part_of_cell = _by_number
                columns.guessed.append("part")
            return
    for index, name in enumerate(names):
        if index in (columns.path, columns.label):
            continue
        cells = {str(cell).strip() for cell in table.column(index)}
        read_part: Callable[[Any], str] = _part_of_cell
        if name in _FLAGS:
            read_part = _by_flag(_FLAGS[name])
        elif name == "partition" and cells <= _NUMBERS.keys():
            read_part = _by_number
        elif name not in _PARTS and any(_plain(cell) not in _words_of_parts() for cell in cells):
            # A column with another name needs plain words in all cells: "test_17" may mean anything.
            continue
        if cells and all(read_part(cell) for cell in cells):
            columns.part = index
            columns.part_of_cell = read_part
            columns.guessed.append("part")
            return


def _words_of_parts() -> set[str]:
    return {name for names in PART_NAMES.values() for name in names} | set(_FURTHER_NAMES)


def find_columns(table: Table, may_lack_labels: bool = False) -> Columns:
    """Find the columns of path, label and part.

    Args:
        table: the table.
        may_lack_labels: whether the column of labels may be missing, as in the test table of a competition.

    Raises:
        UserError: there are no such columns; the message lists the accepted names.
    """
    names = [_plain(name) for name in table.names]
    columns = Columns(_first_index(names, _PATHS), _first_index(names, _LABELS))
    # After the paths, since a table may have both an id and a path.
    if columns.path < 0:
        columns.path = _first_index(names, _IDS)
    # In a table of two columns, the other column must be the missing one, as in id,breed.
    if len(names) == 2 and (columns.path < 0) != (columns.label < 0):
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
    _find_part(table, names, columns)
    return columns


def label_names(table: Table, columns: Columns) -> Mapping[str, str]:
    """Return the class names by number, as strings, if the file has names for its column of labels."""
    if columns.label < 0:
        return {}
    names = table.class_names.get(table.names[columns.label], [])
    return {str(number): name for number, name in enumerate(names)}
