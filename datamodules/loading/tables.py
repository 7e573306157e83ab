"""Reads tables: comma-separated values, JSON lines, Parquet, and tab-separated text without a header.

Cells are kept as they are written. A row with another number of cells than the header is a fault, since its cells
cannot be assigned to columns with certainty.
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
"""Suffixes of files whose columns have names, in the first line or in each row."""
_SEPARATORS = ",;\t|"
_QUOTE_FIRST = re.compile(r'(?:^|\t)"')
_QUOTED = re.compile(r'(?:^|(?<=\t))"(?:[^"]|"")*"(?=\t|$)')
# Number of lines that decide the form of a file.
_LOOKED_AT = 200


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

    def column(self, index: int) -> list[Any]:
        """Return the cells of a column, by its index in `names`."""
        return [cells[index] for _, cells in self.rows]

    def _add(self, number: int, cells: list[Any], width: int, fewer: str, more: str) -> None:
        """Add a row of `width` cells, or a fault: `fewer` or `more` names the reason."""
        if not any(cells):
            self.apart["blank"] = self.apart.get("blank", 0) + 1
        elif len(cells) < width:
            self.faults.add(fewer, [number])
        # Further cells may be empty: programs write a separator at the end of a line.
        elif any(cells[width:]):
            self.faults.add(more, [number])
        else:
            self.rows.append((number, cells[:width]))


def _separator(header: str) -> str:
    """Return the separator that splits a header into most cells. Separators in quotes do not count."""
    separator = ","
    most_cells = 1
    for candidate in _SEPARATORS:
        try:
            count = len(next(csv.reader([header], delimiter=candidate, strict=True), []))
        except csv.Error:
            continue
        if count > most_cells:
            separator = candidate
            most_cells = count
    return separator


def _csv_rows(lines: Iterable[str | None], faults: Faults, **form: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of separated values (RFC 4180) with the numbers of their first lines, and add faults."""
    # A quoted cell may span several lines, so a row is faulty if any of its lines could not be decoded.
    last_undecoded = 0

    def texts() -> Iterator[str]:
        nonlocal last_undecoded
        for line_number, line in enumerate(lines, 1):
            if line is None:
                last_undecoded = line_number
            yield f"{line or ''}\n"

    reader = csv.reader(texts(), strict=True, **form)
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


def read_csv(lines: Iterable[str | None], where: str) -> Table:
    """Read separated values whose first line names the columns. Separators are commas, semicolons, tabs or bars.

    If the header has a blank after each separator, blanks after separators do not belong to the cells.

    Args:
        lines: lines of the file, None for a line that is not UTF-8.
        where: name of the file, for messages.
    """
    table = Table(where)
    lines = list(lines)
    header_line = (lines[0] if lines else "") or ""
    separator = _separator(header_line)
    has_blanks = header_line.count(separator) == header_line.count(f"{separator} ") > 0
    rows = _csv_rows(lines, table.faults, delimiter=separator, skipinitialspace=has_blanks)
    header = next(rows, (0, []))[1]
    # A separator at the end of the header makes an empty name, which is not a column.
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
    """Return whether the quotes around tab-separated cells are CSV quoting, as pandas writes it, and not quotations.

    They are CSV quoting if all cells have them, or if every quoted cell needs them: it contains doubled quotes or tabs.
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
    """Read tab-separated text without a header. The number of columns is that of most of the first lines.

    Args:
        lines: lines of the file, None for a line that is not UTF-8.
        where: name of the file, for messages.
        fewer: reason of the fault of a line with fewer than `least` cells.
        least: least number of columns.
    """
    table = Table(where)
    lines = list(lines)
    if _written_with_quotes(lines):
        parsed = _csv_rows(lines, table.faults, delimiter="\t")
    else:
        parsed = _split_at_tabs(lines, table.faults)
    rows = list(parsed)
    widths = Counter(len(cells) for _, cells in rows[:_LOOKED_AT] if len(cells) >= least)
    width = widths.most_common(1)[0][0] if widths else least
    table.names = [str(number) for number in range(1, width + 1)]
    for number, cells in rows:
        # Some lines may lack an optional last column, such as a comment. Fewer cells cannot come from a tab in a
        # sentence, which would add one.
        if least <= len(cells) < width:
            cells = [*cells, *[""] * (width - len(cells))]
        table._add(number, cells, width, fewer, "with more cells than most lines")
    return table


def _split_at_tabs(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each line after its number, and add faults."""
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            yield number, line.split("\t")


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
        table.names += [name for name in value if name not in table.names]
        objects.append((number, value))
    # Only now all names are known: a later object may have a key that the first ones lack.
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


def read_table(path: Path, lines: Iterable[str | None] | None = None) -> Table:
    """Read a file whose columns have names: .csv or .tsv with a header, .jsonl, or .parquet. It may be compressed.

    Args:
        path: path of the file, whose suffix decides the format.
        lines: lines of the file if it is open already, as in an archive.

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
    """Return a line about the columns that are used, guessed or not used; "" if all are used and none is guessed.

    Args:
        table: the table.
        used: name of the column for each use, such as "label".
        guessed: uses whose column was chosen by its cells or its position, and not by its name.
    """
    unused = [name for name in table.names if name not in used.values()]
    if not unused and not guessed:
        return ""
    phrases = []
    for use, name in used.items():
        remark = " (guessed)" if use in guessed else ""
        phrases.append(f"the {use} is {name!r}{remark}")
    if unused:
        more = f" and {len(unused) - 6} more" if len(unused) > 6 else ""
        phrases.append(f"not used: {', '.join(map(repr, unused[:6]))}{more}")
    return f"{table.where}: {', '.join(phrases)}"
