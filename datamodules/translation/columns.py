"""Which columns of a table, or keys of JSON, hold the source and the target; and whether the first line names them."""

import re
from collections.abc import Callable, Sequence

from datamodules.errors import UserError
from datamodules.loading.text_files import column_place

__all__ = ["choose_columns", "is_header"]

_SOURCE = {"source", "src", "input"}
_TARGET = {"target", "tgt", "trg", "output", "translation"}
_LANGUAGES = """
    arabic bengali bulgarian catalan chinese croatian czech danish dutch english estonian finnish french german greek
    hebrew hindi hungarian indonesian italian japanese korean latin latvian lithuanian mandarin norwegian persian polish
    portuguese romanian russian serbian slovak slovenian spanish swedish thai turkish ukrainian vietnamese
    ar bg ca cs da de el en es et fa fi fr he hi hr hu it ja ko lt lv nb nl no pl pt ro ru sk sl sr sv th tr uk vi zh
    ara bul ces cmn dan deu ell eng est fas fin fra fre ger heb hin hun ita jpn kor nld nor pol por ron rus spa swe tha
    tur ukr vie zho
"""
_WORDS = (
    {"sentence", "sentences", "text", "texts", "word", "words", "phrase", "phrases", "language", "lang"}
    | _SOURCE
    | _TARGET
    | set(_LANGUAGES.split())
)
_GREETINGS = {"hi", "no", "he", "it", "et"}
"""Codes of languages that are sentences, too."""
_MOST = 0.9
"""The share of a column's cells that says what it holds."""


def _tokens(cell: str) -> list[str]:
    return re.findall(r"[^\W_]+", cell.lower())


def _is_name(cell: str) -> bool:
    """Whether a cell is made of words such as source, English, fr and sentences only."""
    tokens = _tokens(cell)
    return 0 < len(tokens) <= 4 and _WORDS.issuperset(tokens)


def _names_two(cells: Sequence[str]) -> bool:
    chosen = [cell.strip().lower() for cell in cells]
    if chosen[0] == chosen[1] or not all(map(_is_name, chosen)):
        return False
    return "en" in chosen or not _GREETINGS.intersection(chosen)


_KINDS: dict[str, Callable[[str], bool]] = {
    "numbers": lambda cell: len(cell.split()) == 1 and not any(map(str.isalpha, cell)),
    "addresses": lambda cell: re.match(r"\w+://|www\.", cell.strip()) is not None,
    "identifiers": lambda cell: len(cell.split()) == 1 and any(map(str.isdigit, cell)),
}


def _other_kinds(rows: Sequence[Sequence[str]], width: int) -> dict[int, str]:
    """What the columns that hold no sentences hold instead, by place."""
    found = {}
    columns = [[row[place] for row in rows if place < len(row) and row[place].strip()] for place in range(width)]
    different = [len(set(cells)) for cells in columns]
    for place, cells in enumerate(columns):
        kinds = [kind for kind, fits in _KINDS.items() if cells and sum(map(fits, cells)) >= _MOST * len(cells)]
        # Such as the code of a language, or the part of the corpus, where other columns are not as uniform.
        if 10 * max(1, different[place]) <= max(different) and not any(len(cell.split()) > 1 for cell in cells):
            kinds.insert(0, f"{different[place]} values in {len(rows)} lines")
        if kinds:
            found[place] = kinds[0]
    return found


def is_header(cells: Sequence[str], places: tuple[int, int], rows: Sequence[Sequence[str]] = ()) -> bool:
    """Whether a first line names the columns, as source and target, or "English words" and "French words" do.

    Args:
        places: of source and target.
        rows: those that follow. Names of any other kind are told by them: where columns hold numbers or addresses and
            the first line does not, or where it alone has one word without punctuation on both sides.

    Example:
        >>> is_header(["id", "English", "French"], (1, 2)), is_header(["hi", "no"], (0, 1))
        (True, False)
    """
    if len(cells) <= max(places):
        return False
    chosen = [cells[place] for place in places]
    if _names_two(chosen):
        return True
    for place, kind in _other_kinds(rows, len(cells)).items():
        if kind in ("numbers", "addresses") and cells[place].strip() and not _KINDS[kind](cells[place]):
            return True

    def are_words(row: Sequence[str]) -> bool:
        return all(place < len(row) and re.fullmatch(r"[^\W\d]+", row[place].strip()) for place in places)

    return len(rows) >= 10 and chosen[0] != chosen[1] and are_words(cells) and not any(map(are_words, rows))


def _by_names(names: Sequence[str], places: Sequence[int]) -> tuple[int, int] | None:
    """Source and target by their names, where these tell, else the first two languages."""
    known = [place for place in places if _is_name(names[place])]
    of = [next((i for i in known if kind & set(_tokens(names[i]))), None) for kind in (_SOURCE, _TARGET)]
    if of[0] is not None and of[1] is not None and of[0] != of[1]:
        return of[0], of[1]
    return (known[0], known[1]) if len(known) > 1 and _names_two([names[place] for place in known[:2]]) else None


def _by_content(names: Sequence[str], rows: Sequence[Sequence[str]], where: str) -> tuple[int, int]:
    """Source and target among the columns that hold sentences: by names, or the first two, or the only two.

    Raises:
        UserError: these are not two.
    """
    kinds = _other_kinds(rows or [names], len(names))
    places = [place for place in range(len(names)) if place not in kinds]
    if len(places) < 2:
        # Such as "s1" and "t1" on both sides.
        places = [place for place in range(len(names)) if kinds.get(place, "identifiers") == "identifiers"]
    if named := _by_names(names, places):
        return named
    if len(places) == 2 or places[:2] == [0, 1]:
        return places[0], places[1]
    held = ", ".join(
        f"column {i + 1} ({names[i][:20]!r}) holds {kinds.get(i, 'text')}" for i in range(min(10, len(names)))
    )
    raise UserError(
        f"{where}: {held}; expected the source and the target in the first two columns, or the only two of text: pass"
        " the two to take as `columns`, by name or number from 1"
    )


def choose_columns(
    names: Sequence[str], columns: Sequence[str] | None, where: str, rows: Sequence[Sequence[str]] = ()
) -> tuple[int, int]:
    """The places of source and target.

    Args:
        names: the cells of the first line, or the keys of the first object.
        columns: names, or numbers from 1, of the source and the target; None finds them out.
        where: the file.
        rows: those that follow, or the first of them: they tell columns of sentences from others.

    Raises:
        UserError: there is no such column, or it is not clear which two hold the sentences.

    Example:
        >>> choose_columns(["id", "en", "fr"], None, "a.csv"), choose_columns(["id", "en", "fr"], ["fr", "2"], "a.csv")
        ((1, 2), (2, 1))
    """
    if columns is None:
        if len(names) < 2:
            return choose_columns(rows[0], None, where, rows[1:]) if rows else (0, 1)
        return _by_content(names, rows, where)
    source, target = (column_place(column, names, where) for column in columns)
    return source, target
