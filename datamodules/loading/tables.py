"""Tables: comma-separated values, JSON lines, Parquet, and text between tabs, each read by the library made for it.

Cells are kept as they are written. A row that has another number of cells than the header is a fault: what it means,
nobody knows.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.errors import UserError
from datamodules.loading.text_files import NOT_UTF8, Faults, iter_lines, text_suffix

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Of files whose columns have names: in the first line, or in each row."""
_SEPARATORS = ",;\t|"
_QUOTE_FIRST = re.compile(r'(?:^|\t)"')
_QUOTED = re.compile(r'(?:^|(?<=\t))"(?:[^"]|"")*"(?=\t|$)')
# Lines by which the form of a file is known.
_LOOKED_AT = 200


@dataclass
class Table:
    """The rows of a file.

    Attributes:
        where: the file.
        names: of the columns; numbers from 1 where the file has no names.
        rows: the number of the line or the row, from 1, and its cells, as many as there are names.
        faults: lines that cannot be used.
        apart: lines that are no rows and no faults, by reason: "header" and "blank".
        class_names: names of the numbers in a column, where the file has them.
    """

    where: str
    names: list[str] = field(default_factory=list)
    rows: list[tuple[int, list[Any]]] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    class_names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Lines that were read, without a header and blank ones."""
        return len(self.rows) + len(self.faults)

    def column(self, place: int) -> list[Any]:
        """The cells of a column."""
        return [cells[place] for _, cells in self.rows]

    def _add(self, number: int, cells: list[Any], width: int, fewer: str, more: str) -> None:
        """Take a row of `width` cells; further ones may be empty, as behind a separator at the end of the line."""
        if not any(cells):
            self.apart["blank"] = self.apart.get("blank", 0) + 1
        elif len(cells) < width:
            self.faults.add(fewer, [number])
        elif any(cells[width:]):
            self.faults.add(more, [number])
        else:
            self.rows.append((number, cells[:width]))


def _separator(header: str) -> str:
    """What separates the cells of a header: by which it has most of them, those in quotes aside."""
    best = ","
    most = 1
    for candidate in _SEPARATORS:
        try:
            count = len(next(csv.reader([header], delimiter=candidate, strict=True), []))
        except csv.Error:
            continue
        if count > most:
            best = candidate
            most = count
    return best


def _csv_rows(lines: Iterable[str | None], faults: Faults, **form: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows of separated values (RFC 4180), with the numbers of their first lines; quoted cells may hold lines."""
    last_undecoded = 0

    def texts() -> Iterator[str]:
        nonlocal last_undecoded
        for at, line in enumerate(lines, 1):
            if line is None:
                last_undecoded = at
            yield f"{line or ''}\n"

    reader = csv.reader(texts(), strict=True, **form)
    number = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Such as a quote that is not closed, which takes the following lines into its cell.
            faults.add(f"no CSV: {error}", [number])
        else:
            if last_undecoded >= number:
                faults.add(NOT_UTF8, [number])
            else:
                yield number, cells
        number = reader.line_num + 1


def read_csv(lines: Iterable[str | None], where: str) -> Table:
    """Comma-separated values whose first line names the columns; also separated by semicolons, tabs or bars.

    Where the header has a blank behind each separator, the blanks there are no part of the cells.

    Args:
        lines: None where one is not UTF-8.
    """
    table = Table(where)
    lines = list(lines)
    first = (lines[0] if lines else "") or ""
    separator = _separator(first)
    blanks = first.count(separator) == first.count(f"{separator} ") > 0
    rows = _csv_rows(lines, table.faults, delimiter=separator, skipinitialspace=blanks)
    header = next(rows, (0, []))[1]
    # An empty name at the end, as behind a separator there, is of no column.
    while header and not header[-1].strip():
        header.pop()
    table.names = [name.strip() for name in header]
    table.apart["header"] = 1
    for number, cells in rows:
        table._add(
            number, cells, len(table.names), "with fewer cells than the header", "with more cells than the header"
        )
    return table


