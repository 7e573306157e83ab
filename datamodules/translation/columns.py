"""Which columns of a table, or keys of JSON, hold the source and the target; and whether a line names them."""

import re
from collections.abc import Sequence

from datamodules.errors import UserError

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


def _tokens(cell: str) -> list[str]:
    return re.findall(r"[^\W_]+", cell.lower())


def _is_name(cell: str) -> bool:
    """Whether a cell is made of words such as source, English, fr and sentences only."""
    tokens = _tokens(cell)
    return 0 < len(tokens) <= 4 and _WORDS.issuperset(tokens)


def is_header(cells: Sequence[str], places: tuple[int, int]) -> bool:
    """Whether a line names the columns, as source and target, en and fr, or "English words" and "French words" do.

    Example:
        >>> is_header(["id", "English", "French"], (1, 2)), is_header(["hi", "no"], (0, 1))
        (True, False)
    """
    chosen = [cells[place].strip().lower() for place in places if place < len(cells)]
    if len(chosen) < 2 or chosen[0] == chosen[1] or not all(map(_is_name, chosen)):
        return False
    return "en" in chosen or not _GREETINGS.intersection(chosen)


def _by_names(names: Sequence[str]) -> tuple[int, int]:
    """Source and target by their names, where these tell, else the first two languages, or the first two columns."""
    of = [
        next((i for i, name in enumerate(names) if _is_name(name) and kind & set(_tokens(name))), None)
        for kind in (_SOURCE, _TARGET)
    ]
    if of[0] is not None and of[1] is not None and of[0] != of[1]:
        return of[0], of[1]
    known = [i for i, name in enumerate(names) if _is_name(name)]
    return (known[0], known[1]) if len(known) > 1 else (0, 1)


def choose_columns(names: Sequence[str], columns: Sequence[str] | None, where: str) -> tuple[int, int]:
    """The places of source and target.

    Args:
        names: the cells of the first line, or the keys of the first object.
        columns: names, or numbers from 1, of the source and the target; None finds them out.
        where: the file.

    Raises:
        UserError: there is no such column.

    Example:
        >>> choose_columns(["id", "en", "fr"], None, "a.csv"), choose_columns(["id", "en", "fr"], ["fr", "2"], "a.csv")
        ((1, 2), (2, 1))
    """
    if columns is None:
        return _by_names(names)
    lower = [name.strip().lower() for name in names]
    places = []
    for column in columns:
        if column.strip().lower() in lower:
            places.append(lower.index(column.strip().lower()))
        elif column.isascii() and column.isdigit() and 1 <= int(column) <= len(names):
            places.append(int(column) - 1)
        else:
            raise UserError(
                f"{where} has no column {column!r}; its first line is {', '.join(map(repr, names[:10]))}: pass two"
                ' names from it, or numbers from 1, such as columns=["1", "2"]'
            )
    return places[0], places[1]
