"""Sentences as words and words as numbers: normalising, splitting and vocabularies.

Whole files are normalised at once by character tables (`str.translate`), which is several times faster than regular
expressions sentence by sentence.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError

__all__ = [
    "EOS",
    "PAD",
    "SOS",
    "SPECIAL_WORDS",
    "UNK",
    "Normalisation",
    "Vocabulary",
    "choose_words",
    "normalise",
    "normalise_lines",
]

PAD, SOS, EOS, UNK = range(4)
"""Padding, start of a sentence, its end, and any word that the vocabulary lacks."""
SPECIAL_WORDS = ("<pad>", "<sos>", "<eos>", "<unk>")

Normalisation = Literal["unicode", "none", "tutorial", "tutorial-2017"]


class _CharacterTable(dict[int, str]):
    """A table for `str.translate` that asks a function about each character once."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__({ord("\n"): "\n"})
        self.replacement = replacement

    def __missing__(self, code: int) -> str:
        self[code] = self.replacement(chr(code))
        return self[code]


_APOSTROPHES = "'\u2019\u02bc\u2032"
# Soft hyphen, zero-width space, word joiner, byte-order mark; joiners that shape Persian or emoji stay.
_INVISIBLE = "\u00ad\u200b\u2060\ufeff"


def _unicode_character(char: str) -> str:
    """Marks are no letters to Python's regular expressions, hence categories: they belong to the word."""
    if char in _APOSTROPHES:
        return "'"
    if char in _INVISIBLE:
        return ""
    category = unicodedata.category(char)
    if category[0] in "PS":
        return f" {char} "
    return " " if category[0] == "Z" or category == "Cc" else char


def _plain_character(char: str) -> str:
    return " " if unicodedata.category(char) in ("Cc", "Zs", "Zl", "Zp") else char


def _tutorial_character(kept: str) -> Callable[[str], str]:
    def replacement(char: str) -> str:
        if "a" <= char <= "z":
            return char
        if unicodedata.category(char) == "Mn":
            return ""
        return f" {char}" if char in kept else " "

    return replacement


_TABLES = {
    "unicode": _CharacterTable(_unicode_character),
    "none": _CharacterTable(_plain_character),
    "tutorial": _CharacterTable(_tutorial_character("!?")),
    "tutorial-2017": _CharacterTable(_tutorial_character(".!?")),
}


def _split_at_apostrophes(text: str) -> str:
    """An apostrophe ends its word, or is one where no word precedes it: ``j'ai`` becomes ``j'`` and ``ai``."""
    pieces = text.split("'")
    out = [pieces[0]]
    for before, after in pairwise(pieces):
        out.append(f"' {after}" if before[-1:].strip() else f" ' {after}")
    return "".join(out)


def normalise_lines(lines: Sequence[str], how: Normalisation = "unicode") -> list[str]:
    """Sentences as words with single spaces between them.

    Args:
        lines: sentences, none with a line break.
        how: "unicode" keeps every script with its accents, in lower case (NFC), and makes words of punctuation;
            "none" only splits at spaces, for text that is split already; "tutorial" leaves a to z, ! and ?, as
            PyTorch's translation tutorial does today, and "tutorial-2017" the full stop too, as it did before.

    Raises:
        UserError: there is no such normalisation.
    """
    if how not in _TABLES:
        raise UserError(f"no normalisation {how!r}; expected one of {', '.join(get_args(Normalisation))}")
    text = "\n".join(lines)
    if how == "none":
        text = text.translate(_TABLES[how])
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


class Vocabulary:
    """The words that a network knows, by number; the first four are `SPECIAL_WORDS`.

    Args:
        words: all of them, with the special ones in front.

    Raises:
        UserError: the list does not begin with the special words, or has a word twice.

    Example:
        >>> vocabulary = Vocabulary.of(["chat", "le"])
        >>> vocabulary.encode("le chien")
        [5, 3, 2]
        >>> vocabulary.decode([1, 5, 4, 2, 0])
        'le chat'
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(words)
        different = len(set(self.words))
        if tuple(self.words[:4]) != SPECIAL_WORDS or different != len(self.words):
            raise UserError(
                f"a vocabulary is a list of different words that begins with {' '.join(SPECIAL_WORDS)}, "
                f"found {len(self.words):,} words, {different:,} of them different: {' '.join(self.words[:5])}"
            )
        # A text that says "<pad>" does not mean padding: no text has the special words.
        self._ids = {word: number for number, word in enumerate(self.words) if number >= len(SPECIAL_WORDS)}

    @classmethod
    def of(cls, words: Iterable[str]) -> "Vocabulary":
        """A vocabulary of ordinary words; the special ones are put in front, and left out of `words`."""
        return cls([*SPECIAL_WORDS, *(word for word in words if word not in SPECIAL_WORDS)])

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    __hash__ = None  # type: ignore[assignment]

    def id_of(self, word: str) -> int:
        """The number of a word; `UNK` where it is not known."""
        return self._ids.get(word, UNK)

    def ids_of(self, words: Sequence[str]) -> Tensor:
        """The numbers of a list of words, special ones in front, as int64 of shape (len(words),)."""
        return torch.tensor([*range(len(SPECIAL_WORDS)), *map(self.id_of, words[len(SPECIAL_WORDS) :])])

    def encode(self, sentence: str) -> list[int]:
        """The numbers of a normalised sentence's words, and `EOS`."""
        return [*(self.id_of(word) for word in sentence.split()), EOS]

    def decode(self, ids: Iterable[int]) -> str:
        """The words of numbers up to the first `EOS`, without padding and start marks."""
        words = []
        for number in map(int, ids):
            if number == EOS:
                break
            if number not in (PAD, SOS):
                words.append(self.words[number])
        return " ".join(words)

    def mark_unknown(self, sentence: str) -> str:
        """A normalised sentence with its unknown words in square brackets.

        Example:
            >>> Vocabulary.of(["le", "chat"]).mark_unknown("le chat dort")
            'le chat [dort]'
        """
        return " ".join(word if word in self else f"[{word}]" for word in sentence.split())


def choose_words(words: Sequence[str], counts: Sequence[int], min_count: int, max_words: int | None) -> Vocabulary:
    """The vocabulary of a text: the most frequent words first, equally frequent ones by the alphabet.

    Args:
        words: all of them, special ones in front.
        counts: how often each occurs.
        min_count: how often a word has to occur.
        max_words: how many there may be, without the special ones.
    """
    ordinary = range(len(SPECIAL_WORDS), len(words))
    chosen = sorted((n for n in ordinary if counts[n] >= max(1, min_count)), key=lambda n: (-counts[n], words[n]))
    return Vocabulary.of(words[n] for n in chosen[:max_words])
