"""Sample translations in TensorBoard: texts after each validation, attention weights at the end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from callbacks.drawing.evaluation_samples import EvaluationSamples, tensorboards
from callbacks.lib.writing import best_effort
from datamodules.ranges import NATURAL, check_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Translation", "TranslationSamples", "attention_figure", "translations_table"]

_END = "<eos>"


class Translation(NamedTuple):
    """A sentence, its translation, the reference, and the attention weights of shape (time, source), where known.

    ``tokens`` are those of the source and of the translation, which the weights belong to; by default their words.
    """

    source: str
    translation: str
    reference: str | None = None
    attention: Tensor | None = None
    tokens: tuple[list[str], list[str]] | None = None

    def labels(self) -> tuple[list[str], list[str]]:
        """The tokens of the source and of the translation, with the end mark."""
        source, target = self.tokens or (self.source.split(), self.translation.split())
        return [*source, _END], [*target, _END]


def _cell(text: str) -> str:
    """Text as Markdown, which would take <unk> for a tag, and a bar for the next column."""
    return text.replace("<", "&lt;").replace("|", "&#124;")


def translations_table(samples: Sequence[Translation]) -> str:
    """Samples as a table in Markdown, with a tick at those that equal the reference.

    Example:
        >>> print(translations_table([Translation("il dort .", "he sleeps .", "he sleeps .")]))
        | source | translation | reference | |
        |---|---|---|---|
        | il dort . | he sleeps . | he sleeps . | ✓ |
    """
    rows = [(s.source, s.translation, s.reference or "", "✓" if s.translation == s.reference else "") for s in samples]
    cells = [map(_cell, row) for row in rows]
    return "\n".join(
        ["| source | translation | reference | |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]
    )


def attention_figure(samples: Sequence[Translation], title: str | None = None, columns: int = 3) -> "Figure":
    """Heat maps of the attention weights: a row for each target token, a column for each source token.

    Args:
        samples: each with its attention.
        columns: panels side by side at most.
    """
    from matplotlib.figure import Figure

    tokens = [sample.labels() for sample in samples]
    columns = min(columns, len(samples))
    rows = -(-len(samples) // columns)
    longest = max(len(token) for pair in tokens for side in pair for token in side)
    # Inches: a third for each token, and room for the longest beside them.
    width, height = (0.33 * max(len(pair[side]) for pair in tokens) + 0.1 * longest + 0.3 for side in (0, 1))
    figure = Figure(figsize=(max(2.0, columns * width), max(2.0, rows * height + 0.4)), layout="constrained")
    figure.suptitle(title or "")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, sample, (source, target) in zip(panels, samples, tokens):
        weights = sample.attention
        assert weights is not None
        axes.imshow(weights[: len(target), : len(source)].float().numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(source)), source, rotation=90)
        axes.set_yticks(range(len(target)), target)
        axes.xaxis.tick_top()
    for axes in list(figure.axes)[len(samples) :]:
        axes.set_axis_off()
    return figure


class TranslationSamples(EvaluationSamples, pl.Callback):
    """Logs sample translations as text after each validation, and their attention when training or a test ends.

    Runs on: every validation and test batch, of which it keeps a few sentences, and the end of each validation, of
    training and of a test, on rank 0. It needs a module whose evaluation steps return lists of ``sources``,
    ``translations`` and ``references``, and may add ``attention``, a function from a sentence's index in the batch to
    weights of shape (time, source), or to None, and ``tokens``, a function from that index to the tokens of source and
    translation.

    Args:
        samples: sentences to show.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TranslationSamples(samples=6)], logger=False, accelerator="cpu")
    """

    def __init__(self, samples: int = 12) -> None:
        check_ranges(samples=(samples, NATURAL))
        self.samples = samples
        self._forget()

    @override
    def _forget(self) -> None:
        self._shown: list[Translation] = []

    @override
    def _keep(self, outputs: Any, batch: Any, batch_idx: int, batches: Sequence[float], dataloader_idx: int) -> None:
        if not isinstance(outputs, dict) or not outputs.get("translations"):
            return
        texts = outputs["translations"]
        # From all batches: the sentences of one batch are of similar length.
        wanted = min(-(-self.samples // max(1, int(min(sum(batches), self.samples)))), self.samples - len(self._shown))
        attention, tokens = outputs.get("attention"), outputs.get("tokens")
        for i in range(0, len(texts), max(1, len(texts) // max(1, wanted)))[:wanted]:
            weights = attention(i) if attention is not None else None
            weights = None if weights is None else weights.cpu()
            pieces = tokens(i) if tokens is not None and weights is not None else None
            self._shown.append(Translation(outputs["sources"][i], texts[i], outputs["references"][i], weights, pieces))

    @override
    def _figures(self, pl_module: pl.LightningModule, stage: str) -> dict[str, Any]:
        maps = [sample for sample in self._shown if sample.attention is not None]
        return {f"{stage}/attention": attention_figure(maps, f"{stage}: attention weights")} if maps else {}

    def _write(self, trainer: pl.Trainer, stage: str) -> None:
        if not self._shown or not trainer.is_global_zero:
            return
        with best_effort("texts in TensorBoard"):
            for writer in tensorboards(trainer):
                writer.add_text(f"{stage}/translations", translations_table(self._shown), self._step(trainer))
                writer.flush()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, "val")
        super().on_validation_end(trainer, pl_module)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "test")
        super().on_test_end(trainer, pl_module)
