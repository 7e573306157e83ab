"""Text files and tables: comma- or tab-separated values, JSON lines and Parquet.

Text files may be .gz, .bz2, .xz, .zst or the only file in a .zip. Users declare the columns of a table. Cells are not
changed. A row whose number of cells differs from the first line is a fault, because the cells cannot be assigned to
columns with certainty. Faulty lines are collected.
"""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

from datamodules.errors import UserError, spelled

NOT_UTF8 = "not in UTF-8"
"""Reason for a fault."""

_BLOCK = 1 << 16  # Bytes per read. The first block also decides whether a file is text.
# Characters by which "surrogateescape" replaces bytes that are not UTF-8.
_NOT_DECODED = re.compile("[\udc80-\udcff]")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def _open_zst(file: IO[bytes]) -> IO[bytes]:
    # pyarrow, because Python reads zstd only from version 3.14 on.
    try:
        import pyarrow
    except ImportError as error:
        problem = "is compressed by zstd; unpack it with zstd -d, or pip install pyarrow"
        raise UserError(problem, subject=str(file.name)) from error
    stream: IO[bytes] = pyarrow.CompressedInputStream(file, "zstd")
    return stream


_OPENERS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zst,
}
"""Function that opens a compressed file, by the first bytes of the file, because suffixes may be wrong."""


@dataclass
class Faults:
    """Unusable lines: their numbers by reason."""

    lines: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def add(self, reason: str, numbers: Sequence[int]) -> None:
        """Add numbers of lines, counted from 1."""
        if numbers:
            self.lines.setdefault(reason, []).extend(numbers)

    def describe(self) -> str:
        """Describe each reason: how many lines, and the numbers of the first five."""
        phrases = []
        for reason, numbers in self.lines.items():
            listed = ", ".join(map(str, sorted(numbers)[:5]))
            if len(numbers) > 5:
                listed += ", ..."
            noun = "lines" if len(numbers) > 1 else "line"
            phrases.append(f"{len(numbers):,} {reason} ({noun} {listed})")
        return "; ".join(phrases)

    def raise_or_report(
        self, choice: Literal["error", "skip"], where: str, total: int, parameter: str | None, more: str = ""
    ) -> str:
        """Return a text about the lines that are left out, "" if there is no fault, or raise a UserError.

        Args:
            choice: "error" raises if there are faults, "skip" leaves them out.
            where: name of the file.
            total: number of lines read.
            parameter: name of the parameter whose value is `choice`, or None.
            more: additional hint for the error.

        Raises:
            UserError: there are faults and `choice` is "error".
        """
        if not len(self):
            return ""
        if choice == "error":
            skip = f", or pass {spelled(parameter, 'skip')} to leave them out" if parameter else ""
            raise UserError(
                f"{where}: {len(self):,} of {total:,} lines cannot be used: {self.describe()}{more}; correct them{skip}"
            )
        return f"{where}: left out {len(self):,} of {total:,} lines: {self.describe()}"


def text_members(path: Path) -> list[str]:
    """Return the names of the files in a zip archive, except names that begin with "_" or "."."""
    with zipfile.ZipFile(path) as archive:
        names = [member.filename for member in archive.infolist() if not member.is_dir()]
    # Archives of manythings.org contain _about.txt, and archives created on a Mac contain __MACOSX.
    return [name for name in names if not any(component[0] in "_." for component in Path(name).parts)]


_CSV = "save its table as CSV in UTF-8"
_OTHER_FORMATS = {
    b"\xd0\xcf\x11\xe0": f"a file of an old Excel or Word; {_CSV}",
    b"PAR1": "a Parquet file; give it the ending .parquet",
    b"%PDF": "a PDF; pass its text",
    b"\xff\xfe": "no text file: its text is in UTF-16; expected lines of UTF-8",
    b"\xfe\xff": "no text file: its text is in UTF-16; expected lines of UTF-8",
}
"""Description of another program's file, by its first bytes."""


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    """Open a file, a compressed file, or the only file of a zip archive, as a stream of bytes."""
    file = stack.enter_context(path.open("rb"))
    start = file.peek(8)
    if start.startswith(b"PK\x03\x04"):
        archive = stack.enter_context(zipfile.ZipFile(file))
        names = text_members(path)
        # Spreadsheets and documents of LibreOffice and Office are zip archives with these members.
        if not {"mimetype", "[Content_Types].xml"}.isdisjoint(names):
            raise UserError(f"is a spreadsheet or a document; {_CSV}", subject=str(path))
        if len(names) != 1:
            listed = ", ".join(names[:5]) or "none"
            problem = f"holds {len(names)} files, expected one text: {listed}; unpack it and pass one"
            raise UserError(problem, subject=str(path))
        return stack.enter_context(archive.open(names[0]))
    for first_bytes, kind in _OTHER_FORMATS.items():
        if start.startswith(first_bytes):
            raise UserError(f"is {kind}", subject=str(path))
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            stream: IO[bytes] = opener(file)
            return stream
    return file


