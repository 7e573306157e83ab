"""Reads sentence pairs from files with a pair in each line or from aligned files, and collects faulty lines."""

import itertools
import lzma
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from datamodules.errors import UserError, spelled
from datamodules.loading.tables import Table, read_csv, read_table, read_tabs
from datamodules.loading.text_files import (
    NOT_UTF8,
    Faults,
    iter_lines,
    reading,
    text_members,
    text_suffix,
)

BUNDLED_TITLE = "bundled artificial French-English sentences"
_LOOKED_AT = 200  # Number of lines that decide the format of a file.


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
        faults: lines that cannot be used.
        apart: number of lines that are neither pairs nor faults, by reason: "header", "blank" and "markup".
        columns: names of the source and target columns in the file.
        unused: names of the other columns.
    """

    where: str
    pairs: list[Pair] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def add(self, number: int, source: Any, target: Any) -> None:
        """Add two cells as a pair, or count them as blank, markup or a fault."""
        left = _as_line(source)
        right = _as_line(target)
        if not left and not right:
            self.apart["blank"] = self.apart.get("blank", 0) + 1
        elif _is_markup(left) and _is_markup(right):
            self.apart["markup"] = self.apart.get("markup", 0) + 1
        elif _is_markup(left) or _is_markup(right):
            self.faults.add("with markup on one side", [number])
        elif left and right:
            self.pairs.append(Pair(number, left, right))
        else:
            self.faults.add(_EMPTY, [number])

    def reversed(self) -> "SentencePairs":
        """Return the pairs with source and target exchanged."""
        pairs = [Pair(number, target, source) for number, source, target in self.pairs]
        return replace(self, pairs=pairs, columns=self.columns[::-1])

    def describe_columns(self) -> str:
        """Return a line about the chosen columns, with a pair as an example, or "" for aligned files."""
        if not self.columns:
            return ""
        header = "line 1 is a header and no pair: " if "header" in self.apart else ""
        example = ""
        if self.pairs:
            first = self.pairs[0]
            example = f", as in {_shorten(first.source)!r} and {_shorten(first.target)!r}"
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        source, target = self.columns
        return f"{self.where}: {header}the source is {source}, the target {target}{example}{unused}"

    @property
    def read(self) -> int:
        """Number of all lines that were read."""
        return len(self.pairs) + len(self.faults) + sum(self.apart.values())


def _as_line(cell: Any) -> str:
    """Return a cell as a sentence in one line: quoted cells may hold line breaks, and Parquet files missing values."""
    if cell is None:
        return ""
    return " ".join(str(cell).split("\n")).strip()


def _shorten(sentence: str) -> str:
    return f"{sentence[:60]}..." if len(sentence) > 60 else sentence


_EMPTY = "with an empty side"
# Lines that describe a text and do not belong to it, as in IWSLT (talks) and Europarl (speakers, paragraphs).
_MARKUP = re.compile(
    r"<(url|keywords|speaker|talkid|title|description|translator|reviewer|doc|docid)\b[^<>]*>.*</\1>"
    r"|</?(speaker|chapter|p|brk|s|doc|refset|srcset|tstset)\b[^<>]*>",
    re.IGNORECASE,
)


def _is_markup(line: str) -> bool:
    return line.lstrip().startswith("<") and _MARKUP.fullmatch(line.strip()) is not None


def sentence_lines(path: Path, member: str = "") -> Iterator[str | None]:
    """Yield the lines of a file, see `iter_lines`, unless the file is markup.

    Raises:
        UserError: most of its first lines are markup.
    """
    lines = iter_lines(path, member)
    first_lines = list(itertools.islice(lines, _LOOKED_AT))
    texts = [line.strip() for line in first_lines if line and line.strip()]
    num_tagged = sum(text.startswith("<") and text.endswith(">") for text in texts)
    if 2 * num_tagged > len(texts) and any("</" in text for text in texts):
        raise UserError(
            f"{path} holds markup, as in {texts[0][:60]!r}; expected a sentence, or a pair, in each line: write what is"
            " between the tags so"
        )
    return itertools.chain(first_lines, lines)


def _column_index(column: str, names: Sequence[str], where: str) -> int:
    """Return the index of a column, by its name in any case or by its number from 1."""
    lower_names = [name.strip().lower() for name in names]
    lower_column = column.strip().lower()
    # Names before numbers, since a column may be called "2".
    if lower_column in lower_names:
        return lower_names.index(lower_column)
    if column.isascii() and column.isdigit() and 1 <= int(column) <= len(names):
        return int(column) - 1
    raise UserError(
        f"{where} has no column {column!r}; its columns are {', '.join(map(repr, names[:10]))}: pass two of their"
        f" names, or numbers from 1, such as {spelled('columns', ['1', '2'])}"
    )


def _refuse_other_columns(rows: Sequence[Sequence[Any]], where: str) -> None:
    """Raise an error if one of the first two of three or more columns mostly holds numbers or URLs."""
    for index in (0, 1):
        cells = [str(row[index]) for row in rows if len(row) > 2]
        not_sentences = [cell for cell in cells if "://" in cell or not any(map(str.isalpha, cell))]
        if 2 * len(not_sentences) > len(cells):
            raise UserError(
                f"{where}: column {index + 1} holds {not_sentences[0][:40]!r}; expected the source and the target in"
                f" the first two columns: pass the two to take as {spelled('columns')}, by name or number from 1"
            )


def _read_tmx(path: Path) -> Table:
    """Read a translation memory (TMX) as a table with a column for each language and a row for each unit."""
    table = Table(str(path))
    units: list[dict[str, str]] = []
    try:
        with reading(path) as stream:
            for _, unit in ElementTree.iterparse(stream):
                # Tags may have a namespace in braces.
                if unit.tag.rpartition("}")[2] != "tu":
                    continue
                cells = {}
                for version in unit.iter("tuv"):
                    language = version.get("{http://www.w3.org/XML/1998/namespace}lang") or version.get("lang") or "?"
                    segment = version.find("seg")
                    cells[language] = "" if segment is None else "".join(segment.itertext())
                units.append(cells)
                # Otherwise the tree of the whole file stays in memory.
                unit.clear()
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is no TMX file, or damaged: {error}") from error
    for cells in units:
        table.names += [language for language in cells if language not in table.names]
    table.rows = [(row, [cells.get(name, "") for name in table.names]) for row, cells in enumerate(units, 1)]
    return table


def _by_language(table: Table) -> Table:
    """Split a column "translation" with texts by language, as in data sets of Hugging Face, into one per language."""
    if "translation" not in table.names:
        return table
    index = table.names.index("translation")
    texts: list[tuple[int, Mapping[str, Any]]] = []
    for number, cells in table.rows:
        cell = cells[index]
        texts.append((number, cell if isinstance(cell, Mapping) else {}))
    # The names of all rows: a row may lack a language.
    table.names = list(dict.fromkeys(language for _, text in texts for language in text))
    table.rows = [(number, [text.get(name) or "" for name in table.names]) for number, text in texts]
    return table


def _read_pair_table(path: Path, columns: Sequence[str] | None, short: str) -> tuple[Table, bool]:
    """Read the table of a file of pairs, and return it with whether its columns have names."""
    suffix = text_suffix(path)
    if suffix == ".tmx":
        return _read_tmx(path), True
    if suffix in (".jsonl", ".ndjson", ".parquet"):
        return _by_language(read_table(path)), True
    if suffix == ".csv":
        return read_csv(sentence_lines(path), str(path)), True
    numbers = [int(column) for column in columns or () if column.isascii() and column.isdigit()]
    least_columns = max(2, *numbers) if numbers else 2
    table = read_tabs(sentence_lines(path), str(path), short, least_columns)
    # Only if the user names columns, the first line is a header. Otherwise it may be a pair.
    has_names = columns is not None and len(numbers) < len(columns)
    if has_names and table.rows:
        table.names = table.rows.pop(0)[1]
        table.apart["header"] = 1
    return table, has_names


def read_pairs(path: Path, columns: Sequence[str] | None = None) -> SentencePairs:
    """Read a file with a pair in each line or row: .csv with a header, .jsonl, .parquet, .tmx, or tab-separated text.

    A zip archive of OPUS, with a file for each of two languages, is read as aligned files.

    Args:
        path: path of the file.
        columns: names, or numbers from 1, of the columns of source and target; by default the first two. If they are
            names, the first line of tab-separated text is a header.

    Raises:
        UserError: the lines are markup, or there are no such columns, or they hold no sentences; see also `iter_lines`.
    """
    members = _aligned_members(path)
    if members:
        return _read_members(path, members, columns)
    where = str(path)
    short = "without one of the two columns" if columns else "without a tab"
    table, has_names = _read_pair_table(path, columns, short)
    if len(table.names) < 2 and not columns and has_names:
        raise UserError(
            f"{where} has one column, {', '.join(map(repr, table.names))}; expected two, separated by commas,"
            " semicolons, tabs or bars"
        )
    source = 0
    target = 1
    if columns is not None:
        source = _column_index(columns[0], table.names, where)
        target = _column_index(columns[1], table.names, where)
    else:
        _refuse_other_columns([cells for _, cells in table.rows[:_LOOKED_AT]], where)
    pairs = SentencePairs(where, faults=table.faults, apart=table.apart)
    names = [f"column {name}" for name in table.names]
    if has_names:
        names = [repr(name.strip()) for name in table.names]
    pairs.columns = (names[source], names[target])
    pairs.unused = tuple(name for index, name in enumerate(names) if index not in (source, target))
    for number, cells in table.rows:
        pairs.add(number, cells[source], cells[target])
    return pairs


def _aligned_members(path: Path) -> dict[str, str]:
    """Return the two texts of an archive of OPUS, such as Books.de-fr.de and Books.de-fr.fr, by language, or {}."""
    if path.suffix.lower() != ".zip" or not zipfile.is_zipfile(path):
        return {}
    by_stem: dict[str, dict[str, str]] = {}
    for name in text_members(path):
        stem, _, language = name.rpartition(".")
        # The archive also contains README, LICENSE, and the numbers of the sentences (.xml, .ids).
        if language in stem.rpartition(".")[2].split("-"):
            by_stem.setdefault(stem, {})[language] = name
    pairs = [languages for languages in by_stem.values() if len(languages) == 2]
    return pairs[0] if len(pairs) == 1 else {}


def _read_members(path: Path, members: Mapping[str, str], columns: Sequence[str] | None) -> SentencePairs:
    """Read the aligned texts of an archive. `columns` may select the languages and their order."""
    languages = list(members)
    if columns is not None:
        languages = [languages[_column_index(column, languages, str(path))] for column in columns]
    sides = [list(sentence_lines(path, members[language])) for language in languages]
    pairs = _aligned(sides[0], sides[1], members[languages[0]], members[languages[1]])
    pairs.where = str(path)
    pairs.columns = tuple(map(repr, languages))
    return pairs


def _aligned(
    sources: Sequence[str | None], targets: Sequence[str | None], source_name: str, target_name: str
) -> SentencePairs:
    """Pair the lines of two files."""
    if len(sources) != len(targets):
        raise UserError(
            f"{source_name} has {len(sources):,} lines and {target_name} {len(targets):,}, so their lines do not belong"
            " together; pass two files of which each line is the translation of the other's"
        )
    pairs = SentencePairs(f"{source_name} and {target_name}")
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        if source is None or target is None:
            pairs.faults.add(NOT_UTF8, [number])
        else:
            pairs.add(number, source, target)
    return pairs


def read_aligned(source_path: Path, target_path: Path) -> SentencePairs:
    """Read two aligned files, in which line i of one is the translation of line i of the other.

    Raises:
        UserError: the lines are markup, or one file has more lines. No setting skips this error, since none of the
            pairs can be trusted then. See also `iter_lines`.
    """
    sources = list(sentence_lines(source_path))
    targets = list(sentence_lines(target_path))
    return _aligned(sources, targets, str(source_path), str(target_path))


@lru_cache(maxsize=1)
def bundled_pairs() -> tuple[tuple[str, str], ...]:
    """Return the bundled 5,428 pairs of French and English sentences."""
    lines = lzma.decompress(Path(__file__).with_name("bundled_pairs.txt.xz").read_bytes()).decode().splitlines()
    pairs = [line.split("\t") for line in lines]
    return tuple((french, english) for french, english in pairs)
