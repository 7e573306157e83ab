"""Sentence pairs from files, also compressed: a pair in each line, or aligned files; faulty lines are named."""

import io
import itertools
import lzma
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from datamodules.errors import UserError
from datamodules.loading.text_files import NOT_UTF8, Faults, csv_rows, decoded_lines, iter_lines, text_suffix
from datamodules.notes import warn

LONGEST_INPUT = 100_000
"""Bytes in UTF-8 of a sentence to validate, test or predict on, at most."""
BUNDLED_TITLE = "bundled artificial French-English sentences"
_LOOKED_AT = 200  # Lines that tell what a file holds.


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
        columns: what source and target are called in the file.
    """

    where: str
    pairs: list[Pair] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    def reversed(self) -> "SentencePairs":
        """The pairs with source and target exchanged."""
        pairs = [Pair(number, target, source) for number, source, target in self.pairs]
        return replace(self, pairs=pairs, columns=self.columns[::-1])

    def describe_columns(self) -> str:
        """Which columns were chosen, with a pair as an example, for the user; nothing of aligned files."""
        if not self.columns:
            return ""
        header = "line 1 is a header and no pair: " if "header" in self.apart else ""
        pair = (f"{side[:60]}..." if len(side) > 60 else side for side in self.pairs[0][1:]) if self.pairs else ()
        example = ", as in {!r} and {!r}".format(*pair) if self.pairs else ""
        return "{}: {}the source is {}, the target {}{}".format(self.where, header, *self.columns, example)

    @property
    def read(self) -> int:
        """Lines that were read, all of them."""
        return len(self.pairs) + len(self.faults) + sum(self.apart.values())


_EMPTY = "with an empty side"


def _sentence_lines(path: Path) -> Iterator[str | None]:
    """The lines of a file, see `iter_lines`.

    Raises:
        UserError: most of its first lines are markup.
    """
    lines = iter_lines(path)
    first = list(itertools.islice(lines, _LOOKED_AT))
    texts = [line.strip() for line in first if line and line.strip()]
    tagged = sum(text.startswith("<") and text.endswith(">") for text in texts)
    if 2 * tagged > len(texts) and any("</" in text for text in texts):
        raise UserError(
            f"{path} holds markup, as in {texts[0][:60]!r}; expected a sentence, or a pair, in each line: write what is"
            " between the tags so"
        )
    return itertools.chain(first, lines)


def _unquoted(cell: str) -> str:
    """A cell without the quotes that pandas puts around one with quotes inside, which are doubled."""
    if re.fullmatch(r'"(?:[^"]|"")*"', cell) and '""' in cell[1:-1]:
        return cell[1:-1].replace('""', '"')
    return cell


def _tab_rows(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            cells = line.split("\t")
            yield number, [_unquoted(cell) for cell in cells] if '"' in line else cells


def _column_place(column: str, names: Sequence[str], where: str) -> int:
    """The place of a column by its name in the first row, in any case, or by its number from 1."""
    lower = [name.strip().lower() for name in names]
    if column.strip().lower() in lower:
        return lower.index(column.strip().lower())
    if column.isascii() and column.isdigit() and 1 <= int(column) <= len(names):
        return int(column) - 1
    raise UserError(
        f"{where} has no column {column!r}; its first line is {', '.join(map(repr, names[:10]))}: pass two names from"
        ' it, or numbers from 1, such as columns=["1", "2"]'
    )


def _refuse_other_columns(rows: Sequence[Sequence[str]], where: str) -> None:
    """Refuse a table of three columns or more of which one of the first two holds no words."""
    for place in (0, 1):
        cells = [row[place] for row in rows if len(row) > 2]
        others = [cell for cell in cells if "://" in cell or not any(map(str.isalpha, cell))]
        if 2 * len(others) > len(cells):
            raise UserError(
                f"{where}: column {place + 1} holds {others[0][:40]!r}; expected the source and the target in the first"
                " two columns: pass the two to take as `columns`, by name or number from 1"
            )


def read_pairs(path: Path, columns: Sequence[str] | None = None) -> SentencePairs:
    """A file with a pair in each line: comma-separated values (.csv), whose first line is a header, else tabs.

    Args:
        columns: names, or numbers from 1, of the source and the target; by default the first two. Where they are names,
            the first line is a header.

    Raises:
        UserError: see `iter_lines`; or the lines are markup; or there are no such columns, or no sentences in them.
    """
    found, where, is_csv = SentencePairs(str(path)), str(path), text_suffix(path) == ".csv"
    rows = (csv_rows if is_csv else _tab_rows)(_sentence_lines(path), found.faults)
    first = list(itertools.islice(rows, _LOOKED_AT))
    places, names = (0, 1), first[0][1] if first else []
    if columns is not None:
        places = _column_place(columns[0], names, where), _column_place(columns[1], names, where)
    has_header = is_csv or (columns is not None and not all(column.isdigit() for column in columns))
    found.columns = tuple(
        repr(names[i].strip()) if has_header and i < len(names) else f"column {i + 1}" for i in places
    )
    if has_header and first:
        del first[0]
        found.apart["header"] = 1
    if columns is None:
        _refuse_other_columns([cells for _, cells in first], where)
    short = "without one of the two columns" if is_csv or columns else "without a tab"
    _take_pairs(found, itertools.chain(first, rows), places, short)
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


def read_aligned(source_path: Path, target_path: Path) -> SentencePairs:
    """Two files whose lines belong together; lines that are blank on both sides are no pairs.

    Raises:
        UserError: see `iter_lines`; or the lines are markup; or one file has more lines. None of their pairs can be
            trusted then, so no setting skips it.
    """
    sources, targets = list(_sentence_lines(source_path)), list(_sentence_lines(target_path))
    if len(sources) != len(targets):
        raise UserError(
            f"{source_path} has {len(sources):,} lines and {target_path} {len(targets):,}, so their lines do not belong"
            " together; pass two files of which each line is the translation of the other's"
        )
    found = SentencePairs(f"{source_path} and {target_path}")
    _take_pairs(found, enumerate(zip(sources, targets, strict=True), 1), (0, 1), NOT_UTF8)
    return found


@lru_cache(maxsize=1)
def bundled_pairs() -> tuple[tuple[str, str], ...]:
    """French and English sentences, 5,428 pairs, always the same."""
    lines = lzma.decompress(Path(__file__).with_name("bundled_pairs.txt.xz").read_bytes()).decode().splitlines()
    pairs = [line.split("\t") for line in lines]
    return tuple((french, english) for french, english in pairs)


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
    """The sentences of a file; one that cannot be read is one sentence with a problem."""
    try:
        return list(_sentences_of(str(path), _sentence_lines(path)))
    except UserError as error:
        return [GivenSentence(str(path), "", str(error))]


def read_inputs(inputs: Sequence[str]) -> list[GivenSentence]:
    """Sentences to translate, also the blank lines of files; a file that cannot be read is one with a problem.

    Args:
        inputs: sentences; "-" for standard input; "@FILE", and names of .txt files and of any that exist.

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
                warn(f"note: {text} is a file: its {len(of_file):,} lines are translated")
            found += of_file
        else:
            found.append(given_sentence(text, text))
    if not found:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return found
