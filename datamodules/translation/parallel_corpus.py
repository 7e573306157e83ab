"""Sentence pairs from files, plain, .gz or .zip: tab-separated, or two aligned files. Faulty lines are named."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datamodules.errors import UserError
from datamodules.loading.text_files import NOT_UTF8, Faults, decoded_lines, read_lines

__all__ = ["SentencePairs", "read_aligned", "read_inputs", "read_pairs"]


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
            faults.add(NOT_UTF8, [number])
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
            faults.add(NOT_UTF8, [number])
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
            where, lines = "standard input", decoded_lines(sys.stdin.buffer.read(), "standard input")
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
