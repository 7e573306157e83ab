"""Sentence pairs from files, also compressed: a pair in each line, or aligned files; faulty lines are named."""

import io
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_only

from datamodules.errors import UserError
from datamodules.loading.text_files import (
    NOT_UTF8,
    Faults,
    aligned_texts,
    csv_rows,
    decoded_lines,
    iter_lines,
    text_suffix,
)
from datamodules.translation.columns import choose_columns, is_header

__all__ = ["LONGEST_INPUT", "GivenSentence", "Pair", "SentencePairs", "read_aligned", "read_inputs", "read_pairs"]

LONGEST_INPUT = 100_000
"""Bytes in UTF-8 of a sentence to validate, test or predict on, at most."""
_LOOKED_AT = 200  # Lines that tell what a file holds.

_warn = rank_zero_only(logging.getLogger("lightning_recipes").warning)


class Pair(NamedTuple):
    """A sentence and its translation, as written.

    Args:
        number: of its line, from 1.
    """

    number: int
    source: str
    target: str


@dataclass
class SentencePairs:
    """The pairs of one place.

    Args:
        where: what the place is called.
        pairs: they are not faulty.
        faults: lines that cannot be used.
        apart: lines that are no pairs and no faults, by reason: "header" and "blank".
        header: the number of the line that names the columns, or 0.
        columns: what source and target are called in the file, where they were chosen.
    """

    where: str
    pairs: list[Pair] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    header: int = 0
    columns: tuple[str, ...] = ()

    def reversed(self) -> "SentencePairs":
        """The pairs with source and target exchanged."""
        pairs = [Pair(number, target, source) for number, source, target in self.pairs]
        return replace(self, pairs=pairs, columns=self.columns[::-1])

    def describe_columns(self) -> str:
        """Which columns were chosen, with a pair as an example, for the user; nothing where there was no choice."""
        if not self.columns:
            return ""
        header = f"line {self.header} is a header and no pair: " if self.header else ""
        pair = (f"{side[:60]}..." if len(side) > 60 else side for side in self.pairs[0][1:]) if self.pairs else ()
        example = ", as in {!r} and {!r}".format(*pair) if self.pairs else ""
        return "{}: {}the source is {}, the target {}{}".format(self.where, header, *self.columns, example)

    @property
    def read(self) -> int:
        """Lines that were read, all of them."""
        return len(self.pairs) + len(self.faults) + sum(self.apart.values())


_NO_TAB = "without a tab"
_NO_COLUMN = "without one of the two columns"
_NO_OBJECT = "without a JSON object of two texts"
_EMPTY = "with an empty side"
_JSON = (".jsonl", ".ndjson", ".json")


def _sentence_lines(path: Path, member: str | None = None) -> Iterator[str | None]:
    """The lines of a file, see `iter_lines`.

    Raises:
        UserError: most of its first lines are markup.
    """
    lines = iter_lines(path, member)
    first = list(itertools.islice(lines, _LOOKED_AT))
    texts = [line.strip() for line in first if line and line.strip()]
    tagged = sum(text.startswith("<") and text.endswith(">") for text in texts)
    if 2 * tagged > len(texts) and any("</" in text for text in texts):
        raise UserError(
            f"{path} holds markup, as in {texts[0][:60]!r}; expected a sentence, or a pair, in each line: write what is"
            ' between the tags so, or, of OPUS, take the files in "moses" format'
        )
    return itertools.chain(first, lines)


def _unquoted(cell: str, all_quoted: bool) -> str:
    """A cell without the quotes that pandas puts around it: those inside are doubled, or else all cells have some."""
    inside = cell[1:-1]
    if re.fullmatch(r'"(?:[^"]|"")*"', cell) and (all_quoted or '""' in inside):
        return inside.replace('""', '"')
    return cell


