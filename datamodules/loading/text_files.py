"""Reads lines of text files, also .gz, .bz2, .xz, .zst or single files in a .zip, and collects faulty lines."""

import bz2
import contextlib
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

from datamodules.errors import UserError, spelled

NOT_UTF8 = "not in UTF-8"
"""Reason of a fault."""

_BLOCK = 1 << 16  # Bytes per read. The first block also decides whether a file is text.
# Characters that "surrogateescape" puts in place of bytes that are not UTF-8.
_NOT_DECODED = re.compile("[\udc80-\udcff]")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def _open_zst(file: IO[bytes]) -> IO[bytes]:
    # pyarrow, since Python itself reads zstd from version 3.14 on only.
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{file.name} is compressed by zstd; unpack it with zstd -d, or pip install pyarrow") from error
    stream: IO[bytes] = pyarrow.CompressedInputStream(file, "zstd")
    return stream


_OPENERS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zst,
}
"""Function that opens a compressed file, by the first bytes of the file. Names may have a wrong suffix."""


@dataclass
class Faults:
    """Numbers of the lines that cannot be used, by reason."""

    lines: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def add(self, reason: str, numbers: Sequence[int]) -> None:
        """Add numbers of lines, counted from 1."""
        if numbers:
            self.lines.setdefault(reason, []).extend(numbers)

    def describe(self) -> str:
        """Return the number of lines for each reason, with the numbers of the first five."""
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
        """Return a line about the lines that are left out, "" if there is no fault, or raise an error.

        Args:
            choice: "error" raises if there are faults, "skip" leaves them out.
            where: name of the file.
            total: number of lines read.
            parameter: name of the parameter whose value is `choice`, or None.
            more: a further hint for the error.

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
    """Return the names of the files in a zip archive, without those that begin with "_" or "."."""
    with zipfile.ZipFile(path) as archive:
        names = [member.filename for member in archive.infolist() if not member.is_dir()]
    # Archives of manythings.org have _about.txt beside the sentences, and those written on a Mac have __MACOSX.
    return [name for name in names if not any(component[0] in "_." for component in Path(name).parts)]


_CSV = "save its table as CSV in UTF-8"
_OTHER_FORMATS = {
    b"\xd0\xcf\x11\xe0": f"a file of an old Excel or Word; {_CSV}",
    b"PAR1": "a Parquet file; give it the ending .parquet",
    b"%PDF": "a PDF; pass its text",
    b"\xff\xfe": "no text file: its text is in UTF-16; expected lines of UTF-8",
    b"\xfe\xff": "no text file: its text is in UTF-16; expected lines of UTF-8",
}
"""What a file of another program is, by its first bytes."""


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    """Open a file, a compressed file, or the only file of a zip archive, as a stream of bytes."""
    file = stack.enter_context(path.open("rb"))
    start = file.peek(8)
    if start.startswith(b"PK\x03\x04"):
        archive = stack.enter_context(zipfile.ZipFile(file))
        names = text_members(path)
        # Members of the archives that spreadsheets and documents of LibreOffice and Office are.
        if not {"mimetype", "[Content_Types].xml"}.isdisjoint(names):
            raise UserError(f"{path} is a spreadsheet or a document; {_CSV}")
        if len(names) != 1:
            listed = ", ".join(names[:5]) or "none"
            raise UserError(f"{path} holds {len(names)} files, expected one text: {listed}; unpack it and pass one")
        return stack.enter_context(archive.open(names[0]))
    for first_bytes, kind in _OTHER_FORMATS.items():
        if start.startswith(first_bytes):
            raise UserError(f"{path} is {kind}")
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            stream: IO[bytes] = opener(file)
            return stream
    return file


def iter_lines(path: Path) -> Iterator[str | None]:
    """Yield the lines of a UTF-8 file, compressed or alone in a zip archive, and None for a line that is not UTF-8.

    A line ends with LF or with CRLF, as on Windows. In a file without LF it ends with CR, as on old Macs. Other
    characters such as U+0085 and U+2028 do not end a line, so that aligned files stay aligned. Lines may hold NUL
    characters.

    Raises:
        UserError: the file is missing, damaged, empty or not a text: half of its first lines hold NUL characters.
    """
    try:
        with ExitStack() as stack:
            yield from decoded_lines(_open(path, stack), str(path))
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder; pass a file of sentences") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def decoded_lines(stream: IO[bytes], where: str) -> Iterator[str | None]:
    """Yield the lines of a stream, see `iter_lines`. Errors name it as `where`."""
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), _BLOCK)
    start = buffered.peek()
    # The signature of a tar archive is at byte 257, and the text of a plain file may have any suffix.
    if start[257:262] == b"ustar":
        raise UserError(f"{where} is a tar archive; unpack it, and pass the files that are meant")
    with_nul = [b"\0" in line for line in start.split(b"\n")]
    if 2 * sum(with_nul) >= len(with_nul):
        raise UserError(f"{where} is no text file; expected lines of UTF-8")
    # Excel for the Mac still writes lines that end with CR.
    end = "\r" if b"\r" in start and b"\n" not in start else "\n"
    blank = True
    # "utf-8-sig" removes the byte-order mark that programs of Windows write. With an explicit `newline` only that
    # character ends a line. "surrogateescape" keeps lines that are not UTF-8 countable.
    for text in io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline=end):
        if end == "\r" and "\n" in text:
            raise UserError(f"{where} has lines that end in CR and others in LF; save it with one kind of line ends")
        line = text.removesuffix(end).removesuffix("\r")
        blank = blank and not line.strip()
        yield None if _NOT_DECODED.search(line) else line
    if blank:
        raise UserError(f"{where} is empty")


def text_suffix(path: Path) -> str:
    """Return the suffix of a text file in lower case. For a compressed file it is that of the text: .csv for a.csv.gz.

    For a zip archive it is the suffix of the first file in it.

    Example:
        >>> text_suffix(Path("pairs.CSV.gz")), text_suffix(Path("pairs"))
        ('.csv', '')
    """
    suffix = path.suffix.lower()
    if suffix == ".zip":
        # A damaged archive raises an error when it is read.
        with contextlib.suppress(zipfile.BadZipFile, OSError):
            names = text_members(path)
            return Path(names[0]).suffix.lower() if names else ""
    if suffix in _PACKED:
        return Path(path.stem).suffix.lower()
    return suffix
