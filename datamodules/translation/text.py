"""Normalization of text, tokenization, and vocabularies of words and of subwords (sentencepiece)."""

import io
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import override

from datamodules.errors import UserError, spelled

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

PAD, SOS, EOS, UNK = range(4)
"""Numbers of the special tokens: padding, start and end of a sentence, and unknown tokens."""
SPECIAL_TOKENS = ("<pad>", "<sos>", "<eos>", "<unk>")

Normalization = Literal["unicode", "none", "tutorial", "tutorial-2017"]


class _CharacterTable(dict[int, str]):
    """Table for `str.translate` that calls a function once for each distinct character."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__({ord("\n"): "\n"})
        self.replacement = replacement

    def __missing__(self, code: int) -> str:
        self[code] = self.replacement(chr(code))
        return self[code]


_APOSTROPHES = "'\u2019\u02bc\u2032"
INVISIBLE = "\u00ad\u200b\u2060\ufeff"
"""Soft hyphen, zero-width space, word joiner, byte-order mark. Joiners needed in Persian and emoji are kept."""


def _unicode_character(char: str) -> str:
    """Return the replacement of a character in "unicode" normalization: punctuation becomes a separate token."""
    # By Unicode categories, because `\w` of regular expressions excludes combining marks, which are part of a word.
    if char in _APOSTROPHES:
        return "'"
    if char in INVISIBLE:
        return ""
    category = unicodedata.category(char)
    if category[0] in "PS":
        return f" {char} "
    return " " if category[0] == "Z" or category == "Cc" else char


def _plain_character(char: str) -> str:
    """Return the replacement of a character in "none" normalization: control characters become spaces."""
    return " " if unicodedata.category(char) in ("Cc", "Zs", "Zl", "Zp") else char


def _tutorial_character(char: str) -> str:
    """Return the replacement of a character in "tutorial" normalization."""
    if "a" <= char <= "z":
        return char
    if unicodedata.category(char) == "Mn":
        return ""
    return f" {char}" if char in "!?" else " "


def _tutorial_2017_character(char: str) -> str:
    """Return the replacement of a character in "tutorial-2017" normalization."""
    return " ." if char == "." else _tutorial_character(char)


_TABLES = {
    "unicode": _CharacterTable(_unicode_character),
    "none": _CharacterTable(_plain_character),
    "tutorial": _CharacterTable(_tutorial_character),
    "tutorial-2017": _CharacterTable(_tutorial_2017_character),
}


def _split_at_apostrophes(text: str) -> str:
    """Split text after apostrophes: ``j'ai`` becomes ``j'`` and ``ai``. An apostrophe after a space is a token."""
    pieces = text.split("'")
    tokens = [pieces[0]]
    for before, after in pairwise(pieces):
        tokens.append(f"' {after}" if before[-1:].strip() else f" ' {after}")
    return "".join(tokens)


def normalize_lines(lines: Sequence[str], how: Normalization = "unicode") -> list[str]:
    """Normalize sentences to tokens with single spaces between them.

    Args:
        lines: sentences without line breaks.
        how: "unicode" keeps every script with its accents, in lower case (NFC), and separates punctuation; "none" only
            composes characters (NFC) and splits at spaces; "tutorial" keeps only a to z, ! and ?, as PyTorch's
            translation tutorial; "tutorial-2017" also the full stop, as the tutorial's first edition.

    Raises:
        UserError: there is no such normalization.
    """
    if how not in _TABLES:
        raise UserError(f"no normalization {how!r}; expected one of {', '.join(get_args(Normalization))}")
    # All lines in one call: faster than one call per line.
    text = "\n".join(lines)
    if how == "none":
        text = unicodedata.normalize("NFC", text.translate(_TABLES[how]))
    elif how == "unicode":
        # Composed after the table, which may drop a character between a letter and its accent.
        text = _split_at_apostrophes(unicodedata.normalize("NFC", text.lower().translate(_TABLES[how])))
    else:
        text = unicodedata.normalize("NFD", text.lower()).translate(_TABLES[how])
    return [" ".join(line.split()) for line in text.split("\n")] if lines else []


def normalize(sentence: str, how: Normalization = "unicode") -> str:
    """Normalize one sentence, see `normalize_lines`.

    Example:
        >>> normalize("J’ai 2 chats, n'est-ce pas?")
        "j' ai 2 chats , n' est - ce pas ?"
        >>> normalize("Ça va, n'est-ce pas?", "tutorial")
        'ca va n est ce pas ?'
    """
    return normalize_lines([sentence.replace("\n", " ")], how)[0]


def strip_special_tokens(ids: Iterable[int]) -> list[int]:
    """Return the numbers up to the first `EOS`, without `PAD` and `SOS`."""
    return [number for number in takewhile(EOS.__ne__, map(int, ids)) if number not in (PAD, SOS)]


class Vocabulary:
    """Vocabulary of words of one side. The first four tokens are `SPECIAL_TOKENS`.

    Args:
        tokens: all tokens, the special tokens first.

    Raises:
        UserError: the list does not begin with the special tokens, or contains a token twice.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = list(tokens)
        num_distinct = len(set(self.tokens))
        if tuple(self.tokens[:4]) != SPECIAL_TOKENS or num_distinct != len(self.tokens):
            raise UserError(
                f"a vocabulary is a list of distinct tokens that begins with {' '.join(SPECIAL_TOKENS)}, "
                f"found {len(self.tokens):,} tokens, {num_distinct:,} of them distinct: {' '.join(self.tokens[:5])}"
            )
        # Special tokens are not looked up: the text "<pad>" is an unknown word, not padding.
        self._ids = {token: number for number, token in enumerate(self.tokens) if number >= len(SPECIAL_TOKENS)}

    @classmethod
    def of(cls, tokens: Iterable[str]) -> "Vocabulary":
        """Make a vocabulary of ordinary tokens, preceded by the special tokens."""
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
        """State for a checkpoint."""
        return list(self.tokens)

    def spell(self, word: str) -> list[int]:
        """Return the number of a word, or `UNK` for an unknown word, as a list of one number."""
        return [self._ids.get(word, UNK)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the tokens of numbers up to the first `EOS`, separated by spaces."""
        return " ".join(self.tokens[number] for number in strip_special_tokens(ids))

    def mark_unknown(self, sentence: str) -> str:
        """Return a normalized sentence with unknown tokens in square brackets."""
        marked = []
        for token in sentence.split():
            marked.append(token if token in self else f"[{token}]")
        return " ".join(marked)


def build_vocabulary(tokens: Sequence[str], counts: Sequence[int], most: int | None = None) -> Vocabulary:
    """Build the vocabulary of a text, with the most frequent tokens first and ties in alphabetical order.

    Args:
        tokens: all tokens, the special tokens first.
        counts: number of occurrences of each token; tokens that do not occur are left out.
        most: maximum number of tokens, without the special tokens.
    """

    def sort_key(number: int) -> tuple[int, str]:
        return -counts[number], tokens[number]

    occurring = [number for number in range(len(SPECIAL_TOKENS), len(tokens)) if counts[number]]
    chosen = sorted(occurring, key=sort_key)
    return Vocabulary.of(tokens[number] for number in chosen[:most])


SubwordKind = Literal["bpe", "none"]

_MAX_TEXT_BYTES = 1_000_000  # Bytes of a text without a space; sentencepiece's own limit of 4,192 skips longer ones.


class SubwordVocabulary:
    """Vocabulary of subwords. The first four tokens are `SPECIAL_TOKENS`, and 256 tokens are single bytes.

    The subwords of a word do not depend on its neighbors. Characters that the training text lacks become bytes, so any
    text can be encoded and decoded without loss, except the character U+2581, which becomes a space: sentencepiece
    uses it for the space before a word.

    Args:
        model: serialized model of sentencepiece.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._ids: dict[str, list[int]] = {}

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        # Imported here, because runs without subwords do not need it.
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self.model)
        except RuntimeError:
            raise UserError(f"found {len(self.model):,} bytes that are no model of sentencepiece") from None

    @property
    def state(self) -> bytes:
        """State for a checkpoint."""
        return self.model

    @property
    def tokens(self) -> list[str]:
        """All tokens, in the order of their numbers."""
        return [self._processor.id_to_piece(number) for number in range(len(self))]

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubwordVocabulary) and self.model == other.model

    def spell(self, word: str) -> list[int]:
        """Return the numbers of the subwords of a word."""
        if word not in self._ids:
            self._ids[word] = self._processor.encode(word)
        return self._ids[word]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of numbers up to the first `EOS`, in one line with single spaces."""
        numbers = [number for number in strip_special_tokens(ids) if number != UNK]
        text: str = self._processor.decode(numbers)
        # Joined again, because a network may predict the byte of a line feed.
        return " ".join(text.split())

    def mark_unknown(self, sentence: str) -> str:
        """Return the sentence unchanged, since no word is unknown."""
        return sentence


def train_subwords(counts: Mapping[str, int], vocab_size: int) -> SubwordVocabulary:
    """Learn subwords by byte pair encoding (Sennrich et al., 2016).

    The result is a function of the arguments, on any machine with the same version of sentencepiece.

    Args:
        counts: number of occurrences of each word.
        vocab_size: maximum number of tokens, with special tokens and the 256 bytes; a small text gives fewer.

    Raises:
        UserError: the text has more distinct characters than `vocab_size` allows.
    """
    from sentencepiece import SentencePieceTrainer
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    special: dict[str, Any] = {}
    for number, name in zip((PAD, SOS, EOS, UNK), ("pad", "bos", "eos", "unk"), strict=True):
        special |= {f"{name}_id": number, f"{name}_piece": SPECIAL_TOKENS[number]}
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        # Sorted: the result must not depend on the order of `counts`.
        words = Path(folder, "words.tsv")
        words.write_text("".join(f"{word}\t{counts[word]}\n" for word in sorted(counts)), encoding="utf-8")
        try:
            SentencePieceTrainer.train(
                input=str(words),
                input_format="tsv",
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                max_sentence_length=_MAX_TEXT_BYTES,
                num_threads=1,
                minloglevel=2,
                **special,
            )
        except RuntimeError as error:
            if "smaller than required_chars" not in str(error):
                raise UserError(f"sentencepiece cannot learn from {len(counts):,} different words: {error}") from None
            needed = str(error).rpartition(" vs ")[2].partition(".")[0]
            raise UserError(
                f"{spelled('vocab_size', vocab_size)} is below the {needed} tokens for single bytes and the characters"
                f" of the text; pass a larger one, such as {spelled('vocab_size', 8000)}"
            ) from None
    proto = ModelProto.FromString(model.getvalue())
    # The name of the temporary file differs in each call, and a checkpoint's model must be equal.
    proto.trainer_spec.ClearField("input")
    return SubwordVocabulary(proto.SerializeToString(deterministic=True))


AnyVocabulary = Vocabulary | SubwordVocabulary


def encode_tokens(vocabulary: AnyVocabulary, tokens: Sequence[str]) -> list[list[int]]:
    """Return the numbers of each token of a corpus in a vocabulary; the list begins with the special tokens."""
    special = [[number] for number in range(len(SPECIAL_TOKENS))]
    return [*special, *map(vocabulary.spell, tokens[len(SPECIAL_TOKENS) :])]


def vocabulary_from_state(state: Sequence[str] | bytes) -> AnyVocabulary:
    """Restore a vocabulary from its `state`: bytes for subwords, a list for words."""
    return SubwordVocabulary(state) if isinstance(state, bytes) else Vocabulary(state)
