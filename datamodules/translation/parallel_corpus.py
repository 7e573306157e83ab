"""Sentence pairs from files, plain, .gz or .zip: tab-separated, or two aligned files. Faulty lines are named."""

import gzip
import io
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from datamodules.errors import UserError
from datamodules.loading.unpacking import MOST_UNPACKED, read_bounded, refusal, unpacked_limit

__all__ = ["Faults", "SentencePairs", "read_aligned", "read_inputs", "read_lines", "read_pairs"]


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

    def settle(self, choice: Literal["error", "skip"], where: str, total: int, parameter: str, more: str = "") -> str:
        """A line to tell the user about what is left out, or nothing where there is no fault.

        Args:
            where: the file.
            total: lines read.
            parameter: whose values are "error" and "skip".
            more: a further hint for the error.

        Raises:
            UserError: there are faults and `choice` is "error".
        """
        if not len(self):
            return ""
        if choice == "error":
            raise UserError(
                f"{where}: {len(self):,} of {total:,} lines cannot be used: {self.describe()}{more}; "
                f'correct them, or pass {parameter}="skip" to leave them out'
            )
        return f"{where}: left out {len(self):,} of {total:,} lines: {self.describe()}"


@dataclass(frozen=True)
class SentencePairs:
    """Both sides of a corpus, as written.

    Args:
        source, target: the sentences.
        numbers: the line of each pair in its file, from 1.
        read: lines read, faulty ones included; empty lines of a tab-separated file are not counted.
        where: what the corpus is called.
        faults: lines that were left out.
    """

    source: list[str]
    target: list[str]
    numbers: list[int]
    read: int
    where: str
    faults: Faults


def _unpacked(path: Path, most: int = MOST_UNPACKED) -> bytes:
    """The bytes of a file, of a compressed file, or of the one text in a zip archive, which has `most` at most."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; pass a file of sentences")
    try:
        data = path.read_bytes()
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
            # manythings.org's archives hold _about.txt beside the sentences, those of a Mac __MACOSX.
            records = [record for record in archive.infolist() if not record.is_dir()]
            records = [r for r in records if not any(part[0] in "_." for part in Path(r.filename).parts)]
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
    return _decoded(_unpacked(path, most), str(path))


def _decoded(data: bytes, where: str) -> list[str | None]:
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


_NOT_UTF8 = "not in UTF-8"
_NO_TAB = "without a tab"
_EMPTY = "with an empty side"


def read_pairs(path: Path) -> SentencePairs:
    """A file with a pair per line, the sides separated by a tab; further columns are ignored.

    Raises:
        UserError: see `read_lines`.
    """
    source, target, numbers, faults, read = [], [], [], Faults(), 0
    for number, line in enumerate(read_lines(path), 1):
        if line is None:
            read += 1
            faults.add(_NOT_UTF8, [number])
            continue
        columns = line.split("\t", 2)
        left = columns[0].strip()
        if len(columns) < 2 and not left:
            continue
        read += 1
        if len(columns) < 2:
            faults.add(_NO_TAB, [number])
        elif left and (right := columns[1].strip()):
            source.append(left)
            target.append(right)
            numbers.append(number)
        else:
            faults.add(_EMPTY, [number])
    return SentencePairs(source, target, numbers, read, str(path), faults)


def read_aligned(source_path: Path, target_path: Path) -> SentencePairs:
    """Two files whose lines belong together.

    Raises:
        UserError: see `read_lines`.
    """
    sides = read_lines(source_path), read_lines(target_path)
    source, target, numbers, faults = [], [], [], Faults()
    for number, (left, right) in enumerate(zip(*sides), 1):
        if left is None or right is None:
            faults.add(_NOT_UTF8, [number])
        elif (left := left.strip()) and (right := right.strip()):
            source.append(left)
            target.append(right)
            numbers.append(number)
        else:
            faults.add(_EMPTY, [number])
    counts = len(sides[0]), len(sides[1])
    longer, other = (source_path, target_path) if counts[0] > counts[1] else (target_path, source_path)
    surplus = range(min(counts) + 1, max(counts) + 1)
    faults.add(f"in {longer} only, which has {max(counts):,} lines, and {other} {min(counts):,}", surplus)
    return SentencePairs(source, target, numbers, max(counts), f"{source_path} and {target_path}", faults)


def read_inputs(inputs: Sequence[str]) -> list[tuple[str, str]]:
    """Sentences to translate, each after a few words on where it stands; blank lines of files are left out.

    Raises:
        UserError: there is no sentence, or a file cannot be read.
    """
    found: list[tuple[str, str]] = []
    for text in inputs:
        lines: list[str | None]
        if text == "-":
            # Bytes: how Python reads text there depends on the locale, and some let other encodings pass as junk.
            where, lines = "standard input", _decoded(sys.stdin.buffer.read(), "standard input")
        elif text.startswith("@") or (text.endswith(".txt") and Path(text).is_file()):
            where = text.removeprefix("@")
            lines = read_lines(Path(where).expanduser())
        else:
            found.append((f"the sentence {text!r}", text.replace("\n", " ")))
            continue
        for number, line in enumerate(lines, 1):
            if line is None:
                raise UserError(f"line {number} of {where} is not in UTF-8; save the file as UTF-8")
            if line.strip():
                found.append((f"line {number} of {where}", line))
    if not found:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return found
