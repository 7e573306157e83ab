"""What the predict command shows of translations: rows of a table, and the picture of their attention."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from callbacks.drawing.translation_images import Translation, attention_figure
from datamodules.errors import UserError
from recipes.seq2seq.attention import ATTENTIONS

__all__ = ["MOST_PANELS", "check_picture", "draw_attention", "translation_rows"]

log = logging.getLogger("lightning_recipes")

MOST_PANELS = 12
"""Sentences in one picture at most."""


def check_picture(file: str | None) -> None:
    """Refuse a picture that could not be drawn, before anything is computed."""
    if file is None:
        return
    if file in ATTENTIONS:
        raise UserError(f"--attention names the picture to draw; the kind of attention is --attention-type {file}")
    if Path(file).suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--attention {file}: expected a name that ends in .png, .pdf or .svg")
    if not Path(file).parent.is_dir():
        raise UserError(f"--attention {file}: there is no folder {Path(file).parent}")


def _by_sentence(outputs: Iterable[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """The sentences of all batches, in the order of their numbers."""
    each = (
        (number, {name: part[i] for name, part in batch.items() if name != "numbers"})
        for batch in outputs
        for i, number in enumerate(batch["numbers"])
    )
    return sorted(each, key=lambda pair: pair[0])


def translation_rows(
    outputs: Iterable[dict[str, Any]], names: Sequence[str], decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """A row for each translation, in the order of the sentences, the best translation first.

    Args:
        outputs: of `Seq2SeqTranslator.predict_step`.
        names: the sentences, by number.
        decode: makes words of numbers.
    """
    return [
        {"sentence": names[number], "rank": rank, "translation": decode(words), "score": score}
        for number, found in _by_sentence(outputs)
        for rank, (words, score) in enumerate(zip(found["words"].tolist(), found["scores"].tolist()), 1)
        # Where there are fewer translations than were asked for.
        if score > -math.inf
    ]


@rank_zero_only
def draw_attention(
    file: str, outputs: Iterable[dict[str, Any]], names: Sequence[str], decode: Callable[[list[int]], str]
) -> None:
    """Draw what each word of the best translations looked at; arguments as in `translation_rows`."""
    sentences = _by_sentence(outputs)
    samples = [
        Translation(names[number], decode(found["words"][0].tolist()), None, found["attention"])
        for number, found in sentences[:MOST_PANELS]
    ]
    if len(sentences) > MOST_PANELS:
        log.warning("%s shows the first %d of %d sentences", file, MOST_PANELS, len(sentences))
    if samples:
        attention_figure(samples).savefig(file, dpi=150, bbox_inches="tight")
