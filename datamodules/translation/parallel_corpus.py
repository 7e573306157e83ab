"""Sentence pairs from files, also compressed: a pair in each line, or aligned files; faulty lines are named."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.errors import UserError
from datamodules.loading.text_files import (
    NOT_UTF8,
    Faults,
    csv_rows,
    decoded_lines,
    iter_lines,
    read_lines,
    text_suffix,
)
from datamodules.translation.columns import choose_columns, is_header

__all__ = ["GivenSentence", "Pair", "SentencePairs", "read_aligned", "read_inputs", "read_pairs"]


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
        header: a remark on the header, for the user.
    """

    where: str
    pairs: list[Pair] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    header: str = ""

    def reversed(self) -> "SentencePairs":
        """The pairs with source and target exchanged."""
        return replace(self, pairs=[Pair(number, target, source) for number, source, target in self.pairs])

    @property
    def read(self) -> int:
        """Lines that were read, all of them."""
        return len(self.pairs) + len(self.faults) + sum(self.apart.values())


_NO_TAB = "without a tab"
_NO_COLUMN = "without one of the two columns"
_NO_OBJECT = "without a JSON object of two texts"
_EMPTY = "with an empty side"
_JSON = (".jsonl", ".ndjson", ".json")


def _tab_rows(lines: Iterable[str | None], faults: Faults) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if line is None:
            faults.add(NOT_UTF8, [number])
        else:
            yield number, line.split("\t")


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


def _json_rows(
    lines: Iterable[str | None], columns: Sequence[str] | None, where: str, faults: Faults
) -> Iterator[tuple[int, list[str]]]:
    """Source and target of each object, by the keys that the first one has."""
    keys: list[str] = []
    for number, value in _objects(lines, where, faults):
        texts = [key for key, text in value.items() if isinstance(text, str)]
        if not value:
            yield number, []
            continue
        if not keys and len(texts) > 1:
            keys = [texts[place] for place in choose_columns(texts, columns, where)]
        sides = [value.get(key) for key in keys]
        if len(sides) == 2 and isinstance(sides[0], str) and isinstance(sides[1], str):
            yield number, [" ".join(side.split()) for side in sides if isinstance(side, str)]
        else:
            faults.add(_NO_OBJECT, [number])


def read_pairs(path: Path, columns: Sequence[str] | None = None) -> SentencePairs:
    """A file with a pair in each line: JSON lines (.jsonl), comma-separated values (.csv), else separated by tabs.

    Args:
        columns: names, or numbers from 1, of the source and the target; by default the first line's names tell, or they
            are the first two. Where that line names columns, it is a header.

    Raises:
        UserError: see `iter_lines`; or there are no such columns.
    """
    found = SentencePairs(str(path))
    lines, kind, where, faults, apart = iter_lines(path), text_suffix(path), str(path), found.faults, found.apart
    places: tuple[int, int] | None = None
    if kind in _JSON:
        rows, places, short = _json_rows(lines, columns, where, faults), (0, 1), _NO_OBJECT
    elif kind == ".csv":
        rows, short = csv_rows(lines, faults), _NO_COLUMN
    else:
        rows, short = _tab_rows(lines, faults), _NO_COLUMN if columns else _NO_TAB
    for number, cells in rows:
        if not any(map(str.strip, cells)):
            apart["blank"] = apart.get("blank", 0) + 1
            continue
        if places is None:
            places = choose_columns(cells, columns, where)
            named = columns is not None and not all(column.isdigit() for column in columns)
            if not (named or is_header(cells, places)):
                places = places if columns else (0, 1)
            else:
                a, b = (cells[place].strip() for place in places)
                found.header = f"line {number} is a header and no pair: the source is {a!r}, the target {b!r}"
                apart["header"] = 1
                continue
        if len(cells) <= max(places):
            faults.add(short, [number])
        elif (left := cells[places[0]].strip()) and (right := cells[places[1]].strip()):
            found.pairs.append(Pair(number, left, right))
        else:
            faults.add(_EMPTY, [number])
    return found


def read_aligned(source_path: Path, target_path: Path) -> SentencePairs:
    """Two files whose lines belong together.

    Raises:
        UserError: see `iter_lines`; or one file has more lines. None of their pairs can be trusted, so no setting skips
            it.
    """
    found = SentencePairs(f"{source_path} and {target_path}")
    sources, targets = read_lines(source_path), read_lines(target_path)
    if len(sources) != len(targets):
        raise UserError(
            f"{source_path} has {len(sources):,} lines and {target_path} {len(targets):,}, so their lines do not belong"
            " together; pass two files of which each line is the translation of the other's"
        )
    for number, (left, right) in enumerate(zip(sources, targets, strict=True), 1):
        if left is None or right is None:
            found.faults.add(NOT_UTF8, [number])
        elif (left := left.strip()) and (right := right.strip()):
            found.pairs.append(Pair(number, left, right))
        else:
            found.faults.add(_EMPTY, [number])
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


def _sentences_of(where: str, lines: Sequence[str | None]) -> Iterator[GivenSentence]:
    for number, line in enumerate(lines, 1):
        if line is None:
            problem = f"line {number} of {where} is not in UTF-8; save the file as UTF-8"
            yield GivenSentence(f"line {number} of {where}", "", problem)
        else:
            yield GivenSentence(f"line {number} of {where}", line.strip())


def _sentences_in(path: Path) -> list[GivenSentence]:
    """The sentences of a file, or of the text files in a folder."""
    files = sorted(path.rglob("*.txt")) if os.path.isdir(path) else [path]  # noqa: PTH112
    if not files:
        return [GivenSentence(str(path), "", f"the folder {path} holds no .txt files")]
    found: list[GivenSentence] = []
    for file in files:
        try:
            found += _sentences_of(str(file), read_lines(file))
        except UserError as error:
            found.append(GivenSentence(str(file), "", str(error)))
    return found


def read_inputs(inputs: Sequence[str]) -> list[GivenSentence]:
    """Sentences to translate, also the blank lines of files; a file that cannot be read is one with a problem.

    Args:
        inputs: sentences; "-" for standard input; "@FILE", names of .txt files, and folders of such files.

    Raises:
        UserError: there is no sentence.
    """
    found: list[GivenSentence] = []
    for text in inputs:
        if text == "-":
            # Bytes: how Python reads text there depends on the locale, and some let other encodings pass as junk.
            found += _sentences_of("standard input", decoded_lines(sys.stdin.buffer.read(), "standard input"))
        # Path.is_dir raises for texts that are longer than a name may be.
        elif text.startswith("@") or (text.endswith(".txt") and " " not in text) or os.path.isdir(text):  # noqa: PTH112
            found += _sentences_in(Path(text.removeprefix("@")).expanduser())
        else:
            found.append(GivenSentence(text, text))
    if not found:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return found
