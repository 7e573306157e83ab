"""Text files, plain, .gz or .zip: their lines, tables in them, and which lines cannot be used."""

import contextlib
import csv
import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from datamodules.errors import UserError
from datamodules.loading.unpacking import MOST_UNPACKED, read_bounded, refusal, unpacked_limit

__all__ = ["NOT_UTF8", "Faults", "csv_rows", "decoded_lines", "read_lines", "text_suffix"]

NOT_UTF8 = "not in UTF-8"
"""Why a line cannot be used."""


@dataclass
class Faults:
    """Lines that cannot be used, by reason.

    Example:
        >>> faults = Faults()
        >>> faults.add("without a tab", [3, 17])
        >>> faults.describe()
        '2 without a tab (lines 3, 17)'
    """

    lines: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def add(self, reason: str, numbers: Sequence[int]) -> None:
        """Note lines, counted from 1."""
        if numbers:
            self.lines.setdefault(reason, []).extend(numbers)

    def describe(self, shown: int = 5) -> str:
        """How many lines for which reasons, with the numbers of the first `shown` of each."""
        parts = []
        for reason, numbers in self.lines.items():
            first = ", ".join(map(str, sorted(numbers)[:shown])) + (", ..." if len(numbers) > shown else "")
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


def _unpacked(path: Path, most: int = MOST_UNPACKED) -> bytes:
    """The bytes of a file, of a compressed file, or of the one text in a zip archive, which has `most` at most."""
    try:
        data = path.read_bytes()
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder; pass a file of sentences") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    limit = unpacked_limit(len(data), most)
    try:
        if data[:2] == b"\x1f\x8b":
            return bytes(read_bounded(gzip.GzipFile(fileobj=io.BytesIO(data)), path, len(data), limit))
        if data[:4] != b"PK\x03\x04":
            return data
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = _records(archive)
            if len(records) != 1:
                listed = ", ".join(record.filename for record in records[:5]) or "none"
                raise UserError(f"{path} holds {len(records)} files, expected one: {listed}; unpack it and pass one")
            if records[0].file_size > limit:
                raise refusal(path, len(data), f"{records[0].file_size:,}", limit)
            with archive.open(records[0]) as stream:
                return bytes(read_bounded(stream, path, len(data), limit))
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def read_lines(path: Path, most: int = MOST_UNPACKED) -> list[str | None]:
    """The lines of a UTF-8 file (or UTF-16 with its mark); None where one is not UTF-8. Ends with CRLF are fine.

    Args:
        most: bytes that a compressed file may unpack to; see `unpacked_limit`.

    Raises:
        UserError: the file is missing, damaged, empty or no text, or unpacks to too much.
    """
    return decoded_lines(_unpacked(path, most), str(path))


def decoded_lines(data: bytes, where: str) -> list[str | None]:
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        if b"\0" in data:
            raise UserError(f"{where} is no text file; expected lines of UTF-8") from None
        # A tab or line break is no part of a longer character in UTF-8, so lines can be read one by one.
        lines: list[str | None] = []
        for line in data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n"):
            try:
                lines.append(line.removesuffix(b"\r").decode("utf-8"))
            except UnicodeDecodeError:
                lines.append(None)
        return lines
    if not text.strip():
        raise UserError(f"{where} is empty")
    if "\0" in text:
        raise UserError(f"{where} is no text file; expected lines of UTF-8")
    # Not splitlines(), which also splits at characters that occur inside sentences.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


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
    packed = path.suffix.lower() in (".gz", ".zip")
    return Path(path.stem).suffix.lower() if packed else path.suffix.lower()


def _delimiter(lines: Sequence[str | None]) -> str:
    """What separates the values: what cuts the first lines into equally many, two or more."""
    first = [line for line in lines[:30] if line and line.strip()]
    for mark in ",;\t":
        with contextlib.suppress(csv.Error):  # It is raised again, with its line, where the rows are read.
            if len(counts := {len(row) for row in csv.reader(first, delimiter=mark)}) == 1 and max(counts) > 1:
                return mark
    return ","


def csv_rows(lines: Sequence[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """The rows of comma-separated values (RFC 4180), each with the number of its first line, counted from 1.

    Cells may be quoted, and then hold line breaks, which become spaces. Values that are separated by semicolons or tabs
    are read, too.

    Args:
        lines: None where one is not UTF-8.
        faults: gets the lines of rows that cannot be read.
    """
    reader = csv.reader([f"{line or ''}\n" for line in lines], delimiter=_delimiter(lines), strict=True)
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
            if any(line is None for line in lines[number - 1 : reader.line_num]):
                faults.add(NOT_UTF8, [number])
            else:
                yield number, [" ".join(cell.split()) for cell in cells]
        number = reader.line_num + 1
