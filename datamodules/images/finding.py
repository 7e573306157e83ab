"""Finds a data set of images at a path. What is recognized: two layouts of folders, tables, and named arrays."""

from pathlib import Path
from typing import Literal

from datamodules.errors import UserError
from datamodules.images.arrays import read_npz
from datamodules.images.folders import from_folder, from_layout, open_place
from datamodules.images.source import Source
from datamodules.images.tables import find_tables, from_tables, other_parts
from datamodules.loading.archives import is_archive
from datamodules.loading.tables import TABLE_SUFFIXES
from datamodules.loading.text_files import text_suffix


def find_images(
    place: str | Path,
    layout: str | None = None,
    columns: str | None = None,
    on_faults: Literal["error", "skip"] | None = None,
) -> Source:
    """Find images in an .npz file, a table, tables of the parts of a folder or archive, or folders of classes.

    Args:
        place: a file, a folder or an archive.
        layout: where class and part are in the path of an image, see `from_layout`; None: see `from_folder`.
        columns: names of columns or arrays that are called otherwise, see `parse_columns`.
        on_faults: "error" or "skip" for rows of a table that cannot be used, see `from_tables`.

    Raises:
        UserError: there is nothing to train on, or rows cannot be used; the message says what to pass.
    """
    place = Path(place)
    is_table = place.is_file() and (columns is not None or text_suffix(place) in (*TABLE_SUFFIXES, ".txt"))
    if layout is not None and (columns is not None or is_table):
        raise UserError("a table or an array has no layout", setting="layout", value=layout)
    if place.suffix.lower() == ".npz":
        return read_npz(place, columns)
    if is_table and not is_archive(place):
        return from_tables(place, {"train": [str(place)]}, columns, on_faults, others=other_parts(place))
    opened = open_place(place)
    if layout is not None:
        return from_layout(*opened, layout, place.resolve().name)
    tables, others = find_tables(opened[0])
    if tables:
        return from_tables(place, tables, columns, on_faults, opened, others)
    if columns is not None:
        problem = f"{place} holds no table train.csv, or folders of classes beside it"
        raise UserError(problem, setting="columns", value=columns, to_type="pass the table itself")
    source = from_folder(place, opened)
    source.notes.extend(f"{path} is not used: the class folders are" for path in others)
    return source
