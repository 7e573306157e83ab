"""Sentence pairs from files, also compressed: a pair in each line, or aligned files; faulty lines are named."""

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

from datamodules.errors import UserError
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
        apart: lines that are no pairs and no faults, by reason: "header", "blank" and "markup".
        columns: what source and target are called in the file.
        unused: what other columns are called.
    """

    where: str
    pairs: list[Pair] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    apart: dict[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def add(self, number: int, source: Any, target: Any) -> None:
        """Take two cells: a pair, a blank line, markup or a fault."""
        # Quoted cells hold line breaks, and a sentence has none; Parquet files hold missing values.
        left, right = (" ".join(str(cell).split("\n")).strip() if cell is not None else "" for cell in (source, target))
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
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return "{}: {}the source is {}, the target {}{}{}".format(self.where, header, *self.columns, example, unused)

    @property
    def read(self) -> int:
        """Lines that were read, all of them."""
        return len(self.pairs) + len(self.faults) + sum(self.apart.values())


_EMPTY = "with an empty side"
# Lines about a text, and not of it: of IWSLT's talks, of Europarl's speakers and of paragraphs.
_MARKUP = re.compile(
    r"<(url|keywords|speaker|talkid|title|description|translator|reviewer|doc|docid)\b[^<>]*>.*</\1>"
    r"|</?(speaker|chapter|p|brk|s|doc|refset|srcset|tstset)\b[^<>]*>",
    re.IGNORECASE,
)


def _is_markup(line: str) -> bool:
    return line.lstrip().startswith("<") and _MARKUP.fullmatch(line.strip()) is not None


def sentence_lines(path: Path, member: str = "") -> Iterator[str | None]:
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
            " between the tags so"
        )
    return itertools.chain(first, lines)


def _column_place(column: str, names: Sequence[str], where: str) -> int:
    """The place of a column by its name in the first row, in any case, or by its number from 1."""
    lower = [name.strip().lower() for name in names]
    if column.strip().lower() in lower:
        return lower.index(column.strip().lower())
    if column.isascii() and column.isdigit() and 1 <= int(column) <= len(names):
        return int(column) - 1
    raise UserError(
        f"{where} has no column {column!r}; its columns are {', '.join(map(repr, names[:10]))}: pass two of their"
        ' names, or numbers from 1, such as columns=["1", "2"]'
    )


def _refuse_other_columns(rows: Sequence[Sequence[Any]], where: str) -> None:
    """Refuse a table of three columns or more of which one of the first two holds no words."""
    for place in (0, 1):
        cells = [str(row[place]) for row in rows if len(row) > 2]
        others = [cell for cell in cells if "://" in cell or not any(map(str.isalpha, cell))]
        if 2 * len(others) > len(cells):
            raise UserError(
                f"{where}: column {place + 1} holds {others[0][:40]!r}; expected the source and the target in the first"
                " two columns: pass the two to take as `columns`, by name or number from 1"
            )


def _read_tmx(path: Path) -> Table:
    """A translation memory: a column for each language, a row for each unit."""
    table = Table(str(path))
    units: list[dict[str, str]] = []
    try:
        with reading(path) as stream:
            for _, unit in ElementTree.iterparse(stream):
                if unit.tag.rpartition("}")[2] != "tu":
                    continue
                cells = {}
                for version in unit.iter("tuv"):
                    language = version.get("{http://www.w3.org/XML/1998/namespace}lang") or version.get("lang") or "?"
                    segment = version.find("seg")
                    cells[language] = "" if segment is None else "".join(segment.itertext())
                units.append(cells)
                # What has been read is not kept as a tree.
                unit.clear()
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is no TMX file, or damaged: {error}") from error
    for cells in units:
        table.names += [language for language in cells if language not in table.names]
    table.rows = [(row, [cells.get(name, "") for name in table.names]) for row, cells in enumerate(units, 1)]
    return table


def _by_language(table: Table) -> Table:
    """A table whose column "translation" holds texts by language, as those of Hugging Face, with a column for each."""
    if "translation" not in table.names:
        return table
    texts = [cell if isinstance(cell, Mapping) else {} for cell in table.column(table.names.index("translation"))]
    table.names = list(dict.fromkeys(language for text in texts for language in text))
    table.rows = [
        (number, [text.get(name) or "" for name in table.names])
        for (number, _), text in zip(table.rows, texts, strict=True)
    ]
    return table


def _read_pair_table(path: Path, columns: Sequence[str] | None, short: str) -> tuple[Table, bool]:
    """The table of a file of pairs, and whether its columns have names."""
    suffix = text_suffix(path)
    if suffix == ".tmx":
        return _read_tmx(path), True
    if suffix in (".jsonl", ".ndjson", ".parquet"):
        return _by_language(read_table(path)), True
    if suffix == ".csv":
        return read_csv(sentence_lines(path), str(path)), True
    numbers = [int(column) for column in columns or () if column.isascii() and column.isdigit()]
    table = read_tabs(sentence_lines(path), str(path), short, max(2, *numbers) if numbers else 2)
    # Names are those of the first line.
    named = columns is not None and len(numbers) < len(columns)
    if named and table.rows:
        table.names = table.rows.pop(0)[1]
        table.apart["header"] = 1
    return table, named


def read_pairs(path: Path, columns: Sequence[str] | None = None) -> SentencePairs:
    """A file with a pair in each line or row: .csv, whose first line is a header, .jsonl, .parquet, .tmx, else tabs.

    An archive of OPUS, with a file for each of two languages, is read as those.

    Args:
        columns: names, or numbers from 1, of the source and the target; by default the first two. Where they are names,
            the first line is a header.

    Raises:
        UserError: see `iter_lines`; or the lines are markup; or there are no such columns, or no sentences in them.
    """
    members = _aligned_members(path)
    if members:
        return _read_members(path, members, columns)
    where = str(path)
    short = "without one of the two columns" if columns else "without a tab"
    table, named = _read_pair_table(path, columns, short)
    if len(table.names) < 2 and not columns and named:
        raise UserError(
            f"{where} has one column, {', '.join(map(repr, table.names))}; expected two, separated by commas,"
            " semicolons, tabs or bars"
        )
    places = (0, 1)
    if columns is not None:
        places = _column_place(columns[0], table.names, where), _column_place(columns[1], table.names, where)
    else:
        _refuse_other_columns([cells for _, cells in table.rows[:_LOOKED_AT]], where)
    found = SentencePairs(where, faults=table.faults, apart=table.apart)
    called = [repr(name.strip()) if named else f"column {name}" for name in table.names]
    found.columns = tuple(called[place] for place in places)
    found.unused = tuple(name for place, name in enumerate(called) if place not in places)
    for number, cells in table.rows:
        found.add(number, cells[places[0]], cells[places[1]])
    return found


def _aligned_members(path: Path) -> dict[str, str]:
    """The two texts of an archive of OPUS by language, such as Books.de-fr.de and Books.de-fr.fr; none of others."""
    if path.suffix.lower() != ".zip" or not zipfile.is_zipfile(path):
        return {}
    by_stem: dict[str, dict[str, str]] = {}
    for name in text_members(path):
        stem, _, language = name.rpartition(".")
        # Beside the texts there are README, LICENSE, and the numbers of the sentences (.xml, .ids).
        if language in stem.rpartition(".")[2].split("-"):
            by_stem.setdefault(stem, {})[language] = name
    pairs = [languages for languages in by_stem.values() if len(languages) == 2]
    return pairs[0] if len(pairs) == 1 else {}


def _read_members(path: Path, members: Mapping[str, str], columns: Sequence[str] | None) -> SentencePairs:
    languages = list(members)
    if columns is not None:
        languages = [languages[_column_place(column, languages, str(path))] for column in columns]
    sides = [list(sentence_lines(path, members[language])) for language in languages]
    found = _aligned(sides[0], sides[1], members[languages[0]], members[languages[1]])
    found.where = str(path)
    found.columns = tuple(map(repr, languages))
    return found


def _aligned(
    sources: Sequence[str | None], targets: Sequence[str | None], source_name: str, target_name: str
) -> SentencePairs:
    if len(sources) != len(targets):
        raise UserError(
            f"{source_name} has {len(sources):,} lines and {target_name} {len(targets):,}, so their lines do not belong"
            " together; pass two files of which each line is the translation of the other's"
        )
    found = SentencePairs(f"{source_name} and {target_name}")
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        if source is None or target is None:
            found.faults.add(NOT_UTF8, [number])
        else:
            found.add(number, source, target)
    return found


def read_aligned(source_path: Path, target_path: Path) -> SentencePairs:
    """Two files whose lines belong together; lines that are blank on both sides are no pairs.

    Raises:
        UserError: see `iter_lines`; or the lines are markup; or one file has more lines. None of their pairs can be
            trusted then, so no setting skips it.
    """
    sources = list(sentence_lines(source_path))
    targets = list(sentence_lines(target_path))
    return _aligned(sources, targets, str(source_path), str(target_path))


@lru_cache(maxsize=1)
def bundled_pairs() -> tuple[tuple[str, str], ...]:
    """French and English sentences, 5,428 pairs, always the same."""
    lines = lzma.decompress(Path(__file__).with_name("bundled_pairs.txt.xz").read_bytes()).decode().splitlines()
    pairs = [line.split("\t") for line in lines]
    return tuple((french, english) for french, english in pairs)
