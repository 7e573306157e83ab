"""Reads tables: comma- or tab-separated values, JSON lines and Parquet, with the columns that a user declares.

Cells are kept as they are written. A row with another number of cells than the first line is a fault, since its cells
cannot be assigned to columns with certainty.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, spelled
from datamodules.loading.text_files import NOT_UTF8, Faults, iter_lines, text_suffix

NAMED = (".jsonl", ".ndjson", ".parquet")
"""Suffixes of files that name the columns themselves."""
TABLE_SUFFIXES = (".csv", ".tsv", *NAMED)
"""Suffixes of files whose columns have names, in the first line or in each row."""
FORM = ("separator", "quotes")
"""What `columns` says of the form of a table, besides the columns."""
SEPARATOR_NAMES = {"\t": "tab", " ": "space", ",": "comma"}
"""Names of separators that are hard to type."""
_DECLARATION = re.compile(r"(?:^|,)\s*([a-z_]+)=")


def parse_columns(text: str | None, uses: Sequence[str] = ()) -> dict[str, str]:
    """Return the name of the column of each declared use.

    Args:
        text: the parameter `columns`: USE=COLUMN, separated by commas.
        uses: uses that the data have, besides `FORM`; by default any.

    Raises:
        UserError: the text has another form or names another use.

    Example:
        >>> parse_columns("path=file,label=breed,separator=;", ("path", "label", "split"))
        {'path': 'file', 'label': 'breed', 'separator': ';'}
    """
    start, *pieces = _DECLARATION.split(str(text or ""))
    declared = dict(zip(pieces[::2], pieces[1::2]))
    unknown = [use for use in declared if uses and use not in (*uses, *FORM)]
    if start or unknown or (text and not declared):
        problem = "expected USE=COLUMN, separated by commas"
        listed = ", ".join((*uses, *FORM)) if uses else "path and label"
        raise UserError(f"{problem}; the uses are {listed}", setting="columns", value=text)
    return declared


def has_header(columns: Mapping[str, str]) -> bool:
    """Return whether declared columns are names of a header: not if all are numbers, from 1."""
    names = [name for use, name in columns.items() if use not in FORM]
    return not names or not all(name.isascii() and name.isdigit() for name in names)


@dataclass
class Table:
    """Rows and columns of a file.

    Attributes:
        where: name of the file, for messages.
        names: names of the columns, or numbers from 1 if the file has no names.
        rows: number of the line or row, from 1, and its cells, as many as `names`.
        faults: lines that cannot be used.
        apart: number of lines that are neither rows nor faults, by reason: "header" and "blank".
        class_names: names of the class numbers of a column, if the file has them.
    """

    where: str
    names: list[str] = field(default_factory=list)
    rows: list[tuple[int, list[Any]]] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    class_names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Number of lines that were read, without a header and blank lines."""
        return len(self.rows) + len(self.faults)

    def index(self, name: str) -> int:
        """Return the index of a column by its name in any case, or by its number from 1; -1 if there is none."""
        lower_names = [column.strip().lower() for column in self.names]
        # Names before numbers, since a column may be called "2".
        if name.strip().lower() in lower_names:
            return lower_names.index(name.strip().lower())
        if name.isascii() and name.isdigit() and 1 <= int(name) <= len(self.names):
            return int(name) - 1
        return -1