def _tab_rows(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    lines = iter(lines)
    first = list(itertools.islice(lines, _LOOKED_AT))
    cells = [cell for line in first if line and line.strip() for cell in line.split("\t")]
    all_quoted = all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
    for number, line in enumerate(itertools.chain(first, lines), 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            cells = line.split("\t")
            yield number, [_unquoted(cell, all_quoted) for cell in cells] if '"' in line else cells


def _objects(lines: Iterable[str | None], where: str, faults: Faults) -> Iterator[tuple[int, dict[str, Any]]]:
    """JSON lines; of ``{"translation": {"en": ..., "fr": ...}}``, as data sets of Hugging Face are, what is in it."""
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
            continue
        if number == 1 and line.lstrip().startswith("["):
            form = "an object in each line, as jq -c '.[]' writes them"
            raise UserError(f"{where} holds one JSON array; expected {form}")
        try:
            value = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and isinstance(inner := value.get("translation"), dict):
            value = inner
        if isinstance(value, dict):
            yield number, value
        else:
            faults.add(_NO_OBJECT, [number])


def _json_rows(lines: Iterable[str | None], where: str, faults: Faults) -> Iterator[tuple[int, Sequence[str | None]]]:
    """The objects as a table: row 0 is the texts' keys in the first object; None stands for what is no text."""
    keys: list[str] = []
    for number, value in _objects(lines, where, faults):
        texts = [key for key, text in value.items() if isinstance(text, str)]
        if not keys and len(texts) > 1:
            keys = texts
            yield 0, keys
        if value and not keys:
            faults.add(_NO_OBJECT, [number])
        else:
            sides = (value.get(key) for key in keys if value)
            yield number, [" ".join(side.split()) if isinstance(side, str) else None for side in sides]


def read_pairs(path: Path, columns: Sequence[str] | None = None) -> SentencePairs:
    """A file with a pair in each line: JSON lines (.jsonl), comma-separated values (.csv), else separated by tabs.

    A zip archive with the two aligned texts of OPUS, such as Books.de-en.de and Books.de-en.en, is read, too.

    Args:
        columns: names, or numbers from 1, of the source and the target; by default the names in the first line and what
            the columns hold tell them, see `choose_columns`. Where that line names columns, it is a header.

    Raises:
        UserError: see `iter_lines`; or the lines are markup; or there are no such columns, or no two of sentences.
    """
    if texts := aligned_texts(path):
        return read_aligned(path, path, texts)
    found = SentencePairs(str(path))
    lines, kind, where, faults, apart = _sentence_lines(path), text_suffix(path), str(path), found.faults, found.apart
    rows: Iterator[tuple[int, Sequence[str | None]]]
    if kind in _JSON:
        rows, short = _json_rows(lines, where, faults), _NO_OBJECT
    elif kind == ".csv":
        rows, short = csv_rows(lines, faults), _NO_COLUMN
    else:
        rows, short = _tab_rows(lines, faults), _NO_COLUMN if columns else _NO_TAB
    first = list(itertools.islice(rows, _LOOKED_AT))
    table = [(number, [cell or "" for cell in cells]) for number, cells in first]
    table = [row for row in table if any(map(str.strip, row[1]))]
    places, header = (0, 1), -1
    if table:
        number, names = table[0]
        sample = [cells for _, cells in table[1:]]
        places = choose_columns(names, columns, where, sample)
        named = columns is not None and not all(column.isdigit() for column in columns)
        if number == 0 or named or is_header(names, places, sample):
            header = found.header = number
            apart |= {"header": 1} if number else {}
        found.columns = tuple(repr(names[i].strip()) if header >= 0 else f"column {i + 1}" for i in places)
    _take_pairs(found, (row for row in itertools.chain(first, rows) if row[0] != header), places, short)
    return found


def _take_pairs(
    found: SentencePairs, rows: Iterable[tuple[int, Sequence[str | None]]], places: tuple[int, int], short: str
) -> None:
    """Add pairs, blank lines and faults; `short` is the fault of a row without one of the cells, or with None in it."""
    for number, cells in rows:
        left, right = (cells[place] if place < len(cells) else None for place in places)
        if all(cell is not None and not cell.strip() for cell in cells):
            found.apart["blank"] = found.apart.get("blank", 0) + 1
        elif left is None or right is None:
            found.faults.add(short, [number])
        elif (left := left.strip()) and (right := right.strip()):
            found.pairs.append(Pair(number, left, right))
        else:
            found.faults.add(_EMPTY, [number])


def read_aligned(
    source_path: Path, target_path: Path, members: tuple[str, str] | tuple[None, None] = (None, None)
) -> SentencePairs:
    """Two files whose lines belong together; lines that are blank on both sides are no pairs.

    Args:
        members: where the files are archives, the texts in them.

    Raises:
        UserError: see `iter_lines`; or the lines are markup; or one file has more lines. None of their pairs can be
            trusted then, so no setting skips it.
    """
    paths = source_path, target_path
    names = [f"{member or path}" for path, member in zip(paths, members, strict=True)]
    found = SentencePairs(str(source_path) if members[0] else " and ".join(names))
    found.columns = tuple(names) if members[0] else ()
    sources, targets = (list(_sentence_lines(path, member)) for path, member in zip(paths, members, strict=True))
    if len(sources) != len(targets):
        raise UserError(
            f"{names[0]} has {len(sources):,} lines and {names[1]} {len(targets):,}, so their lines do not belong"
            " together; pass two files of which each line is the translation of the other's"
        )
    _take_pairs(found, enumerate(zip(sources, targets, strict=True), 1), (0, 1), NOT_UTF8)
    return found


class GivenSentence(NamedTuple):
    """A sentence to translate, or what was given in place of one.

    Args:
        where: the sentence itself, or its line and file.
        problem: why there is no sentence.
    """

    where: str
    text: str
    problem: str = ""


def given_sentence(where: str, text: str) -> GivenSentence:
    """A sentence to translate, or why it cannot be one."""
    if "\0" in text:
        return GivenSentence(where, "", f"{where} holds a NUL character; correct it")
    if (size := len(text.encode(errors="replace"))) > LONGEST_INPUT:
        return GivenSentence(where, "", f"{where[:60]} has {size:,} bytes, more than {LONGEST_INPUT:,}; split it")
    return GivenSentence(where, text)


def _sentences_of(where: str, lines: Iterable[str | None]) -> Iterator[GivenSentence]:
    for number, line in enumerate(lines, 1):
        place = f"line {number} of {where}"
        if line is None:
            yield GivenSentence(place, "", f"{place} is not in UTF-8; save the file as UTF-8")
        else:
            yield given_sentence(place, line.strip())


def _sentences_in(path: Path) -> list[GivenSentence]:
    """The sentences of a file, or of the text files in a folder."""
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            return [GivenSentence(str(path), "", f"the folder {path} holds no .txt files")]
        if left_out := sorted(file.name for file in path.rglob("*") if file.is_file() and file not in files):
            _warn(f"note: {path}: left out {len(left_out)} files that do not end in .txt: {', '.join(left_out[:5])}")
    found: list[GivenSentence] = []
    for file in files:
        try:
            found += _sentences_of(str(file), _sentence_lines(file))
        except UserError as error:
            found.append(GivenSentence(str(file), "", str(error)))
    return found


def read_inputs(inputs: Sequence[str]) -> list[GivenSentence]:
    """Sentences to translate, also the blank lines of files; a file that cannot be read is one with a problem.

    Args:
        inputs: sentences; "-" for standard input; "@FILE", names of .txt files and of any that exist, and folders of
            .txt files.

    Raises:
        UserError: there is no sentence.
    """
    found: list[GivenSentence] = []
    for text in inputs:
        is_listed = text.startswith("@") or (text.endswith(".txt") and " " not in text)
        # Path.exists raises for texts that are longer than a name may be.
        exists = os.path.exists(text)  # noqa: PTH110
        if text == "-":
            # Bytes: how Python reads text there depends on the locale, and some let other encodings pass as junk.
            given = io.BytesIO(sys.stdin.buffer.read())
            found += _sentences_of("standard input", decoded_lines(given, "standard input"))
        elif is_listed or exists:
            of_file = _sentences_in(Path(text.removeprefix("@")).expanduser())
            if not is_listed and os.path.isfile(text):  # noqa: PTH113
                _warn(f"note: {text} is a file: its {len(of_file):,} lines are translated")
            found += of_file
        else:
            found.append(given_sentence(text, text))
    if not found:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return found