def _written_with_quotes(lines: Sequence[str | None]) -> bool:
    """Whether the quotes around cells between tabs are those of a program, as pandas writes them, and not of the text.

    They are where all cells have them, or each that begins with one needs it: there are doubled quotes within.
    """
    quoted = 0
    needed = 0
    cells = 0
    for line in lines:
        if line is None:
            continue
        if not _QUOTE_FIRST.search(line):
            cells += line.count("\t") + 1
            continue
        try:
            cells += len(next(csv.reader([line], delimiter="\t", strict=True)))
        except csv.Error:
            return False
        for cell in _QUOTED.findall(line):
            quoted += 1
            needed += '""' in cell[1:-1] or "\t" in cell
    return quoted > 0 and (quoted == cells or needed == quoted)


def read_tabs(lines: Iterable[str | None], where: str, fewer: str, least: int = 2) -> Table:
    """Text between tabs, without a header: as many columns as most of the first lines have.

    Args:
        fewer: the fault of a line with fewer than `least` cells.
    """
    table = Table(where)
    lines = list(lines)
    if _written_with_quotes(lines):
        rows = _csv_rows(lines, table.faults, delimiter="\t")
    else:
        rows = _split_at_tabs(lines, table.faults)
    found = list(rows)
    widths = Counter(len(cells) for _, cells in found[:_LOOKED_AT] if len(cells) >= least)
    width = widths.most_common(1)[0][0] if widths else least
    table.names = [str(number) for number in range(1, width + 1)]
    for number, cells in found:
        # A last column that some lines lack, such as a comment, hides no tab in a sentence.
        if least <= len(cells) < width:
            cells = [*cells, *[""] * (width - len(cells))]
        table._add(number, cells, width, fewer, "with more cells than most lines")
    return table


def _split_at_tabs(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            yield number, line.split("\t")


def read_json_lines(lines: Iterable[str | None], where: str) -> Table:
    """An object in each line; the columns are the names in the first one, and what others lack is empty."""
    table = Table(where)
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
        table.names += [name for name in value if name not in table.names]
        table.rows.append((number, [value]))
    table.rows = [(number, [value.get(name, "") for name in table.names]) for number, (value,) in table.rows]
    return table


def read_parquet(path: Path) -> Table:
    """A Parquet file, with the names of classes that Hugging Face's datasets keep in it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} is a Parquet file, which needs another package: pip install pyarrow") from error
    try:
        found = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is no Parquet file, or damaged: {str(error).splitlines()[0]}") from error
    table = Table(str(path), list(found.column_names))
    columns = [column.to_pylist() for column in found.columns]
    table.rows = [(number, list(cells)) for number, cells in enumerate(zip(*columns, strict=True), 1)]
    described = (found.schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(described).get("info", {}).get("features", {})
    for name, feature in features.items():
        if isinstance(feature, Mapping) and "names" in feature:
            table.class_names[name] = [str(value) for value in feature["names"]]
    return table


def read_table(path: Path, lines: Iterable[str | None] | None = None) -> Table:
    """A file whose columns have names: .csv and .tsv with a header, .jsonl, or .parquet; also compressed.

    Args:
        lines: of a file that was opened before, such as one in an archive.

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
    return read_csv(lines, str(path))


def describe_columns(table: Table, used: Mapping[str, str], guessed: Sequence[str] = ()) -> str:
    """A line on which columns are used for what, which of them are guessed, and which are not used; "" if all are.

    Args:
        used: the names of columns by what they are used for.
        guessed: what is known by the cells, or by the place, and not by the name of a column.
    """
    unused = [name for name in table.names if name not in used.values()]
    if not unused and not guessed:
        return ""
    parts = [f"the {kind} is {name!r}{' (guessed)' * (kind in guessed)}" for kind, name in used.items()]
    if unused:
        more = f" and {len(unused) - 6} more" * (len(unused) > 6)
        parts.append(f"not used: {', '.join(map(repr, unused[:6]))}{more}")
    return f"{table.where}: {', '.join(parts)}"
