"""Subword vocabularies, learnt by sentencepiece, with which no word is unknown."""

import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from datamodules.errors import UserError, spelled
from datamodules.translation.text import EOS, PAD, SOS, SPECIAL_TOKENS, UNK, Vocabulary, strip_special_tokens

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SubwordKind = Literal["bpe", "none"]

_LONGEST = 1_000_000  # Bytes of a text without a space; sentencepiece's own limit of 4,192 skips longer ones.


class SubwordVocabulary:
    """Vocabulary of subwords. The first four are `SPECIAL_TOKENS`, and 256 stand for single bytes.

    The subwords of a word do not depend on its neighbours. Characters that the training text lacks become bytes, so
    that any text can be encoded and decoded without loss, except for the character U+2581, which becomes a space:
    sentencepiece uses it for the space before a word.

    Args:
        model: serialised model of sentencepiece.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._ids: dict[str, list[int]] = {}

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        # Imported here, since runs without subwords need not load it.
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
        # A network may predict the byte of a line feed.
        return " ".join(text.split())

    def mark_unknown(self, sentence: str) -> str:
        """Return the sentence unchanged, since no word is unknown."""
        return sentence


def train_subwords(counts: Mapping[str, int], vocab_size: int) -> SubwordVocabulary:
    """Learn subwords by byte pair encoding (Sennrich et al., 2016).

    The result is a function of the arguments, on any machine with the same version of sentencepiece.

    Args:
        counts: number of occurrences of each word.
        vocab_size: greatest number of tokens, with special tokens and the 256 bytes; a small text gives fewer.

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
        # Sorted, so that the result does not depend on the order of `counts`.
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
                f"{spelled('vocab_size', vocab_size)} is below the {needed} tokens for single bytes and the characters"
                f" of the text; pass a larger one, such as {spelled('vocab_size', 8000)}"
            ) from None
    proto = ModelProto.FromString(model.getvalue())
    # The name of the temporary file differs in each call, and the model is compared with that of a checkpoint.
    proto.trainer_spec.ClearField("input")
    return SubwordVocabulary(proto.SerializeToString(deterministic=True))


AnyVocabulary = Vocabulary | SubwordVocabulary


def encode_tokens(vocabulary: AnyVocabulary, tokens: Sequence[str]) -> list[list[int]]:
    """Return the vocabulary's numbers for each token of a corpus, whose list begins with the special tokens."""
    special = [[number] for number in range(len(SPECIAL_TOKENS))]
    return [*special, *map(vocabulary.spell, tokens[len(SPECIAL_TOKENS) :])]


def vocabulary_from_state(state: Sequence[str] | bytes) -> AnyVocabulary:
    """Restore a vocabulary from its `state`: bytes for subwords, a list for words."""
    return SubwordVocabulary(state) if isinstance(state, bytes) else Vocabulary(state)
