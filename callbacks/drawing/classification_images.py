"""Predictions, mistakes and the confusion matrix of a classifier, as images in TensorBoard."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from typing_extensions import override

from callbacks.drawing.evaluation_samples import EvaluationSamples, first_training_batch, tensorboards
from callbacks.lib.writing import best_effort
from datamodules.ranges import NATURAL, check_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClassificationImages", "confusion_figure", "labelled_grid", "most_confident_mistakes"]


def mistake_confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """The probability of each wrong prediction, and -1 for each right one and without a label, of shape (batch,)."""
    confidence, predicted = logits.softmax(1).max(1)
    return torch.where((predicted != targets) & (targets >= 0), confidence, -1.0)


def most_confident_mistakes(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """The positions of the wrong predictions with the highest probability, int64 of shape (count or fewer,).

    Args:
        logits: of shape (batch, classes).
        targets: of shape (batch,).
    """
    wrong = mistake_confidence(logits, targets)
    best = wrong.topk(min(count, len(wrong)))
    return best.indices[best.values >= 0]


def samples_of_batch(
    parts: tuple[Tensor, ...], count: int, batch_idx: int, batches: float
) -> tuple[Tensor, ...] | None:
    """This batch's share of `count` samples, which come evenly from so many batches; None where it has none.

    The images of a folder are sorted by class: the first ones all show the same.

    Args:
        parts: images, logits and targets, each of shape (batch, ...).
    """
    share = count if batch_idx == 0 else 0
    if not math.isinf(batches):
        share = int(count * (batch_idx + 1) // batches - count * batch_idx // batches)
    share = min(share, len(parts[0]))
    if not share:
        return None
    step = len(parts[0]) // share
    # Copies: a slice would keep the whole batch in memory.
    return tuple(part[::step][:share].clone() for part in parts)


def are_images(inputs: Any) -> bool:
    """Whether a network's inputs can be drawn: of shape (batch, 1 or 3, height, width)."""
    return isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.shape[1] in (1, 3)


