"""What a translator asks of the vocabularies of its data."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.translation.subwords import AnyVocabulary

__all__ = ["CheckVocabularies", "Vocabularies", "known"]

Vocabularies = tuple[AnyVocabulary, AnyVocabulary]
"""Of the source and of the target."""


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