def _csv_rows(lines: Iterable[str | None], faults: Faults, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of separated values (RFC 4180) with the numbers of their first lines, and add faults."""
    # A quoted cell may span several lines, so a row is faulty if any of its lines could not be decoded.
    last_undecoded = 0

    def texts() -> Iterator[str]:
        nonlocal last_undecoded
        for line_number, line in enumerate(lines, 1):
            if line is None:
                last_undecoded = line_number
            yield f"{line or ''}\n"

    # A separator such as ", " is a comma and a blank that does not belong to the cell.
    reader = csv.reader(texts(), strict=True, delimiter=separator[:1], skipinitialspace=separator[1:] == " ")
    number = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Such as a quote that is not closed, which includes the following lines in its cell.
            faults.add(f"no CSV: {error}", [number])
        else:
            if last_undecoded >= number:
                faults.add(NOT_UTF8, [number])
            else:
                yield number, cells
        number = reader.line_num + 1


def _has_doubled_quotes(line: str, separator: str) -> bool:
    """Return whether a line is CSV with quotes in a quoted cell, and so not a text that happens to quote."""
    try:
        cells = next(csv.reader([line], strict=True, delimiter=separator[:1]))
    except csv.Error:
        return False
    return '"' in "".join(cells) and separator.join(cells) != line


def _plain_rows(lines: Iterable[str | None], faults: Faults, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each line after its number, and add faults. Quotes belong to the cells."""
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        elif '""' in line and _has_doubled_quotes(line, separator):
            faults.add("with doubled quotes, as CSV has them", [number])
        else:
            yield number, line.split(separator) if line else []


def read_text_table(
    lines: Iterable[str | None], where: str, columns: Mapping[str, str], comma: bool, header: bool
) -> Table:
    """Read separated values.

    Args:
        lines: lines of the file, None for a line that is not UTF-8.
        where: name of the file, for messages.
        columns: declared columns, see `parse_columns`: "separator" and "quotes" say how a line is cut into cells.
        comma: whether the file is CSV: with commas and quotes, unless `columns` says otherwise; else tabs and none.
        header: whether the first line names the columns.
    """
    table = Table(where)
    separator = columns.get("separator", "comma" if comma else "tab")
    separator = {name: mark for mark, name in SEPARATOR_NAMES.items()}.get(separator, separator)
    quoted = columns.get("quotes", "yes" if comma else "no") == "yes"
    rows = (_csv_rows if quoted else _plain_rows)(lines, table.faults, separator)
    for number, cells in rows:
        if not any(cells):
            table.apart["blank"] = table.apart.get("blank", 0) + 1
        elif not table.names:
            # A separator at the end of the header makes an empty name, which is not a column.
            while header and not cells[-1].strip():
                cells.pop()
            table.names = cells if header else [str(column) for column in range(1, len(cells) + 1)]
            if header:
                table.apart["header"] = 1
            else:
                table.rows.append((number, cells))
        elif len(cells) < len(table.names):
            table.faults.add("with fewer cells than the first line", [number])
        # Further cells may be empty: programs write a separator at the end of a line.
        elif any(cells[len(table.names) :]):
            table.faults.add("with more cells than the first line", [number])
        else:
            table.rows.append((number, cells[: len(table.names)]))
    return table


def read_json_lines(lines: Iterable[str | None], where: str) -> Table:
    """Read a JSON object from each line. The columns are all keys, and a missing value is an empty cell."""
    table = Table(where)
    objects: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if line is None:
            table.faults.add(NOT_UTF8, [number])
            continue
        if not line.strip():
            table.apart["blank"] = table.apart.get("blank", 0) + 1
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            table.faults.add("no JSON object", [number])
            continue
        objects.append((number, value))
    # Of all rows: a later object may have a key that the first ones lack.
    table.names = list(dict.fromkeys(name for _, value in objects for name in value))
    for number, value in objects:
        table.rows.append((number, [value.get(name, "") for name in table.names]))
    return table


def read_parquet(path: Path) -> Table:
    """Read a Parquet file, and the class names that Hugging Face's datasets store in its metadata."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} is a Parquet file, which needs another package: pip install pyarrow") from error
    try:
        content = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is no Parquet file, or damaged: {str(error).splitlines()[0]}") from error
    table = Table(str(path), list(content.column_names))
    columns = [column.to_pylist() for column in content.columns]
    table.rows = [(number, list(cells)) for number, cells in enumerate(zip(*columns, strict=True), 1)]
    described = (content.schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(described).get("info", {}).get("features", {})
    for name, feature in features.items():
        if isinstance(feature, Mapping) and "names" in feature:
            table.class_names[name] = [str(value) for value in feature["names"]]
    return table


def read_table(
    path: Path, columns: Mapping[str, str], lines: Iterable[str | None] | None = None, header: bool | None = None
) -> Table:
    """Read a table, whose format is that of its suffix: .csv, .jsonl, .parquet, else tab-separated values.

    Args:
        path: path of the file, which may be compressed.
        columns: declared columns, see `parse_columns`.
        lines: lines of the file if it is open already, as in an archive.
        header: whether the first line of separated values names the columns; None: see `has_header`.

    Raises:
        UserError: see `iter_lines`; or a library is missing.
    """
    suffix = text_suffix(path)
    if suffix == ".parquet":
        return read_parquet(path)
    if lines is None:
        lines = iter_lines(path)
    if suffix in (".jsonl", ".ndjson"):
        return read_json_lines(lines, str(path))
    if header is None:
        header = has_header(columns)
    table = read_text_table(lines, str(path), columns, suffix == ".csv", header)
    blanks = [name for name in table.names[1:] if name[:1] == " "]
    if blanks:
        raise UserError(
            f"{path}: the column {blanks[0]!r} begins with a blank, so its cells may; pass"
            f" {spelled('columns', 'separator=, ')} if a blank follows each comma"
        )
    return table
