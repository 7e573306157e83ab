"""Images of a classifier as its network sees them: a training batch, and the most confident mistakes.

Tested in `tests/recipes/figures/test_images.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from callbacks.lib.ranks import gather
from recipes.figures.images import ImageGrid, displayed

MAX_IMAGES = 24
"""Number of images in a grid."""

EXPLAINED_SIDE = 84
"""Pixels of the longer side of a mistake with its explanation. The size is limited so that a page stays small."""


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
        preprocessing: the normalization to undo.
    """
    shown = displayed(images[:MAX_IMAGES], preprocessing)
    captions = [_label(label, class_names) for label in labels[:MAX_IMAGES].cpu()]
    note = "The first batch as the network sees it, augmented, with its labels."
    if preprocessing is None:
        note += " How it was normalized is not known: the brightness is stretched."
    return ImageGrid("Training images", shown, captions, note)


class MistakeImages:
    """The images of the most confident mistakes of an evaluation on this rank; `add` never waits for the device."""

    def __init__(self) -> None:
        self.seen = 0
        """Number of samples of this rank so far."""
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None
        """The kept samples: inputs of the network, of shape (kept, channels, height, width); true and predicted class
        and probability of the predicted class, float32 of shape (kept, 3); and positions in this rank's samples, int64
        of shape (kept,). The probability is -1 for a correct prediction."""

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
        # Only the most confident mistakes are kept, so that the memory does not grow with the data set.
        kept = (images.detach()[best], rows[best], positions[best])
        if self.kept is not None and self.kept[0].shape[1:] == images.shape[1:]:
            images, rows, positions = (torch.cat(pair) for pair in zip(self.kept, kept, strict=True))
            best = rows[:, 2].topk(min(MAX_IMAGES, len(rows))).indices
            kept = (images[best], rows[best], positions[best])
        self.kept = kept

    def mistakes(self, numbers: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the images of the mistakes as the network got them, and a row for each.

        Args:
            numbers: numbers of this rank's samples in the data set, int64 of shape (n,).

        Returns:
            Images of shape (m, channels, height, width); and sample number, true and predicted class and probability of
            the predicted class, float64 of shape (m, 4), on the CPU. None without a mistake, or if the samples have no
            numbers.
        """
        if self.kept is None or numbers is None or len(numbers) < self.seen:
            return None
        images, rows, positions = self.kept
        is_wrong = rows[:, 2] >= 0
        if not is_wrong.any():
            return None
        numbers = numbers[positions[is_wrong].cpu()].double().unsqueeze(1)
        return images[is_wrong], torch.cat((numbers, rows[is_wrong].cpu().double()), 1)


def most_confident(of_rank: tuple[Tensor, Tensor] | None, rank: int) -> tuple[Tensor, Tensor] | None:
    """Return the 24 most confident mistakes of all ranks, the same on each; a collective call.

    Args:
        of_rank: the result of `MistakeImages.mistakes`.
        rank: number of this process.

    Returns:
        The images and their rows, the most confident first, on the CPU; None without a mistake.
    """
    rows_of_ranks = gather(None if of_rank is None else (of_rank[1], of_rank[0].shape[1:]))
    if len({shape for _, shape in filter(None, rows_of_ranks)}) != 1:
        return None
    candidates = []
    for number, entry in enumerate(rows_of_ranks):
        if entry is not None:
            candidates += [(row, number, index) for index, row in enumerate(entry[0].tolist())]

    def by_confidence(candidate: tuple[list[float], int, int]) -> tuple[float, float]:
        # Ties are ordered by number, so that the order does not depend on the number of ranks.
        row = candidate[0]
        return -row[3], row[0]

    best = sorted(candidates, key=by_confidence)[:MAX_IMAGES]
    chosen = [index for _, number, index in best if number == rank]
    images_of_ranks = gather(None if of_rank is None else of_rank[0][chosen].cpu())
    images = {number: iter(images) for number, images in enumerate(images_of_ranks) if images is not None}
    rows = torch.tensor([row for row, _, _ in best], dtype=torch.float64)
    return torch.stack([next(images[number]) for _, number, _ in best]), rows


def mistakes_grid(
    images: Tensor,
    rows: Tensor,
    class_names: Sequence[str],
    sample_names: Sequence[str],
    part: str,
    preprocessing: nn.Module | None = None,
    explanation: Explanation | None = None,
) -> ImageGrid:
    """Return a grid of mistakes, each followed by the images that explain it.

    Args:
        images: images as the network got them, of shape (n, channels, height, width).
        rows: sample number, true and predicted class and probability of the predicted class, of shape (n, 4).
        class_names: the names of the classes by label.
        sample_names: the names of the samples by number; if empty, captions have the numbers.
        part: the evaluated part of the data, such as "test".
        preprocessing: the normalization to undo.
        explanation: the images that explain the mistakes.
    """
    captions = []
    for number, true, predicted, probability in rows.tolist():
        name = str(sample_names[int(number)]).rpartition("/")[2] if sample_names else f"sample {int(number):,}"
        prediction = f"{class_names[int(predicted)]} ({100 * probability:.0f} %)"
        captions.append((prediction, f"is {class_names[int(true)]}", name))
    title = f"Mistakes, {part}"
    note = "Prediction and confidence, true class, and sample; the most confident mistakes first."
    if explanation is not None:
        note = f"{note} {explanation.note}".rstrip()
    if explanation is None or not explanation.images.shape[1]:
        return ImageGrid(title, displayed(images, preprocessing), captions, note)
    shown = displayed(images, preprocessing, EXPLAINED_SIDE)[:, :3].unsqueeze(1)
    beside = explanation.images
    together = torch.cat((shown.expand(-1, -1, beside.shape[2], -1, -1), beside), 1)
    lines = [
        line for caption, others in zip(captions, explanation.captions, strict=True) for line in (caption, *others)
    ]
    return ImageGrid(title, together.flatten(0, 1), lines, note, together.shape[1])