def iter_lines(path: Path) -> Iterator[str | None]:
    """Yield the lines of a UTF-8 file, compressed or alone in a zip archive, and None for a line that is not UTF-8.

    A line ends with LF, or with CRLF as on Windows. In a file without LF it ends with CR, as on old Macs. Other
    characters, such as U+0085 and U+2028, do not end a line, so aligned files stay aligned. Lines may contain NUL
    characters.

    Raises:
        UserError: the file is missing, damaged, empty or not text: half of its first lines contain NUL characters.
    """
    try:
        with ExitStack() as stack:
            yield from decoded_lines(_open(path, stack), str(path))
    except IsADirectoryError as error:
        raise UserError("is a folder; pass a file of sentences", subject=str(path)) from error
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", subject=str(path)) from error
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise UserError(f"is damaged: {error}", subject=str(path)) from error


def decoded_lines(stream: IO[bytes], where: str) -> Iterator[str | None]:
    """Yield the lines of a stream, see `iter_lines`. `where` is its name in errors."""
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), _BLOCK)
    start = buffered.peek()
    # The signature of a tar archive is at byte 257. The suffix is not checked, because a text file may have any.
    if start[257:262] == b"ustar":
        raise UserError("is a tar archive; unpack it, and pass the files that are meant", subject=where)
    with_nul = [b"\0" in line for line in start.split(b"\n")]
    if 2 * sum(with_nul) >= len(with_nul):
        raise UserError("is no text file; expected lines of UTF-8", subject=where)
    # Excel for Mac still ends lines with CR.
    end = "\r" if b"\r" in start and b"\n" not in start else "\n"
    blank = True
    # "utf-8-sig" removes the byte-order mark of Windows programs. With an explicit `newline` only that character ends a
    # line. With "surrogateescape" lines that are not UTF-8 are still counted.
    for text in io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline=end):
        if end == "\r" and "\n" in text:
            problem = "has lines that end in CR and others in LF; save it with one kind of line ends"
            raise UserError(problem, subject=where)
        line = text.removesuffix(end).removesuffix("\r")
        blank = blank and not line.strip()
        yield None if _NOT_DECODED.search(line) else line
    if blank:
        raise UserError("is empty", subject=where)


def text_suffix(path: Path) -> str:
    """Return the suffix of a text file in lower case, without a suffix of compression: .csv for a.csv.gz.

    For a zip archive it is the suffix of the first file in the archive.

    Example:
        >>> text_suffix(Path("pairs.CSV.gz")), text_suffix(Path("pairs"))
        ('.csv', '')
    """
    suffix = path.suffix.lower()
    if suffix == ".zip":
        # A damaged archive raises the error later, when it is read.
        with contextlib.suppress(zipfile.BadZipFile, OSError):
            names = text_members(path)
            return Path(names[0]).suffix.lower() if names else ""
    if suffix in _PACKED:
        return Path(path.stem).suffix.lower()
    return suffix


NAMED = (".jsonl", ".ndjson", ".parquet")
"""Suffixes of files that contain the names of the columns in each row or in a schema."""
TABLE_SUFFIXES = (".csv", ".tsv", *NAMED)
"""Suffixes of files with named columns."""
FORM = ("separator", "quotes")
"""Entries of `columns` that describe the form of a table, not a column."""
SEPARATOR_NAMES = {"\t": "tab", " ": "space", ",": "comma"}
"""Names of separators that are hard to type."""
_DECLARATION = re.compile(r"(?:^|,)\s*([a-z_]+)=")


def parse_columns(text: str | None, uses: Sequence[str] = ()) -> dict[str, str]:
    """Return the name of the column of each declared use.

    Args:
        text: value of the parameter `columns`: USE=COLUMN, separated by commas.
        uses: valid uses, besides `FORM`; by default any.

    Raises:
        UserError: the text has another form, or contains another use.

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
    """Return whether declared columns are names in a header: False if all are numbers, counted from 1."""
    names = [name for use, name in columns.items() if use not in FORM]
    return not names or not all(name.isascii() and name.isdigit() for name in names)


@dataclass
class Table:
    """Rows and columns of a file.

    Attributes:
        where: name of the file, for messages.
        names: names of the columns, or numbers from 1 if the file has no names.
        rows: number of the line or row, from 1, and its cells, one per name.
        faults: unusable lines.
        skipped_lines: number of lines that are neither rows nor faults, by reason: "header" and "blank".
        class_names: class names of the numbers in a column, if the file has them.
    """

    where: str
    names: list[str] = field(default_factory=list)
    rows: list[tuple[int, list[Any]]] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    skipped_lines: dict[str, int] = field(default_factory=dict)
    class_names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Number of lines, without a header and blank lines."""
        return len(self.rows) + len(self.faults)

    def index(self, name: str) -> int:
        """Return the index of a column by its name in any case, or by its number from 1; -1 if there is none."""
        lower_names = [column.strip().lower() for column in self.names]
        # Names before numbers: a column may have the name "2".
        if name.strip().lower() in lower_names:
            return lower_names.index(name.strip().lower())
        if name.isascii() and name.isdigit() and 1 <= int(name) <= len(self.names):
            return int(name) - 1
        return -1


