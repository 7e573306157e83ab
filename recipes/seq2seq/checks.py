"""Checks of a translator's arguments and vocabularies, and what it may ask of its data module."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.ranges import COUNT, SHARE, SIZE, Range, check_ranges
from datamodules.translation.subwords import AnyVocabulary
from datamodules.translation.text import Normalisation
from recipes.seq2seq.transformer import TransformerNet

__all__ = [
    "CheckVocabularies",
    "SentenceData",
    "Vocabularies",
    "VocabularyData",
    "check_network",
    "check_numbers",
    "known",
]

Vocabularies = tuple[AnyVocabulary, AnyVocabulary]
"""Of the source and of the target."""


@runtime_checkable
class VocabularyData(Protocol):
    """A data module with vocabularies, as `TranslationDataModule`."""

    normalisation: Normalisation

    def vocabularies(self) -> Vocabularies:
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


def check_network(
    networks: Sequence[str],
    network: str,
    hidden_size: int,
    num_layers: int | None,
    heads: int,
    feedforward_size: int,
    dropout: float,
) -> None:
    """Refuse a network that is none of `networks`, sizes that it cannot have, and those of the other network.

    Raises:
        UserError: says what to pass.
    """
    if network not in networks:
        raise UserError(f"no network={network!r}; expected one of {', '.join(networks)}")
    if network == "rnn":
        for name, given in {"heads": heads, "feedforward_size": feedforward_size}.items():
            default = inspect.signature(TransformerNet).parameters[name].default
            if given != default:
                raise UserError(f"{name}={given!r}: network={network!r} has no {name}; leave it at {default!r}")
        if hidden_size < 2 or hidden_size % 2:
            raise UserError(f"hidden_size={hidden_size} cannot be halved between two directions; pass an even number")
    check_ranges(
        hidden_size=(hidden_size, SIZE),
        heads=(heads, SIZE),
        feedforward_size=(feedforward_size, SIZE),
        dropout=(dropout, Range(0, 1, below=True)),
        num_layers=(num_layers, Range(1, 100, whole=True)),
    )


def check_numbers(
    source_vocab_size: int | None,
    target_vocab_size: int | None,
    label_smoothing: float,
    val_sentences: int,
    beam: int,
    length_penalty: float,
) -> None:
    """Refuse numbers outside of their ranges, and a recipe that has not been told the sizes of its vocabularies.

    Raises:
        UserError: says what to pass.
    """
    if source_vocab_size is None or target_vocab_size is None:
        raise UserError(
            "the sizes of the vocabularies were neither given nor found in the data; pass `source_vocab_size` and"
            " `target_vocab_size`, the lengths of data.source_vocabulary and data.target_vocabulary"
        )
    check_ranges(
        source_vocab_size=(source_vocab_size, COUNT),
        target_vocab_size=(target_vocab_size, COUNT),
        label_smoothing=(label_smoothing, SHARE),
        val_sentences=(val_sentences, COUNT),
        beam=(beam, Range(1, 1000, whole=True)),
        length_penalty=(length_penalty, Range(-10, 10)),
    )


class CheckVocabularies(pl.Callback):
    """Refuses data whose vocabularies have other sizes than the network's.

    Runs on: the start of a fit, of a validation and of a test.

    Raises:
        UserError: says what to pass.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.vocabularies is None:
            return
        sizes = pl_module.hparams.source_vocab_size, pl_module.hparams.target_vocab_size
        for vocabulary, size, side in zip(pl_module.vocabularies, sizes, ("source", "target"), strict=True):
            if len(vocabulary) != size:
                raise UserError(
                    f"the network has {size:,} {side} tokens, and the data has {len(vocabulary):,}; pass the data and "
                    f"the settings that it was trained with, or {side}_vocab_size={len(vocabulary)} for a new network"
                )

    on_validation_start = on_test_start = on_fit_start


def known(vocabularies: Vocabularies | None) -> Vocabularies:
    """The vocabularies, which translating needs.

    Raises:
        UserError: there are none; it says where they come from.
    """
    if vocabularies is None:
        raise UserError(
            "the network has no vocabularies yet; train it on a TranslationDataModule, load a checkpoint, or set "
            "recipe.vocabularies = (source, target)"
        )
    return vocabularies
