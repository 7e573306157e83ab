"""Show images of a classifier as its network sees them: a training batch, and the most confident mistakes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes.figures.images import LARGEST_SIDE, ImageGrid, displayed

MAX_IMAGES = 24
"""How many images a grid shows."""

EXPLAINED_SIDE = 84
"""Pixels of the longer side of a mistake that is shown with what explains it, so that a page stays small."""


class Explanation(NamedTuple):
    """Images that explain predictions, such as the positions that the network looked at.

    Args:
        images: the same number of images for each prediction: uint8 of shape (n, k, 3, height, width), of the size that
            `displayed` returns for a side of `EXPLAINED_SIDE`; k may be 0.
        captions: the lines below each image, for n predictions of k images.
        note: a sentence about the images, or why there are none.
    """

    images: Tensor
    captions: Sequence[Sequence[Sequence[str]]]
    note: str = ""


def is_image_batch(inputs: Any) -> bool:
    """Return whether inputs are images of shape (batch, channels, height, width), with 1, 3 or more channels."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] != 2 and inputs.numel() > 0


def _label(label: Tensor, class_names: Sequence[str]) -> tuple[str, ...]:
    """Return a class name, or the two largest shares of a soft label, one per line."""
    if not label.ndim:
        number = int(label)
        if 0 <= number < len(class_names):
            return (str(class_names[number]),)
        return ("no label",)
    shares = label.float().topk(min(2, len(label)))
    pairs = zip(shares.indices.tolist(), shares.values.tolist(), strict=True)
    return tuple(f"{class_names[number]} {100 * share:.0f} %" for number, share in pairs if share > 0.005)


def training_grid(
    images: Tensor, labels: Tensor, class_names: Sequence[str], preprocessing: nn.Module | None = None
) -> ImageGrid:
    """Return the first 24 images of a batch with their labels.

    Args:
        images: inputs of the network, of shape (batch, channels, height, width).
        labels: whole numbers of shape (batch,), or probabilities of shape (batch, classes).
        preprocessing: the normalisation to undo.
    """
    shown = displayed(images[:MAX_IMAGES], preprocessing)
    captions = [_label(label, class_names) for label in labels[:MAX_IMAGES].cpu()]
    note = "The first batch as the network sees it, augmented, with its labels."
    if preprocessing is None:
        note += " How it was normalised is not known: the brightness is stretched."
    return ImageGrid("Training images", shown, captions, note)


class MistakeImages:
    """The images of the most confident mistakes of an evaluation on this rank; `add` never waits for the device."""

    def __init__(self) -> None:
        self.seen = 0
        """Samples of this rank so far."""
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None
        """Of the samples that are kept: inputs of the network, of shape (kept, channels, height, width); true and
        predicted class and probability of the predicted class, float32 of shape (kept, 3); and positions in this rank's
        samples, int64 of shape (kept,). The probability is -1 where there is no mistake."""

    def add(self, images: Tensor, scored: Tensor) -> None:
        """Add a batch.

        Args:
            images: inputs of shape (batch, channels, height, width).
            scored: true class, predicted class and its probability, of shape (batch, 3 or more).
        """
        true, predicted, probability = scored[:, :3].float().unbind(1)
        is_wrong = (true >= 0) & (true != predicted)
        confidence = torch.where(is_wrong, probability.nan_to_num(0.0), -1.0)
        positions = torch.arange(self.seen, self.seen + len(images), device=images.device)
        rows = torch.stack((true, predicted, confidence), 1)
        self.seen += len(images)
        best = confidence.topk(min(MAX_IMAGES, len(images))).indices
        # Only the worst mistakes are kept, so that the memory does not grow with the data set.
        kept = (images.detach()[best], rows[best], positions[best])
        if self.kept is not None and self.kept[0].shape[1:] == images.shape[1:]:
            images, rows, positions = (torch.cat(pair) for pair in zip(self.kept, kept, strict=True))
            best = rows[:, 2].topk(min(MAX_IMAGES, len(rows))).indices
            kept = (images[best], rows[best], positions[best])
        self.kept = kept

    def wrong(self) -> tuple[Tensor, Tensor] | None:
        """Return the images of mistakes as the network got them, and the predicted classes; None without a mistake."""
        if self.kept is None:
            return None
        images, rows, _ = self.kept
        is_wrong = rows[:, 2] >= 0
        if not is_wrong.any():
            return None
        return images[is_wrong], rows[is_wrong, 1].long()

    def displayed(
        self, numbers: Tensor | None, preprocessing: nn.Module | None, explanation: Explanation | None = None
    ) -> "ShownMistakes | None":
        """Return the images as bytes of shape (kept, channels, height, width), and their rows with sample numbers.

        Args:
            numbers: numbers of this rank's samples in the data set, int64 of shape (n,).
            preprocessing: the normalisation to undo.
            explanation: what explains the mistakes, in the order of `wrong`.

        Returns:
            None without a mistake, or if the samples have no numbers.
        """
        if self.kept is None or numbers is None or len(numbers) < self.seen:
            return None
        images, rows, positions = self.kept
        is_wrong = rows[:, 2] >= 0
        if not is_wrong.any():
            return None
        is_explained = explanation is not None and explanation.images.shape[1] > 0
        # All kept images are converted: without a known normalisation, their common range becomes that of bytes.
        shown = displayed(images, preprocessing, EXPLAINED_SIDE if is_explained else LARGEST_SIDE)[is_wrong.cpu()]
        numbers = numbers[positions[is_wrong].cpu()].double().unsqueeze(1)
        return ShownMistakes(shown, torch.cat((numbers, rows[is_wrong].cpu().double()), 1), explanation)


