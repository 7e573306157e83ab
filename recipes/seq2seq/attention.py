"""Attention of each token of a translation over the source, as numbers and as figures."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.writing import atomic_write
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import inform
from datamodules.translation.loaders import TranslationBatch
from datamodules.translation.text import EOS, PAD, SOS, AnyVocabulary
from recipes.figures.drawing import PALETTE, Figure, color_style
from recipes.figures.plots import attention_plot
from recipes.prediction import predict

from .decoding import Vocabularies
from .network import TranslationNetwork
from .vocabularies import known

_ENDINGS = (".html", ".png")
_EXAMPLE = "attention_"
_EXAMPLES = 4
"""Number of translations of a test whose attention is shown."""


@dataclass(frozen=True)
class AttentionMap:
    """The attention of one translation.

    Args:
        source: the tokens of the source, with the end mark.
        translation: the tokens of the translation, with the end mark unless the translation was cut.
        weights: float32 of shape (translation, source); each row has the sum 1.
        sentences: the source, as the network reads it, and the translation.
    """

    source: list[str]
    translation: list[str]
    weights: Tensor
    sentences: tuple[str, str]

    def figure(self) -> Figure:
        """Plot the attention: a row for each token of the translation, a column for each token of the source."""
        return attention_plot(self.weights.tolist(), self.source, self.translation)


def has_attention(network: TranslationNetwork) -> bool:
    """Return whether a network has a method for its attention."""
    return type(network).attention is not TranslationNetwork.attention


@torch.no_grad()
def attention_maps(
    network: TranslationNetwork, batch: TranslationBatch, tokens: Tensor, vocabularies: Vocabularies | None
) -> list[AttentionMap]:
    """Return the attention of finished translations, computed in one pass; the network must be in eval mode.

    Args:
        network: the translation network.
        batch: the sources.
        tokens: the translations of `beam_search`: tokens, EOS, padding; of shape (batch, time).
        vocabularies: the vocabularies of source and target.

    Raises:
        UserError: the network has no method ``attention``.
    """
    if not has_attention(network):
        name = type(network).__name__
        raise UserError(f"{name} does not return its attention: give it a method attention(source, lengths, inputs)")
    sources, targets = known(vocabularies)
    starts = torch.full_like(tokens[:, :1], SOS)
    inputs = torch.cat((starts, tokens[:, :-1]), 1)
    weights = network.attention(batch.source, batch.source_lengths, inputs).float().cpu()
    maps = []
    rows = zip(weights, batch.source.tolist(), batch.source_lengths.tolist(), tokens.tolist(), strict=True)
    for weights_of_sentence, source_ids, length, ids in rows:
        ids_without_padding = [number for number in ids if number != PAD]
        if EOS in ids:
            ids_without_padding = ids[: ids.index(EOS) + 1]
        source = _names(source_ids[:length], sources)
        translation = _names(ids_without_padding, targets)
        # A copy: a view would keep the weights of the whole batch in memory.
        kept = weights_of_sentence[: len(translation), : len(source)].clone()
        sentences = (sources.decode(source_ids[:length]), targets.decode(ids_without_padding))
        maps.append(AttentionMap(source, translation, kept, sentences))
    return maps


def forget_examples(figures: dict[str, Any]) -> None:
    """Remove the examples of an earlier test."""
    for name in [name for name in figures if name.startswith(_EXAMPLE)]:
        del figures[name]


def add_examples(
    figures: dict[str, Any],
    network: TranslationNetwork,
    batch: TranslationBatch,
    tokens: Tensor,
    vocabularies: Vocabularies | None,
) -> None:
    """Add the attention of up to four translations of a test to its figures, preferably of about 8 words.

    The other arguments are the same as of `attention_maps`.
    """
    shown = sum(name.startswith(_EXAMPLE) for name in figures)
    if shown >= _EXAMPLES or not has_attention(network):
        return
    lengths = (tokens != PAD).sum(1)
    # Nine tokens are eight words and EOS. The sort is stable, so that equal lengths keep the order of the batch.
    chosen = (lengths - 9).abs().argsort(stable=True)[: _EXAMPLES - shown]
    maps = attention_maps(network, batch.select(chosen.cpu()), tokens[chosen], vocabularies)
    figures |= {f"{_EXAMPLE}{number}": attention_map.figure() for number, attention_map in enumerate(maps, shown + 1)}


def _names(ids: Iterable[int], vocabulary: AnyVocabulary) -> list[str]:
    tokens = vocabulary.tokens
    return [tokens[number] for number in ids]


def write_attention(path: Path, maps: Sequence[AttentionMap]) -> None:
    """Write the attention of translations into an HTML page or an image, by the file's suffix.

    Raises:
        OSError: the write failed; the file is unchanged.
    """
    with atomic_write(path) as temporary:
        if path.suffix == ".png":
            _stacked([attention_map.figure() for attention_map in maps]).save(temporary, "png")
        else:
            temporary.write_text(_page(maps), encoding="utf-8")


class AttentionWriter(pl.Callback):
    """Callback that writes the attention of the predict command's translations into a file.

    Runs on: `setup`, and the end of predict.

    Args:
        path: the file to write, or None.

    Raises:
        UserError: the file could not be written, or the command is not predict.
    """

    def __init__(self, path: str | None) -> None:
        if path is not None and Path(path).suffix not in _ENDINGS:
            problem = f"expected a name that ends in {' or '.join(_ENDINGS)}"
            raise UserError(problem, setting="attention", value=path)
        if path is not None and not Path(path).parent.is_dir():
            raise UserError(f"there is no folder {Path(path).parent}", setting="attention", value=path)
        self.path = path

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.path is not None and stage != "predict":
            raise UserError(
                f"{spelled('attention', self.path)} is for predict; a run's report shows it for some sentences"
            )

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.path is not None and pl_module.attention_maps:
            maps = [attention_map for _, attention_map in sorted(pl_module.attention_maps.items())]
            write_attention(Path(self.path), maps)
            inform(f"attention: {len(maps):,} translations in {self.path}")


def _page(maps: Sequence[AttentionMap]) -> str:
    style = "body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }"
    style += " div { overflow-x: auto; margin: 1rem 0 2rem; } svg text { font-family: system-ui, sans-serif; }"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    cells = []
    for attention_map in maps:
        source, translation = map(html.escape, attention_map.sentences)
        figure = attention_map.figure()
        cells.append(f"<h2>{source}<br>{translation}</h2>")
        cells.append(f"<div>{figure.html()}<p>{html.escape(figure.note)}</p></div>")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<meta name="color-scheme" content="light dark">'
        f"<title>Attention</title>\n<style>\n{color_style()}\n{style}\n</style>\n</head>\n<body>\n"
        f"<h1>Attention</h1>\n<p>Rows are the tokens of a translation, columns the tokens of its source.</p>\n"
        + "\n".join(cells)
        + "\n</body>\n</html>\n"
    )


def _stacked(figures: Sequence[Figure]) -> Any:
    from PIL import Image

    images = [figure.image() for figure in figures]
    gap = 24
    width = max(image.width for image in images) + 2 * gap
    height = sum(image.height + gap for image in images) + gap
    canvas = Image.new("RGB", (width, height), PALETTE["paper"])
    top = gap
    for image in images:
        canvas.paste(image, (gap, top))
        top += image.height + gap
    return canvas


class Translated(NamedTuple):
    """A translation and its attention.

    Args:
        text: the translation; None if there is nothing to translate in the sentence.
        attention: the attention of its tokens over the source.
    """

    text: str | None
    attention: AttentionMap | None


def translate(recipe: Any, sentences: str | Sequence[str], return_attention: bool = False) -> list[Any]:
    """Translate sentences as the predict command does.

    The attention is computed after the translation and only on request, so that it does not change the tokens.

    Args:
        recipe: a `Seq2SeqTranslator` from a checkpoint, or attached to a Trainer.
        sentences: one or several sentences as plain text.
        return_attention: whether to return each translation with its attention.

    Returns:
        The translations as text, or as `Translated`: a text and an `AttentionMap`, whose ``weights`` have the shape
        (tokens of the translation, tokens of the source). The weights are the attention of a recurrent network (Luong
        et al., 2015, after Bahdanau et al., 2015), or of a Transformer's last decoder layer over the source, a mean
        over the heads (Vaswani et al., 2017).

    Raises:
        UserError: there is nothing to translate, or the network has no method ``attention``.

    Example:
        >>> model = Seq2SeqTranslator.load_from_checkpoint("best.ckpt")  # doctest: +SKIP
        >>> (found,) = translate(model, "je suis fatigué .", return_attention=True)  # doctest: +SKIP
        >>> found.text, tuple(found.attention.weights.shape)  # doctest: +SKIP
        ('i am tired .', (5, 5))
    """
    previous_maps = recipe.attention_maps
    recipe.attention_maps = {} if return_attention else None
    try:
        rows = predict(recipe, sentences)
        maps = recipe.attention_maps
    finally:
        recipe.attention_maps = previous_maps
    texts = [row["translation"] for row in rows]
    if maps is None:
        return texts
    return [Translated(text, maps.get(number)) for number, text in enumerate(texts)]