def _csv_rows(lines: Iterable[str | None], faults: Faults, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of separated values (RFC 4180) with the numbers of their first lines, and collect faults."""
    # A quoted cell may span several lines. A row is faulty if any of its lines cannot be decoded.
    last_undecoded = 0

    def texts() -> Iterator[str]:
        nonlocal last_undecoded
        for line_number, line in enumerate(lines, 1):
            if line is None:
                last_undecoded = line_number
            yield f"{line or ''}\n"

    # A separator such as ", " is a comma and a blank that is not part of the cell.
    reader = csv.reader(texts(), strict=True, delimiter=separator[:1], skipinitialspace=separator[1:] == " ")
    number = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # For example, an unclosed quote, whose cell includes all following lines.
            faults.add(f"no CSV: {error}", [number])
        else:
            if last_undecoded >= number:
                faults.add(NOT_UTF8, [number])
            else:
                yield number, cells
        number = reader.line_num + 1


def _has_doubled_quotes(line: str, separator: str) -> bool:
    """Return whether a line is CSV with doubled quotes in a quoted cell, and not text that contains quotes."""
    try:
        cells = next(csv.reader([line], strict=True, delimiter=separator[:1]))
    except csv.Error:
        return False
    return '"' in "".join(cells) and separator.join(cells) != line


def _plain_rows(lines: Iterable[str | None], faults: Faults, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line, and collect faults. Quotes are part of the cells."""
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
        columns: declared columns, see `parse_columns`; "separator" and "quotes" describe how a line is cut into cells.
        comma: whether the default form is CSV, commas with quotes; otherwise it is tabs without quotes.
        header: whether the first line is the names of the columns.
    """
    table = Table(where)
    separator = columns.get("separator", "comma" if comma else "tab")
    separator = {name: mark for mark, name in SEPARATOR_NAMES.items()}.get(separator, separator)
    quoted = columns.get("quotes", "yes" if comma else "no") == "yes"
    rows = (_csv_rows if quoted else _plain_rows)(lines, table.faults, separator)
    for number, cells in rows:
        if not any(cells):
            table.skipped_lines["blank"] = table.skipped_lines.get("blank", 0) + 1
        elif not table.names:
            # A separator at the end of the header adds an empty name, which is not a column.
            while header and not cells[-1].strip():
                cells.pop()
            table.names = cells if header else [str(column) for column in range(1, len(cells) + 1)]
            if header:
                table.skipped_lines["header"] = 1
            else:
                table.rows.append((number, cells))
        elif len(cells) < len(table.names):
            table.faults.add("with fewer cells than the first line", [number])
        # Extra cells may be empty: some programs end a line with a separator.
        elif any(cells[len(table.names) :]):
            table.faults.add("with more cells than the first line", [number])
        else:
            table.rows.append((number, cells[: len(table.names)]))
    return table


def read_json_lines(lines: Iterable[str | None], where: str) -> Table:
    """Read one JSON object per line. The columns are all keys; a missing value is an empty cell."""
    table = Table(where)
    objects: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if line is None:
            table.faults.add(NOT_UTF8, [number])
            continue
        if not line.strip():
            table.skipped_lines["blank"] = table.skipped_lines.get("blank", 0) + 1
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            table.faults.add("no JSON object", [number])
            continue
        objects.append((number, value))
    # From all rows, because a later object may have new keys.
    table.names = list(dict.fromkeys(name for _, value in objects for name in value))
    for number, value in objects:
        table.rows.append((number, [value.get(name, "") for name in table.names]))
    return table


def read_parquet(path: Path) -> Table:
    """Read a Parquet file, and the class names that Hugging Face's `datasets` stores in its metadata."""
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
    """Read a table in the format of its suffix: .csv, .jsonl, .parquet, else tab-separated values.

    Args:
        path: path of the file, which may be compressed.
        columns: declared columns, see `parse_columns`.
        lines: lines of the file, if it is already open, as in an archive.
        header: whether the first line of separated values is the names of the columns; None: see `has_header`.

    Raises:
        UserError: a library is missing; see also `iter_lines`.
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
