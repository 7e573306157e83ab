"""Vocabularies of a translator: from data or weights, and in exported files.

Tested in `tests/recipes/seq2seq/test_recipe.py`.
"""

import base64
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from datamodules.errors import UserError, spelled
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.text import Normalization, SubwordVocabulary
from recipes.weights import read_beside, skip_patterns

from .decoding import Vocabularies

_SIDES = ("source", "target")
_LAYERS = ("source_embedding", "target_embedding", "output")
"""The layers with a row for each token."""


def load_vocabularies(data: TranslationDataModule, weights: str | None, weights_skip: Any) -> None:
    """Make the data use the vocabularies in a file of weights, because the embeddings have a row for each token.

    The data keeps its own vocabularies if `weights_skip` names source_embedding, target_embedding and output.
    """
    saved = read_beside(weights)
    if "normalization" not in saved or all(_is_skipped(layer, weights_skip) for layer in _LAYERS):
        return
    source, target = saved.get("vocabularies") or [_exported_vocabulary(saved, side) for side in _SIDES]
    state = {"source_tokens": source, "target_tokens": target, "normalization": saved["normalization"]}
    data.load_state_dict(state)
    data.setup("fit")


def _is_skipped(layer: str, weights_skip: Any) -> bool:
    names = (layer, f"{layer}.weight")
    return any(fnmatchcase(name, pattern) for pattern in skip_patterns(weights_skip) for name in names)


def _exported_vocabulary(saved: Mapping[str, Any], side: str) -> Any:
    """Read a vocabulary that `vocabulary_metadata` has written."""
    if f"{side}_subwords" in saved:
        return base64.b64decode(saved[f"{side}_subwords"])
    return saved[f"{side}_vocabulary"]


def vocabulary_metadata(vocabularies: Vocabularies, normalization: Normalization) -> dict[str, Any]:
    """Return the vocabularies for exported files: their tokens, and sentencepiece's own files of subwords."""
    metadata: dict[str, Any] = {"normalization": normalization}
    for side, vocabulary in zip(_SIDES, vocabularies, strict=True):
        metadata[f"{side}_vocabulary"] = vocabulary.tokens
        if isinstance(vocabulary, SubwordVocabulary):
            metadata[f"{side}_subwords"] = base64.b64encode(vocabulary.model).decode()
    return metadata


def check_given(source_vocab_size: int | None, target_vocab_size: int | None) -> None:
    """Reject a network without the sizes of its vocabularies."""
    if source_vocab_size is None or target_vocab_size is None:
        raise UserError(
            f"the sizes of the vocabularies were neither given nor found in the data; pass"
            f" {spelled('source_vocab_size')} and {spelled('target_vocab_size')}, the lengths of"
            " data.source_vocabulary and data.target_vocabulary"
        )


def known(vocabularies: Vocabularies | None) -> Vocabularies:
    """Return the vocabularies, or raise an error if there are none.

    Raises:
        UserError: the network has no vocabularies.
    """
    if vocabularies is None:
        raise UserError(
            "the network has no vocabularies yet; train it on a TranslationDataModule, load a checkpoint, or set "
            "recipe.vocabularies = (source, target)"
        )
    return vocabularies


def check_sizes(vocabularies: Vocabularies | None, source_size: int, target_size: int) -> None:
    """Reject data whose vocabularies have other sizes than the network's.

    Raises:
        UserError: a size differs.
    """
    for vocabulary, size, side in zip(vocabularies or (), (source_size, target_size), _SIDES):
        if len(vocabulary) != size:
            raise UserError(
                f"the network has {size:,} {side} tokens, and the data has {len(vocabulary):,}; pass the data and "
                f"the settings that it was trained with, or {side}_vocab_size={len(vocabulary)} for a new network"
            )
