"""What a translator takes from its data beside the batches, where the data module has it."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from datamodules.translation.subwords import AnyVocabulary
from datamodules.translation.text import Normalisation

__all__ = ["SentenceData", "VocabularyData"]


@runtime_checkable
class VocabularyData(Protocol):
    """A data module with vocabularies, as `TranslationDataModule`."""

    normalisation: Normalisation

    def vocabularies(self) -> tuple[AnyVocabulary, AnyVocabulary]:
        """Of the source and of the target."""


@runtime_checkable
class SentenceData(Protocol):
    """A data module that keeps its sentences as text; of each, `numbers` are int64 of shape (batch,)."""

    def source_sentences(self, numbers: Tensor) -> list[str]:
        """The source sentences with these numbers, normalised, with the words outside the vocabularies."""

    def target_sentences(self, numbers: Tensor) -> list[str]:
        """Their translations, to compare with."""

    def source_texts(self, numbers: Tensor) -> list[str]:
        """The source sentences with these numbers as they were written, for scores of detokenised text."""

    def target_texts(self, numbers: Tensor) -> list[str]:
        """Their translations as they were written, to compare with."""
