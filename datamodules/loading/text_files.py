"""Text files, plain, .gz, .bz2, .xz or .zip: their lines, tables in them, and which lines cannot be used."""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

from datamodules.errors import UserError

NOT_UTF8 = "not in UTF-8"
"""Why a line cannot be used."""

_BLOCK = 1 << 16  # Bytes that are read at a time, and that tell text from other files.
_NOT_DECODED = re.compile("[\udc80-\udcff]")  # What Python puts in place of bytes that are not UTF-8.
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""By the first bytes of a compressed file, what reads it."""


@dataclass
class Faults:
    """Lines that cannot be used, by reason."""

    lines: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def add(self, reason: str, numbers: Sequence[int]) -> None:
        """Note lines, counted from 1."""
        if numbers:
            self.lines.setdefault(reason, []).extend(numbers)

    def describe(self) -> str:
        """How many lines for which reasons, with the numbers of the first five of each."""
        parts = []
        for reason, numbers in self.lines.items():
            first = ", ".join(map(str, sorted(numbers)[:5])) + (", ..." if len(numbers) > 5 else "")
            parts.append(f"{len(numbers):,} {reason} (line{'s' if len(numbers) > 1 else ''} {first})")
        return "; ".join(parts)

    def settle(
        self, choice: Literal["error", "skip"], where: str, total: int, parameter: str | None, more: str = ""
    ) -> str:
        """A line to tell the user about what is left out, or nothing where there is no fault.

        Args:
            where: the file.
            total: lines read.
            parameter: whose values are "error" and "skip", if there is one.
            more: a further hint for the error.

        Raises:
            UserError: there are faults and `choice` is "error".
        """
        if not len(self):
            return ""
        if choice == "error":
            skip = f', or pass {parameter}="skip" to leave them out' if parameter else ""
            raise UserError(
                f"{where}: {len(self):,} of {total:,} lines cannot be used: {self.describe()}{more}; correct them{skip}"
            )
        return f"{where}: left out {len(self):,} of {total:,} lines: {self.describe()}"


def _records(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files in an archive: manythings.org's hold _about.txt beside the sentences, those of a Mac __MACOSX."""
    records = [record for record in archive.infolist() if not record.is_dir()]
    return [record for record in records if not any(part[0] in "_." for part in Path(record.filename).parts)]


def _open(path: Path, opened: ExitStack) -> IO[bytes]:
    """A stream of the bytes of a file, of a compressed file, or of the one text in a zip archive."""
    file = opened.enter_context(path.open("rb"))
    start = file.peek(6)
    if start.startswith(b"PK\x03\x04"):
        archive = opened.enter_context(zipfile.ZipFile(file))
        records = _records(archive)
        if len(records) != 1:
            listed = ", ".join(record.filename for record in records[:5]) or "none"
            raise UserError(f"{path} holds {len(records)} files, expected one text: {listed}; unpack it and pass one")
        return opened.enter_context(archive.open(records[0]))
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            stream: IO[bytes] = opener(file)
            return stream
    return file


def iter_lines(path: Path) -> Iterator[str | None]:
    """The lines of a UTF-8 file, one after the other; None where one is not UTF-8.

    A line ends with LF or CRLF, as in Windows. Nothing else ends a line, such as U+0085 and U+2028, so that aligned
    files stay aligned. Lines may hold NUL characters.

    Raises:
        UserError: the file is missing, damaged, empty or no text: half of its first lines hold NUL characters.
    """
    try:
        with ExitStack() as opened:
            yield from decoded_lines(_open(path, opened), str(path))
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder; pass a file of sentences") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def decoded_lines(stream: IO[bytes], where: str) -> Iterator[str | None]:
    """The lines of a stream, see `iter_lines`; `where` names it in errors."""
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), _BLOCK)
    with_nul = [b"\0" in line for line in buffered.peek().split(b"\n")]
    if 2 * sum(with_nul) >= len(with_nul):
        raise UserError(f"{where} is no text file; expected lines of UTF-8")
    blank = True
    for text in io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline="\n"):
        line = text.removesuffix("\n").removesuffix("\r")
        blank = blank and not line.strip()
        yield None if _NOT_DECODED.search(line) else line
    if blank:
        raise UserError(f"{where} is empty")


def text_suffix(path: Path) -> str:
    """The ending of a text file in lower case, that of the text in a compressed one: ".csv" of pairs.csv.gz.

    Of an archive it is that of the file in it.

    Example:
        >>> text_suffix(Path("pairs.CSV.gz")), text_suffix(Path("pairs"))
        ('.csv', '')
    """
    if path.suffix.lower() == ".zip":
        # A damaged one is refused where it is read.
        with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
            return next((Path(record.filename).suffix.lower() for record in _records(archive)), "")
    packed = path.suffix.lower() in (".gz", ".bz2", ".xz", ".zip")
    return Path(path.stem).suffix.lower() if packed else path.suffix.lower()


def csv_rows(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """The rows of comma-separated values (RFC 4180), each with the number of its first line, counted from 1.

    Cells may be quoted, and then hold line breaks, which become spaces. Values are separated by what the first line has
    most of: commas, semicolons or tabs.

    Args:
        lines: None where one is not UTF-8.
        faults: gets the lines of rows that cannot be read.
    """
    lines = iter(lines)
    first = next(lines, "")
    last_undecoded = 0

    def texts() -> Iterator[str]:
        nonlocal last_undecoded
        for at, line in enumerate(itertools.chain([first], lines), 1):
            if line is None:
                last_undecoded = at
            yield f"{line or ''}\n"

    reader = csv.reader(texts(), delimiter=max(",;\t", key=(first or "").count), strict=True)
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
                yield number, [" ".join(cell.split()) for cell in cells]
        number = reader.line_num + 1