def stretched(image: Tensor) -> Any:
    """An image of shape (channels, height, width), from black to white, as matplotlib draws it."""
    low, high = image.amin(), image.amax()
    return ((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).squeeze(2).numpy()


def label_text(target: Tensor, class_names: Sequence[str]) -> str:
    """A label in words: of soft labels, of shape (classes,), the two likeliest classes.

    Example:
        >>> label_text(torch.tensor([0.0, 0.75, 0.25]), ["ant", "bee", "fly"]), label_text(torch.tensor(0), ["ant"])
        ('bee (75 %), fly (25 %)', 'ant')
    """
    if target.dim():
        shares, classes = target.topk(min(2, len(target)))
        parts = zip(shares.tolist(), classes.tolist(), strict=True)
        return ", ".join(f"{class_names[number]} ({100 * share:.0f} %)" for share, number in parts if share >= 0.005)
    return class_names[int(target)] if target >= 0 else "no label"


def prediction_texts(logits: Tensor, targets: Tensor, class_names: Sequence[str]) -> list[str]:
    """The predicted class of each sample with its probability, and the true one where that is another.

    Example:
        >>> prediction_texts(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 1]), ["ant", "bee"])
        ['ant (100 %)', 'ant (100 %), is bee']
    """
    shares, predicted = (part.tolist() for part in logits.softmax(1).max(1))
    return [
        f"{class_names[guess]} ({100 * share:.0f} %)" + (f", is {class_names[true]}" if 0 <= true != guess else "")
        for guess, share, true in zip(predicted, shares, targets.tolist(), strict=True)
    ]


def labelled_grid(images: Tensor, labels: Sequence[str], columns: int = 8, side: int = 96) -> Any:
    """Images under their labels, uint8 of shape (height, width, 3); those of mistakes, with ", is", are red.

    Args:
        images: of shape (n, 1 or 3, height, width), in any range: each is stretched to black and white.
        side: of an image in the grid, in pixels.
    """
    gap, line = 6, 13
    font = ImageFont.load_default(11)
    rows = [textwrap.wrap(text.replace("_", "_ "), side // 6, max_lines=4, placeholder="...") for text in labels]
    texts = ["\n".join(row).replace("_ ", "_") for row in rows]
    height = side + gap + line * max(map(len, rows))
    grid = Image.new("RGB", (columns * (side + gap) + gap, -(-len(images) // columns) * (height + gap) + gap), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        left, top = gap + i % columns * (side + gap), gap + i // columns * (height + gap)
        tile = Image.fromarray((stretched(image) * 255).round().astype(np.uint8)).convert("RGB")
        scaling = Image.Resampling.NEAREST if max(tile.size) <= side else Image.Resampling.BILINEAR
        draw.multiline_text((left, top), text, fill="red" if ", is " in labels[i] else "black", font=font, spacing=1)
        grid.paste(tile.resize((side, side), scaling), (left, top + height - side))
    return np.asarray(grid)


def confusion_figure(matrix: Tensor, class_names: Sequence[str], title: str) -> "Figure":
    """The confusion matrix as a figure: counts, on a colour that is the square root of the share of the true class.

    Args:
        matrix: counts of shape (classes, classes): true class by predicted class.
    """
    from matplotlib.figure import Figure

    classes = len(class_names)
    side = min(16.0, max(4.0, 0.55 * classes)) + 0.07 * min(32, max(map(len, class_names)))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    share = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    # A root: the few mistakes of a good classifier would be white on a linear scale.
    axes.imshow(share.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= 25:  # Names and counts of more would run into each other.
        # Between two dollars matplotlib reads a formula.
        names = [textwrap.shorten(name.replace("$", r"\$"), 32, placeholder="...") for name in class_names]
        axes.set_xticks(range(classes), names, rotation=90)
        axes.set_yticks(range(classes), names)
        for (row, column), value in zip(torch.cartesian_prod(*[torch.arange(classes)] * 2), matrix.flatten()):
            if value:
                colour = "white" if share[row, column] > 0.25 else "black"
                axes.text(int(column), int(row), f"{int(value)}", ha="center", va="center", fontsize=8, color=colour)
    return figure


class ClassificationImages(EvaluationSamples, pl.Callback):
    """Draws sample predictions, the most confident mistakes and the confusion matrix into TensorBoard.

    At the start of a training it draws samples of the first batch with their labels, as the network gets them.

    Runs on: the first training batch of a run; every validation and test batch (one top-k on the device); and the end
    of training and of a test (the drawing, on rank 0, from the batches of that rank). It needs a module whose
    evaluation steps return ``{"logits": ...}`` and batches of ``(images, targets)``; the matrix comes from the module's
    `confusion_matrix`. Batches that hold no images, such as cached features, are left out.

    Args:
        samples: images in the grid of samples, spread over the set.
        mistakes: images in the grid of mistakes.

    Example:
        >>> logits, targets = torch.tensor([[2.0, 0.0], [5.0, 0.0]]), torch.tensor([0, 1])
        >>> most_confident_mistakes(logits, targets, count=4).tolist()
        [1]
    """

    def __init__(self, samples: int = 32, mistakes: int = 32) -> None:
        check_ranges(samples=(samples, NATURAL), mistakes=(mistakes, NATURAL))
        self.samples, self.mistakes = samples, mistakes
        self._forget()

    @override
    def _forget(self) -> None:
        self._num_classes = 0
        self._samples: list[tuple[Tensor, ...]] = []
        self._worst: tuple[Tensor, ...] | None = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not first_training_batch(trainer, batch_idx) or not isinstance(batch, (tuple, list)) or len(batch) != 2:
            return
        images, targets = batch
        if not are_images(images) or not isinstance(targets, Tensor) or not self.samples or not len(images):
            return
        with best_effort("images in TensorBoard"):
            images, targets = (part[: self.samples].detach().cpu() for part in (images.float(), targets))
            classes = targets.shape[1] if targets.dim() == 2 else int(targets.max()) + 1
            names = getattr(pl_module, "class_names", None) or [str(i) for i in range(classes)]
            grid = labelled_grid(images, [label_text(target, names) for target in targets])
            for writer in tensorboards(trainer):
                writer.add_image("train/samples", grid, 0, dataformats="HWC")
                writer.flush()

    @override
    def _keep(self, outputs: Any, batch: Any, batch_idx: int, batches: Sequence[float], dataloader_idx: int) -> None:
        if not isinstance(outputs, dict) or "logits" not in outputs or outputs["logits"].dim() != 2:
            return
        self._num_classes = outputs["logits"].shape[1]
        if not are_images(batch[0]):
            return
        new: tuple[Tensor, ...] = (batch[0], outputs["logits"].float(), batch[1])
        if found := samples_of_batch(new, self.samples, batch_idx, batches[dataloader_idx]):
            self._samples.append(found)
        if self._worst is not None:
            new = tuple(torch.cat(pair) for pair in zip(self._worst, new, strict=True))
        # A fixed number, with correct predictions where mistakes are few: counting them would wait for the device.
        keep = mistake_confidence(new[1], new[2]).topk(min(self.mistakes, len(new[2]))).indices
        self._worst = tuple(part[keep] for part in new)

    @override
    def _figures(self, pl_module: pl.LightningModule, stage: str) -> dict[str, Any]:
        if not self._num_classes:
            return {}
        names = getattr(pl_module, "class_names", None) or [str(i) for i in range(self._num_classes)]
        matrix, figures = getattr(pl_module, "confusion_matrix", None), {}
        if self._samples:
            images, logits, targets = (torch.cat(parts).cpu() for parts in zip(*self._samples, strict=True))
            texts = prediction_texts(logits, targets, names)
            figures[f"{stage}/predictions"] = labelled_grid(images.float(), texts)
        if self._worst is not None:
            images, logits, targets = (part.cpu() for part in self._worst)
            keep = most_confident_mistakes(logits, targets, self.mistakes)
            if len(keep):
                texts = prediction_texts(logits[keep], targets[keep], names)
                figures[f"{stage}/mistakes"] = labelled_grid(images[keep].float(), texts)
        if matrix is not None:
            figures[f"{stage}/confusion_matrix"] = confusion_figure(matrix.cpu(), names, f"{stage}: confusion matrix")
        return figures
