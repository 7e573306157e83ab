"""Text to tokens and tokens to numbers: normalisation, tokenisation and vocabularies."""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, takewhile
from typing import Literal, get_args

from typing_extensions import override

from datamodules.errors import UserError

PAD, SOS, EOS, UNK = range(4)
"""Padding, start of a sentence, its end, and any token outside the vocabulary."""
SPECIAL_TOKENS = ("<pad>", "<sos>", "<eos>", "<unk>")

Normalisation = Literal["unicode", "none", "tutorial"]


class _CharacterTable(dict[int, str]):
    """A table for `str.translate` that asks a function about each character once."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__({ord("\n"): "\n"})
        self.replacement = replacement

    def __missing__(self, code: int) -> str:
        self[code] = self.replacement(chr(code))
        return self[code]


_APOSTROPHES = "'\u2019\u02bc\u2032"
INVISIBLE = "\u00ad\u200b\u2060\ufeff"
"""Soft hyphen, zero-width space, word joiner, byte-order mark; joiners that shape Persian or emoji stay."""


def _unicode_character(char: str) -> str:
    """Marks are no letters to Python's regular expressions, hence categories: they belong to the word."""
    if char in _APOSTROPHES:
        return "'"
    if char in INVISIBLE:
        return ""
    category = unicodedata.category(char)
    if category[0] in "PS":
        return f" {char} "
    return " " if category[0] == "Z" or category == "Cc" else char


def _plain_character(char: str) -> str:
    return " " if unicodedata.category(char) in ("Cc", "Zs", "Zl", "Zp") else char


def _tutorial_character(char: str) -> str:
    if "a" <= char <= "z":
        return char
    if unicodedata.category(char) == "Mn":
        return ""
    return f" {char}" if char in "!?" else " "


_TABLES = {
    "unicode": _CharacterTable(_unicode_character),
    "none": _CharacterTable(_plain_character),
    "tutorial": _CharacterTable(_tutorial_character),
}


def _split_at_apostrophes(text: str) -> str:
    """An apostrophe ends its token, or is a token where none precedes it: ``j'ai`` becomes ``j'`` and ``ai``."""
    pieces = text.split("'")
    out = [pieces[0]]
    for before, after in pairwise(pieces):
        out.append(f"' {after}" if before[-1:].strip() else f" ' {after}")
    return "".join(out)


def normalise_lines(lines: Sequence[str], how: Normalisation = "unicode") -> list[str]:
    """Sentences as tokens with single spaces between them.

    Args:
        lines: sentences, none with a line break.
        how: "unicode" keeps every script with its accents, in lower case (NFC), and makes tokens of punctuation;
            "none" only composes characters (NFC) and splits at spaces; "tutorial" leaves a to z, ! and ?, as
            PyTorch's translation tutorial does.

    Raises:
        UserError: there is no such normalisation.
    """
    if how not in _TABLES:
        raise UserError(f"no normalisation {how!r}; expected one of {', '.join(get_args(Normalisation))}")
    text = "\n".join(lines)
    if how == "none":
        text = unicodedata.normalize("NFC", text.translate(_TABLES[how]))
    elif how == "unicode":
        # Composed last: characters that the table drops may have stood between a letter and its accent.
        text = _split_at_apostrophes(unicodedata.normalize("NFC", text.lower().translate(_TABLES[how])))
    else:
        text = unicodedata.normalize("NFD", text.lower()).translate(_TABLES[how])
    return [" ".join(line.split()) for line in text.split("\n")] if lines else []


def normalise(sentence: str, how: Normalisation = "unicode") -> str:
    """One sentence, see `normalise_lines`.

    Example:
        >>> normalise("J’ai 2 chats, n'est-ce pas?")
        "j' ai 2 chats , n' est - ce pas ?"
        >>> normalise("Ça va, n'est-ce pas?", "tutorial")
        'ca va n est ce pas ?'
    """
    return normalise_lines([sentence.replace("\n", " ")], how)[0]


def strip_special_tokens(ids: Iterable[int]) -> list[int]:
    """The numbers up to the first `EOS`, without padding and start marks."""
    return [number for number in takewhile(EOS.__ne__, map(int, ids)) if number not in (PAD, SOS)]


class Vocabulary:
    """The tokens of one side, by number; the first four are `SPECIAL_TOKENS`.

    Args:
        tokens: all of them, with the special ones in front.

    Raises:
        UserError: the list does not begin with the special tokens, or has a token twice.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = list(tokens)
        different = len(set(self.tokens))
        if tuple(self.tokens[:4]) != SPECIAL_TOKENS or different != len(self.tokens):
            raise UserError(
                f"a vocabulary is a list of distinct tokens that begins with {' '.join(SPECIAL_TOKENS)}, "
                f"found {len(self.tokens):,} tokens, {different:,} of them distinct: {' '.join(self.tokens[:5])}"
            )
        # A "<pad>" in a text is not padding: no text has the special tokens.
        self._ids = {token: number for number, token in enumerate(self.tokens) if number >= len(SPECIAL_TOKENS)}

    @classmethod
    def of(cls, tokens: Iterable[str]) -> "Vocabulary":
        """A vocabulary of ordinary tokens; the special ones are put in front, and left out of `tokens`."""
        return cls([*SPECIAL_TOKENS, *(token for token in tokens if token not in SPECIAL_TOKENS)])

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._ids

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.tokens == other.tokens

    @property
    def state(self) -> list[str]:
        """What a checkpoint keeps."""
        return list(self.tokens)

    def spell(self, word: str) -> list[int]:
        """The number of a word, as a list of one; `UNK` where it is outside the vocabulary."""
        return [self._ids.get(word, UNK)]

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens of numbers up to the first `EOS`, with spaces between them."""
        return " ".join(self.tokens[number] for number in strip_special_tokens(ids))

    def mark_unknown(self, sentence: str) -> str:
        """A normalised sentence with the tokens outside the vocabulary in square brackets."""
        return " ".join(token if token in self else f"[{token}]" for token in sentence.split())


def build_vocabulary(tokens: Sequence[str], counts: Sequence[int], most: int | None = None) -> Vocabulary:
    """The vocabulary of a text: the most frequent tokens first, equally frequent ones by the alphabet.

    Args:
        tokens: all of them, special ones in front.
        counts: how often each occurs; those that do not are left out.
        most: how many there may be, not counting the special ones.
    """
    ordinary = range(len(SPECIAL_TOKENS), len(tokens))
    chosen = sorted((n for n in ordinary if counts[n]), key=lambda n: (-counts[n], tokens[n]))
    return Vocabulary.of(tokens[n] for n in chosen[:most])
