"""Text files, plain, .gz, .bz2, .xz, .zst or alone in a .zip: their lines, and which lines cannot be used."""

import bz2
import contextlib
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

from datamodules.errors import UserError

NOT_UTF8 = "not in UTF-8"
"""Why a line cannot be used."""

_BLOCK = 1 << 16  # Bytes that are read at a time, and that tell text from other files.
_NOT_DECODED = re.compile("[\udc80-\udcff]")  # What Python puts in place of bytes that are not UTF-8.
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def _open_zst(file: IO[bytes]) -> IO[bytes]:
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

    def raise_or_report(
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


def text_members(path: Path) -> list[str]:
    """The files in a zip archive: manythings.org's hold _about.txt beside the sentences, those of a Mac __MACOSX."""
    with zipfile.ZipFile(path) as archive:
        names = [record.filename for record in archive.infolist() if not record.is_dir()]
    return [name for name in names if not any(part[0] in "_." for part in Path(name).parts)]


def _refuse_other_formats(path: Path, start: bytes, names: Sequence[str] = ()) -> None:
    """Refuse a file of another program by its first bytes, or by the names in its archive."""
    kind = ""
    if "mimetype" in names or "[Content_Types].xml" in names:
        kind = "a spreadsheet or a document; save its table as CSV in UTF-8"
    elif start.startswith(b"\xd0\xcf\x11\xe0"):
        kind = "a file of an old Excel or Word; save its table as CSV in UTF-8"
    elif start.startswith(b"PAR1"):
        kind = "a Parquet file; give it the ending .parquet"
    elif start.startswith(b"%PDF"):
        kind = "a PDF; pass its text"
    elif start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        kind = "no text file: its text is in UTF-16; expected lines of UTF-8"
    if kind:
        raise UserError(f"{path} is {kind}")


def _refuse_tar(path: Path) -> None:
    """Refuse an archive of several texts, compressed or not: they are not one corpus."""
    # By its content: a file of text is none, however it is called.
    if not tarfile.is_tarfile(path):
        return
    with tarfile.open(path) as archive:
        names = [member.name for member in archive if member.isfile()]
    if names:
        listed = ", ".join(names[:5])
        raise UserError(
            f"{path} is a tar archive of {len(names)} files: {listed}; unpack it and pass those that are meant"
        )


def _open(path: Path, opened: ExitStack, member: str = "") -> IO[bytes]:
    """A stream of the bytes of a file, of a compressed file, or of a text in a zip archive: of the only one in it."""
    file = opened.enter_context(path.open("rb"))
    start = file.peek(8)
    if start.startswith(b"PK\x03\x04"):
        archive = opened.enter_context(zipfile.ZipFile(file))
        names = text_members(path)
        _refuse_other_formats(path, start, names)
        if not member and len(names) != 1:
            listed = ", ".join(names[:5]) or "none"
            raise UserError(f"{path} holds {len(names)} files, expected one text: {listed}; unpack it and pass one")
        return opened.enter_context(archive.open(member or names[0]))
    _refuse_other_formats(path, start)
    if file.peek(512)[257:262] == b"ustar":
        _refuse_tar(path)
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            _refuse_tar(path)
            stream: IO[bytes] = opener(file)
            return stream
    return file


@contextlib.contextmanager
def reading(path: Path, member: str = "") -> Iterator[IO[bytes]]:
    """The bytes of a text file, of a compressed one, or of one in a zip archive; what fails is told with its name.

    Args:
        member: the name of a file in the archive; by default the only one.

    Raises:
        UserError: the file is missing or damaged, or holds something else.
    """
    try:
        with ExitStack() as opened:
            yield _open(path, opened, member)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder; pass a file of sentences") from error
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def iter_lines(path: Path, member: str = "") -> Iterator[str | None]:
    """The lines of a UTF-8 file, one after the other; None where one is not UTF-8.

    A line ends with LF or CRLF, as in Windows; in a file without these with CR, as on old Macs. Nothing else ends a
    line, such as U+0085 and U+2028, so that aligned files stay aligned. Lines may hold NUL characters.

    Args:
        member: of an archive, see `reading`.

    Raises:
        UserError: the file is missing, damaged, empty or no text: half of its first lines hold NUL characters.
    """
    with reading(path, member) as stream:
        yield from decoded_lines(stream, str(path))


def decoded_lines(stream: IO[bytes], where: str) -> Iterator[str | None]:
    """The lines of a stream, see `iter_lines`; `where` names it in errors."""
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), _BLOCK)
    start = buffered.peek()
    with_nul = [b"\0" in line for line in start.split(b"\n")]
    if 2 * sum(with_nul) >= len(with_nul):
        raise UserError(f"{where} is no text file; expected lines of UTF-8")
    # Excel for the Mac still offers such files.
    end = "\r" if b"\r" in start and b"\n" not in start else "\n"
    blank = True
    for text in io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline=end):
        if end == "\r" and "\n" in text:
            raise UserError(f"{where} has lines that end in CR and others in LF; save it with one kind of line ends")
        line = text.removesuffix(end).removesuffix("\r")
        blank = blank and not line.strip()
        yield None if _NOT_DECODED.search(line) else line
    if blank:
        raise UserError(f"{where} is empty")


def text_suffix(path: Path) -> str:
    """The ending of a text file in lower case, that of the text in a compressed one: ".csv" of pairs.csv.gz.

    Of an archive it is that of the first file in it.

    Example:
        >>> text_suffix(Path("pairs.CSV.gz")), text_suffix(Path("pairs"))
        ('.csv', '')
    """
    suffix = path.suffix.lower()
    if suffix == ".zip":
        # A damaged one is refused where it is read.
        with contextlib.suppress(zipfile.BadZipFile, OSError):
            return next((Path(name).suffix.lower() for name in text_members(path)), "")
    return Path(path.stem).suffix.lower() if suffix in _PACKED else suffix
