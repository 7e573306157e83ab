"""The output of the predict command for translations: rows of a table, and an image of the attention weights."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from callbacks.drawing.translation_samples import Translation, attention_figure
from datamodules.errors import UserError
from datamodules.translation.subwords import AnyVocabulary

__all__ = ["MOST_PANELS", "check_image_file", "draw_attention", "translation_rows"]

log = logging.getLogger("lightning_recipes")

MOST_PANELS = 12
"""Sentences in one image at most."""


def check_image_file(file: str | None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if file is None:
        return
    if Path(file).suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f'attention="{file}": expected a name that ends in .png, .pdf or .svg')
    if not Path(file).parent.is_dir():
        raise UserError(f'attention="{file}": there is no folder {Path(file).parent}')


def _by_sentence(outputs: Iterable[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """The sentences of all batches, in the order of their numbers."""
    each = (
        (number, {name: part[i] for name, part in batch.items() if name != "numbers"})
        for batch in outputs
        for i, number in enumerate(batch["numbers"])
    )
    return sorted(each, key=lambda pair: pair[0])


def translation_rows(
    outputs: Iterable[dict[str, Any]], names: Sequence[str], target: AnyVocabulary
) -> list[dict[str, Any]]:
    """A row for each translation, in the order of the sentences.

    Args:
        outputs: of `Seq2SeqTranslator.predict_step`.
        names: the sentences, by number.
        target: makes text of the tokens.
    """
    return [
        {
            "sentence": names[number],
            "translation": target.decode(found["tokens"].tolist()),
            "score": float(found["scores"]),
            "note": None,
        }
        for number, found in _by_sentence(outputs)
    ]


@rank_zero_only
def draw_attention(
    file: str, outputs: Iterable[dict[str, Any]], names: Sequence[str], source: AnyVocabulary, target: AnyVocabulary
) -> None:
    """Draw the attention weights of the best translations; `outputs` and `names` as in `translation_rows`."""
    sentences = _by_sentence(outputs)
    samples = []
    for number, found in sentences[:MOST_PANELS]:
        if found["attention"] is not None:
            best = found["tokens"].tolist()
            tokens = source.split(names[number]), target.pieces(best)
            samples.append(Translation(names[number], target.decode(best), None, found["attention"], tokens))
    if len(sentences) > MOST_PANELS:
        log.warning("%s shows the first %d of %d sentences", file, MOST_PANELS, len(sentences))
    if samples:
        attention_figure(samples).savefig(file, dpi=150, bbox_inches="tight")
