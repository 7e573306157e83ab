"""Parts of words as tokens, learnt from a text by sentencepiece, so that no word is unknown."""

import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from datamodules.errors import UserError
from datamodules.translation.text import EOS, PAD, SOS, SPECIAL_TOKENS, UNK, Vocabulary, strip_special_tokens

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SubwordKind = Literal["bpe", "none"]

_LONGEST = 1_000_000  # Bytes of a text without a space; sentencepiece's own limit of 4,192 skips longer ones.


class SubwordVocabulary:
    """Parts of words, by number; the first four are `SPECIAL_TOKENS`, and 256 stand for single bytes.

    What words become does not depend on the words beside them. Characters that the training text did not have become
    bytes, so that any text can be encoded and is decoded as it was, except for the character U+2581, which becomes a
    space.

    Args:
        model: what sentencepiece wrote.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._ids: dict[str, list[int]] = {}

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        # Imported here: most runs need no subwords.
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self.model)
        except RuntimeError:
            raise UserError(f"found {len(self.model):,} bytes that are no model of sentencepiece") from None

    @property
    def state(self) -> bytes:
        """What a checkpoint keeps."""
        return self.model

    @property
    def tokens(self) -> list[str]:
        """All of them, in the order of their numbers."""
        return [self._processor.id_to_piece(number) for number in range(len(self))]

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubwordVocabulary) and self.model == other.model

    def spell(self, word: str) -> list[int]:
        """The numbers of a word's parts."""
        if word not in self._ids:
            self._ids[word] = self._processor.encode(word)
        return self._ids[word]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of numbers up to the first `EOS`, as it is written, in one line with single spaces."""
        # A network may choose the bytes of a line feed.
        return " ".join(self._processor.decode([n for n in strip_special_tokens(ids) if n != UNK]).split())

    def mark_unknown(self, sentence: str) -> str:
        """The sentence: no word is unknown."""
        return sentence


def train_subwords(counts: Mapping[str, int], vocab_size: int) -> SubwordVocabulary:
    """Learn parts of words: byte pair encoding (Sennrich et al., 2016).

    The result is a function of the arguments, on any machine with the same version of sentencepiece.

    Args:
        counts: how often each word occurs.
        vocab_size: tokens at most, special ones and the 256 bytes counted; small texts support fewer.

    Raises:
        UserError: the text has more characters than there may be tokens.
    """
    from sentencepiece import SentencePieceTrainer
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    special: dict[str, Any] = {}
    for number, name in zip((PAD, SOS, EOS, UNK), ("pad", "bos", "eos", "unk"), strict=True):
        special |= {f"{name}_id": number, f"{name}_piece": SPECIAL_TOKENS[number]}
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
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
                max_sentence_length=_LONGEST,
                num_threads=1,
                minloglevel=2,
                **special,
            )
        except RuntimeError as error:
            if "smaller than required_chars" not in str(error):
                raise UserError(f"sentencepiece cannot learn from {len(counts):,} different words: {error}") from None
            needed = str(error).rpartition(" vs ")[2].partition(".")[0]
            raise UserError(
                f"vocab_size={vocab_size} is below the {needed} tokens for single bytes and the characters of the"
                f" text; pass a larger one, such as vocab_size=8000"
            ) from None
    found = ModelProto.FromString(model.getvalue())
    found.trainer_spec.ClearField("input")  # The name of the temporary file.
    return SubwordVocabulary(found.SerializeToString(deterministic=True))


AnyVocabulary = Vocabulary | SubwordVocabulary


def encode_tokens(vocabulary: AnyVocabulary, tokens: Sequence[str]) -> list[list[int]]:
    """The numbers of each token of a corpus, special ones in front."""
    special = [[number] for number in range(len(SPECIAL_TOKENS))]
    return [*special, *map(vocabulary.spell, tokens[len(SPECIAL_TOKENS) :])]


def vocabulary_from_state(state: Sequence[str] | bytes) -> AnyVocabulary:
    """The vocabulary of which this is the `state`."""
    return SubwordVocabulary(state) if isinstance(state, bytes) else Vocabulary(state)
