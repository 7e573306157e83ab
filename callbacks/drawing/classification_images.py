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
from callbacks.lib.best_effort import best_effort
from datamodules.ranges import NATURAL, check_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClassificationImages", "confusion_figure", "labelled_grid", "most_confident_mistakes", "samples_figure"]


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


def share_of_batch(count: int, batch_idx: int, batches: float) -> int:
    """How many of `count` samples this batch gives, so that they come evenly from a pass of so many batches.

    The images of a folder are sorted by class: the first ones all show the same.

    Example:
        >>> [share_of_batch(5, batch_idx, batches=3) for batch_idx in range(3)]
        [1, 2, 2]
    """
    if math.isinf(batches):
        return count if batch_idx == 0 else 0
    return int(count * (batch_idx + 1) // batches - count * batch_idx // batches)


def are_images(inputs: Any) -> bool:
    """Whether a network's inputs can be drawn: of shape (batch, 1 or 3, height, width)."""
    return isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.shape[1] in (1, 3)


def wrapped(text: str, width: int, lines: int = 3) -> str:
    """Text for a figure in a few short lines, broken at blanks and underscores; the rest is left out.

    Example:
        >>> print(wrapped("american_staffordshire_terrier (93 %)", 28))
        american_staffordshire_
        terrier (93 %)
    """
    # Between two dollars matplotlib reads a formula.
    return _in_lines(text, width, lines).replace("$", r"\$")


def _in_lines(text: str, width: int, lines: int) -> str:
    rows = textwrap.wrap(text.replace("_", "_ "), width, max_lines=lines, placeholder="...")
    return "\n".join(row.replace("_ ", "_") for row in rows)


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


def labelled_grid(images: Tensor, targets: Tensor, class_names: Sequence[str], columns: int = 8) -> Any:
    """Images under their labels, uint8 of shape (height, width, 3), at a fraction of the cost of a figure.

    Args:
        images: of shape (n, 1 or 3, height, width), in any range: each is stretched to black and white.
        targets: classes, of shape (n,), or soft labels of shape (n, classes).
    """
    side, gap, line = 96, 6, 13
    font = ImageFont.load_default(11)
    labels = [_in_lines(label_text(target, class_names), side // 6, 2) for target in targets]
    height = side + gap + line * max(1 + label.count("\n") for label in labels)
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * (side + gap) + gap, rows * (height + gap) + gap), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        left, top = gap + i % columns * (side + gap), gap + i // columns * (height + gap)
        tile = Image.fromarray((stretched(image) * 255).round().astype(np.uint8)).convert("RGB")
        scaling = Image.Resampling.NEAREST if max(tile.size) <= side else Image.Resampling.BILINEAR
        draw.multiline_text((left, top), label, fill="black", font=font, spacing=1)
        grid.paste(tile.resize((side, side), scaling), (left, top + height - side))
    return np.asarray(grid)


def samples_figure(
    images: Tensor, logits: Tensor, targets: Tensor, class_names: Sequence[str], title: str, columns: int = 8
) -> "Figure":
    """A grid of images under their predictions, the wrong ones in red with the true class.

    Args:
        images: of shape (n, channels, height, width), in any range: each is stretched to black and white.
        logits: of shape (n, classes).
        targets: of shape (n,); a negative one is not known.
    """
    from matplotlib.figure import Figure

    confidence, predicted = logits.softmax(1).max(1)
    side = 1.35 if images.shape[3] <= 64 else 2.0  # In inches.
    width = int(14 * side)
    labels = []
    wrong = ((predicted != targets) & (targets >= 0)).tolist()
    for i, (guess, share, target) in enumerate(zip(predicted.tolist(), confidence.tolist(), targets.tolist())):
        label = wrapped(f"{class_names[guess]} ({100 * share:.0f} %)", width)
        labels.append(f"{label}\n{wrapped(f'is {class_names[target]}', width)}" if wrong[i] else label)
    rows = max(1, -(-len(images) // columns))
    tallest = max((label.count("\n") + 1 for label in labels), default=1)
    figure = Figure(figsize=(side * columns, (side + 0.14 * tallest) * rows + 0.5), layout="constrained")
    figure.suptitle(title)
    for i, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_axis_off()
        if i < len(images):
            axes.imshow(stretched(images[i]), cmap="gray")
            axes.set_title(labels[i], fontsize=8, color="tab:red" if wrong[i] else "black")
    return figure


def confusion_figure(matrix: Tensor, class_names: Sequence[str], title: str) -> "Figure":
    """The confusion matrix as a figure: counts, on a colour that is the square root of the share of the true class.

    Args:
        matrix: counts of shape (classes, classes): true class by predicted class.
    """
    from matplotlib.figure import Figure

    classes = len(class_names)
    names = [wrapped(name, 32, lines=1) for name in class_names]
    longest = max(map(len, names))
    fontsize = 10 if classes <= 25 else 7
    cells = min(16.0, max(3.0, (0.55 if classes <= 25 else 0.16) * classes))
    side = cells + 1.2 + 0.0085 * fontsize * longest
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    share = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    # A root: the few mistakes of a good classifier would be white on a linear scale.
    axes.imshow(share.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1)
    # More names than that would run into each other; then matplotlib numbers some.
    if classes <= 120:
        # An upright name needs room in its column.
        angle = 0 if 0.009 * fontsize * longest < cells / classes else 45 if classes <= 25 else 90
        axes.set_xticks(range(classes), names, fontsize=fontsize, rotation=angle)
        if angle:
            for label in axes.get_xticklabels():
                label.set(ha="right", va="center", rotation_mode="anchor")
        axes.set_yticks(range(classes), names, fontsize=fontsize)
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= 25:
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
            classes = targets.shape[1] if targets.dim() == 2 else int(targets.max()) + 1
            names = getattr(pl_module, "class_names", None) or [str(i) for i in range(classes)]
            images, targets = (part[: self.samples].detach().cpu() for part in (images.float(), targets))
            for writer in tensorboards(trainer):
                writer.add_image("train/samples", labelled_grid(images, targets, names), 0, dataformats="HWC")
                writer.flush()

    @override
    def _keep(self, outputs: Any, batch: Any, batch_idx: int, batches: Sequence[float], dataloader_idx: int) -> None:
        if not isinstance(outputs, dict) or "logits" not in outputs or outputs["logits"].dim() != 2:
            return
        self._num_classes = outputs["logits"].shape[1]
        images, targets = batch
        if not are_images(images):
            return
        new: tuple[Tensor, ...] = (images, outputs["logits"].float(), targets)
        if count := min(share_of_batch(self.samples, batch_idx, batches[dataloader_idx]), len(targets)):
            step = len(targets) // count
            # Copies: a slice would keep the whole batch in memory.
            self._samples.append(tuple(part[::step][:count].clone() for part in new))
        if self._worst is not None:
            new = tuple(torch.cat(pair) for pair in zip(self._worst, new, strict=True))
        # A fixed number, with correct predictions where mistakes are few: counting them would wait for the device.
        keep = mistake_confidence(new[1], new[2]).topk(min(self.mistakes, len(new[2]))).indices
        self._worst = tuple(part[keep] for part in new)

    @override
    def _figures(self, pl_module: pl.LightningModule, stage: str) -> "dict[str, Figure]":
        if not self._num_classes:
            return {}
        matrix = getattr(pl_module, "confusion_matrix", None)
        names = getattr(pl_module, "class_names", None) or [str(i) for i in range(self._num_classes)]
        figures = {}
        if self._samples:
            images, logits, targets = (torch.cat(parts).cpu() for parts in zip(*self._samples, strict=True))
            title = f"{stage}: predictions"
            figures[f"{stage}/predictions"] = samples_figure(images.float(), logits, targets, names, title)
        if self._worst is not None:
            images, logits, targets = (part.cpu() for part in self._worst)
            keep = most_confident_mistakes(logits, targets, self.mistakes)
            images, logits, targets = images[keep].float(), logits[keep], targets[keep]
            if len(keep):
                title = f"{stage}: most confident mistakes"
                figures[f"{stage}/mistakes"] = samples_figure(images, logits, targets, names, title)
        if matrix is not None:
            figures[f"{stage}/confusion_matrix"] = confusion_figure(matrix.cpu(), names, f"{stage}: confusion matrix")
        return figures