class ShownMistakes(NamedTuple):
    """Mistakes of a rank: images as bytes; number, true and predicted class and probability; and what explains them."""

    images: Tensor
    rows: Tensor
    explanation: Explanation | None = None


def mistakes_grid(
    of_ranks: Sequence[ShownMistakes | None],
    class_names: Sequence[str],
    sample_names: Sequence[str],
    part: str,
) -> ImageGrid | None:
    """Return a grid of the most confident mistakes of all ranks; None without a mistake.

    Args:
        of_ranks: the result of `MistakeImages.displayed` on each rank.
        class_names: the names of the classes by label.
        sample_names: the names of the samples by number; if empty, captions have the numbers.
        part: the evaluated part of the data, such as "test".
    """
    shown = [mistakes for mistakes in of_ranks if mistakes is not None]
    if not shown or len({mistakes.images.shape[1:] for mistakes in shown}) > 1:
        return None
    images = torch.cat([mistakes.images for mistakes in shown])
    rows = torch.cat([mistakes.rows for mistakes in shown]).tolist()

    def by_confidence(index: int) -> tuple[float, float]:
        # By number in case of equal probabilities, so that the order does not depend on the number of ranks.
        return -rows[index][3], rows[index][0]

    order = sorted(range(len(rows)), key=by_confidence)[:MAX_IMAGES]
    captions = []
    for index in order:
        number, true, predicted, probability = rows[index]
        name = str(sample_names[int(number)]).rpartition("/")[2] if sample_names else f"sample {int(number):,}"
        prediction = f"{class_names[int(predicted)]} ({100 * probability:.0f} %)"
        captions.append((prediction, f"is {class_names[int(true)]}", name))
    note = "What the network said and how surely, what is true, and the sample; the most confident mistakes first."
    grid = ImageGrid(f"Mistakes, {part}", images[order], captions, note)
    explanations = [mistakes.explanation for mistakes in shown if mistakes.explanation is not None]
    return _explained(grid, explanations, order) if explanations else grid


def _explained(grid: ImageGrid, explanations: Sequence[Explanation], order: Sequence[int]) -> ImageGrid:
    """Return a grid with the images that explain each of its images beside it.

    Args:
        order: the positions of the grid's images in the explanations of all ranks.
    """
    note = " ".join(filter(None, (grid.note, explanations[0].note)))
    if not explanations[0].images.shape[1]:
        return replace(grid, note=note)
    beside = torch.cat([explanation.images for explanation in explanations])[order]
    captions_beside = [captions for explanation in explanations for captions in explanation.captions]
    images = grid.images.unsqueeze(1)
    if images.shape[2] != beside.shape[2]:
        images = images.expand(-1, -1, beside.shape[2], -1, -1)
    captions = []
    for caption, index in zip(grid.captions, order, strict=True):
        captions += [caption, *captions_beside[index]]
    together = torch.cat((images, beside), 1)
    return replace(grid, images=together.flatten(0, 1), captions=captions, note=note, group=together.shape[1])
