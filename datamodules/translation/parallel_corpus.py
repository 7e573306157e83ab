"""Sentence pairs from files with a pair in each line or from aligned files, and sentences to translate.

Faulty lines are collected.
"""

import io
import lzma
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.errors import UserError, spelled
from datamodules.loading.table_files import (
    FORM,
    NAMED,
    NOT_UTF8,
    SEPARATOR_NAMES,
    Faults,
    Table,
    decoded_lines,
    has_header,
    iter_lines,
    parse_columns,
    read_table,
    text_suffix,
)
from datamodules.notes import warn

USES = ("source", "target")
"""Uses of the columns in files of pairs."""
BUNDLED_TITLE = "bundled artificial French-English sentences"


class Pair(NamedTuple):
    """Sentence and its translation, in their original form.

    Args:
        number: number of the line, from 1.
    """

    number: int
    source: str
    target: str


@dataclass
class SentencePairs:
    """Pairs of one file, or of two aligned files.

    Args:
        where: name of the file, for messages.
        pairs: pairs without faults.
        faults: unusable lines.
        skipped_lines: number of lines that are neither pairs nor faults, by reason: "header" and "blank".
        columns: names of the source and target columns in the file.
        unused: names of the other columns.
    """

    where: str
    pairs: list[Pair] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    skipped_lines: dict[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def add(self, number: int, source: Any, target: Any) -> None:
        """Add two cells as a pair, or count them as a blank line or a fault."""
        left = _as_line(source)
        right = _as_line(target)
        if not left and not right:
            self.skipped_lines["blank"] = self.skipped_lines.get("blank", 0) + 1
        elif is_markup(left) or is_markup(right):
            self.faults.add("of markup", [number])
        elif left and right:
            self.pairs.append(Pair(number, left, right))
        else:
            self.faults.add("with an empty side", [number])

    def reversed(self) -> "SentencePairs":
        """Return the pairs with source and target exchanged."""
        pairs = [Pair(number, target, source) for number, source, target in self.pairs]
        return replace(self, pairs=pairs, columns=self.columns[::-1])

    def describe_columns(self) -> str:
        """Describe the chosen columns, with a pair as an example; "" for aligned files."""
        if not self.columns:
            return ""
        header = "line 1 is a header and no pair: " if "header" in self.skipped_lines else ""
        example = ""
        if self.pairs:
            first = self.pairs[0]
            example = f", as in {_shorten(first.source)!r} and {_shorten(first.target)!r}"
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        source, target = self.columns
        return f"{self.where}: {header}the source is {source}, the target {target}{example}{unused}"

    @property
    def read(self) -> int:
        """Number of all lines."""
        return len(self.pairs) + len(self.faults) + sum(self.skipped_lines.values())


def _as_line(cell: Any) -> str:
    """Return a cell as one line: quoted cells may contain line breaks, and Parquet files missing values."""
    if cell is None:
        return ""
    return " ".join(str(cell).split("\n")).strip()


def _shorten(sentence: str) -> str:
    return f"{sentence[:60]}..." if len(sentence) > 60 else sentence


def is_markup(line: str) -> bool:
    """Return whether a line is a tag or a text in tags, which is metadata and not a sentence."""
    return line.startswith("<") and line.endswith(">")


def _with_languages(table: Table) -> None:
    """Split columns of texts by language, as in Hugging Face's data sets, into a column each: "translation.de"."""
    for index in reversed(range(len(table.names))):
        cells = [row[index] for _, row in table.rows]
        languages = dict.fromkeys(language for cell in cells if isinstance(cell, Mapping) for language in cell)
        if languages:
            name = table.names[index]
            table.names[index : index + 1] = [f"{name}.{language}" for language in languages]
            for (_, row), cell in zip(table.rows, cells):
                row[index : index + 1] = [cell.get(language) or "" for language in languages]


def _proposal(table: Table, columns: Mapping[str, str], has_names: bool) -> str:
    """Return `columns` with the two most probable columns: most letters and no URL in the first cell."""
    cells = table.rows[0][1] if table.rows else table.names

    def letters(index: int) -> int:
        cell = str(cells[index])
        return 0 if "://" in cell or " " not in cell.strip() else sum(map(str.isalpha, cell))

    likeliest = sorted(sorted(range(len(cells)), key=letters, reverse=True)[:2])
    names = [table.names[index] if has_names else str(index + 1) for index in (likeliest * 2)[:2]]
    declared = {"source": names[0], "target": names[1], **{use: columns[use] for use in FORM if use in columns}}
    return spelled("columns", ",".join(f"{use}={name}" for use, name in declared.items()))


def _column_indices(table: Table, columns: Mapping[str, str], has_names: bool) -> list[int]:
    """Return the indices of the source and target columns: as declared, or the only two columns."""
    listed = ", ".join(map(repr, table.names[:10]))
    first = [str(cell) for cell in table.rows[0][1]] if table.rows else [""]
    # Quotes around the whole line may be CSV quoting or part of the text.
    if not {"source", "quotes"} & columns.keys() and first[0][:1] == first[-1][-1:] == '"':
        quotes = f"pass {spelled('columns', 'quotes=yes')} if a program wrote them, or 'quotes=no'"
        raise UserError(f"{table.where} has quotes, as in {_shorten(first[0])!r}; {quotes}")
    if "source" in columns or "target" in columns:
        indices = [table.index(columns.get(use, "")) for use in USES]
        if min(indices) < 0:
            raise UserError(f"{table.where} has the columns {listed}; pass {_proposal(table, columns, has_names)}")
        return indices
    if len(table.names) == 1:
        line = table.names[0] if has_names else first[0]
        separator = next((mark for mark in "\t;|," if mark in line), "")
        name = SEPARATOR_NAMES.get(separator, separator)
        advice = f"pass {spelled('columns', f'separator={name}')}" if separator else "separated by commas or tabs"
        raise UserError(f"{table.where} has one column, as in {_shorten(line)!r}; expected two: {advice}")
    if len(table.faults) > len(table.rows):
        raise UserError(f"{table.where}: line 1 has {len(table.names)} cells, unlike most lines; correct it")
    if len(table.names) != 2:
        raise UserError(
            f"{table.where} has the columns {listed}; expected two; pass {_proposal(table, columns, has_names)}"
        )
    return [0, 1]


def read_pairs(path: Path, columns: str | None = None) -> SentencePairs:
    """Read a file with a pair in each line or row: .csv with a header, .jsonl, .parquet, or tab-separated text.

    Args:
        path: path of the file.
        columns: source and target columns, see `parse_columns`: names, or numbers from 1. Not needed if there are two
            columns. If they are names, the first line of tab-separated text is a header.

    Raises:
        UserError: there are no such columns, or more than two; see also `read_table`.
    """
    declared = parse_columns(columns, USES)
    suffix = text_suffix(path)
    if suffix == ".tmx":
        raise UserError(f"{path} is a translation memory; write its units as lines of SOURCE<tab>TARGET")
    # Without declared columns the first line of a text file is a pair, not a header.
    has_names = has_header(declared) and ("source" in declared or suffix in (".csv", *NAMED))
    table = read_table(path, declared, header=has_names)
    _with_languages(table)
    source, target = _column_indices(table, declared, has_names)
    pairs = SentencePairs(str(path), faults=table.faults, skipped_lines=table.skipped_lines)
    names = [repr(name.strip()) if has_names else f"column {name}" for name in table.names]
    pairs.columns = (names[source], names[target])
    pairs.unused = tuple(name for index, name in enumerate(names) if index not in (source, target))
    for number, cells in table.rows:
        pairs.add(number, cells[source], cells[target])
    return pairs


def read_aligned(source_path: Path, target_path: Path) -> SentencePairs:
    """Read two aligned files, in which line i of one is the translation of line i of the other.

    Raises:
        UserError: one file has more lines. `on_bad_lines` does not skip this error, because all pairs may be wrong
            then. See also `iter_lines`.
    """
    sources = list(iter_lines(source_path))
    targets = list(iter_lines(target_path))
    if len(sources) != len(targets):
        raise UserError(
            f"{source_path} has {len(sources):,} lines and {target_path} {len(targets):,}, so their lines do not belong"
            " together; pass two files of which each line is the translation of the other's"
        )
    pairs = SentencePairs(f"{source_path} and {target_path}")
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        if source is None or target is None:
            pairs.faults.add(NOT_UTF8, [number])
        else:
            pairs.add(number, source, target)
    return pairs


@lru_cache(maxsize=1)
def bundled_pairs() -> tuple[tuple[str, str], ...]:
    """Return the bundled 5,428 pairs of French and English sentences."""
    lines = lzma.decompress(Path(__file__).with_name("bundled_pairs.txt.xz").read_bytes()).decode().splitlines()
    pairs = [line.split("\t") for line in lines]
    return tuple((french, english) for french, english in pairs)


LONGEST_INPUT = 100_000
"""Maximum length of a sentence in validation, test and prediction, in bytes of UTF-8."""


class InputSentence(NamedTuple):
    """Sentence to translate, or the problem of an unusable input.

    Args:
        where: name of the input for messages: the sentence, or its line and file.
        text: the sentence, or "".
        problem: the reason for a missing sentence.
    """

    where: str
    text: str
    problem: UserError | None = None


def check_sentence(where: str, text: str) -> InputSentence:
    """Return a sentence to translate; with a problem if it is unusable."""
    if "\0" in text:
        return InputSentence(where, "", UserError("holds a NUL character; correct it", subject=where))
    size = len(text.encode(errors="replace"))
    if size > LONGEST_INPUT:
        problem = f"has {size:,} bytes, more than {LONGEST_INPUT:,}; split it"
        return InputSentence(where, "", UserError(problem, subject=where[:60]))
    return InputSentence(where, text)


def _sentences_of_lines(where: str, lines: Iterable[str | None]) -> Iterator[InputSentence]:
    """Yield a sentence or a problem for each line."""
    for number, line in enumerate(lines, 1):
        line_name = f"line {number} of {where}"
        if line is None:
            problem = UserError("is not in UTF-8; save the file as UTF-8", subject=line_name)
            yield InputSentence(line_name, "", problem)
        elif is_markup(line.strip()):
            problem = UserError("is markup; write what is between the tags", subject=line_name)
            yield InputSentence(line_name, "", problem)
        else:
            yield check_sentence(line_name, line.strip())


def _sentences_of_file(path: Path) -> list[InputSentence]:
    """Return the sentences of a file; for an unreadable file, one input with a problem."""
    try:
        return list(_sentences_of_lines(str(path), iter_lines(path)))
    except UserError as error:
        return [InputSentence(str(path), "", error)]


def read_inputs(inputs: Sequence[str]) -> list[InputSentence]:
    """Read the sentences to translate. Blank lines of files are kept, so outputs match the lines of the input.

    Args:
        inputs: sentences; "-" for standard input; "@FILE"; names of .txt files, or of any existing file.

    Raises:
        UserError: there is no sentence.
    """
    sentences: list[InputSentence] = []
    for text in inputs:
        is_listed = text.startswith("@") or (text.endswith(".txt") and " " not in text)
        # Path.exists raises an error for texts longer than a file name.
        exists = os.path.exists(text)  # noqa: PTH110
        if text == "-":
            # Read as bytes: text mode decodes by the locale, which may decode another encoding to wrong letters.
            stream = io.BytesIO(sys.stdin.buffer.read())
            sentences += _sentences_of_lines("standard input", decoded_lines(stream, "standard input"))
        elif is_listed or exists:
            file_sentences = _sentences_of_file(Path(text.removeprefix("@")).expanduser())
            # A word to translate may happen to be the name of a file.
            if not is_listed and os.path.isfile(text):  # noqa: PTH113
                warn(f"note: {text} is a file: its {len(file_sentences):,} lines are translated")
            sentences += file_sentences
        else:
            sentences.append(check_sentence(text, text))
    if not sentences:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return sentences
