"""Images of a classifier as its network sees them: a batch of training, and the most confident mistakes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.figures.images import ImageGrid, displayed

_MOST = 24


def is_image_batch(inputs: Any) -> bool:
    """Whether inputs are images: of shape (batch, channels, height, width), with one or at least three channels."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] != 2 and inputs.numel() > 0


def _label(label: Tensor, class_names: Sequence[str]) -> tuple[str, ...]:
    """A class, or the two largest shares of a soft label, a line each."""
    if not label.ndim:
        number = int(label)
        return (str(class_names[number]),) if 0 <= number < len(class_names) else ("no label",)
    shares = label.float().topk(min(2, len(label)))
    pairs = zip(shares.indices.tolist(), shares.values.tolist(), strict=True)
    return tuple(f"{class_names[number]} {100 * share:.0f} %" for number, share in pairs if share > 0.005)


def training_grid(
    images: Tensor, labels: Tensor, class_names: Sequence[str], preprocessing: nn.Module | None = None
) -> ImageGrid:
    """The first 24 images of a batch with their labels.

    Args:
        images: inputs of the network, of shape (batch, channels, height, width).
        labels: whole numbers of shape (batch,), or probabilities of shape (batch, classes).
        preprocessing: the normalisation to undo.
    """
    shown = displayed(images[:_MOST], preprocessing)
    captions = [_label(label, class_names) for label in labels[:_MOST].cpu()]
    note = "The first batch as the network sees it, augmented, with its labels."
    if preprocessing is None:
        note += " How it was normalised is not known: the brightness is stretched."
    return ImageGrid("Training images", shown, captions, note)


class MistakeImages:
    """The images of the most confident mistakes of an evaluation on this rank; nothing here waits for the device."""

    def __init__(self) -> None:
        self.seen = 0
        """Samples of this rank so far."""
        self.images: Tensor | None = None
        """Inputs of the network, of shape (kept, channels, height, width)."""
        self.rows: Tensor | None = None
        """Place among the samples of this rank, true and predicted class, probability of the predicted; (kept, 4).

        The probability of one that is no mistake is -1."""

    def add(self, images: Tensor, scored: Tensor) -> None:
        """Add a batch.

        Args:
            images: of shape (batch, channels, height, width).
            scored: true and predicted class and the probability of the predicted, of shape (batch, 3 or more).
        """
        true, predicted, probability = scored[:, :3].double().unbind(1)
        is_wrong = (true >= 0) & (true != predicted)
        sureness = torch.where(is_wrong, probability.nan_to_num(0.0), -1.0)
        places = torch.arange(self.seen, self.seen + len(images), device=images.device).double()
        rows = torch.stack((places, true, predicted, sureness), 1)
        self.seen += len(images)
        best = sureness.topk(min(_MOST, len(images))).indices
        images, rows = images.detach()[best], rows[best]
        if self.images is not None and self.rows is not None and self.images.shape[1:] == images.shape[1:]:
            images = torch.cat((self.images, images))
            rows = torch.cat((self.rows, rows))
            best = rows[:, 3].topk(min(_MOST, len(rows))).indices
            images, rows = images[best], rows[best]
        self.images, self.rows = images, rows

    def displayed(self, numbers: Tensor | None, preprocessing: nn.Module | None) -> tuple[Tensor, Tensor] | None:
        """The images as bytes of shape (kept, channels, height, width), and their rows, with numbers for places.

        Args:
            numbers: of the samples of this rank, int64 of shape (n,).
            preprocessing: the normalisation to undo.

        Returns:
            None without a mistake, and where the samples have no numbers.
        """
        if self.images is None or self.rows is None or numbers is None or len(numbers) < self.seen:
            return None
        is_wrong = self.rows[:, 3] >= 0
        if not is_wrong.any():
            return None
        # Of all that are kept: without a known normalisation, their range is that of the bytes.
        images = displayed(self.images, preprocessing)[is_wrong.cpu()]
        rows = self.rows[is_wrong].cpu()
        rows[:, 0] = numbers[rows[:, 0].long()].double()
        return images, rows


def mistakes_grid(
    of_ranks: Sequence[tuple[Tensor, Tensor] | None],
    class_names: Sequence[str],
    sample_names: Sequence[str],
    part: str,
) -> ImageGrid | None:
    """The most confident mistakes of all ranks in the order of their table; None without one.

    Args:
        of_ranks: what `MistakeImages.displayed` gave on each rank.
        class_names: by label.
        sample_names: of the samples by their numbers; empty where these stand for themselves.
        part: that was evaluated, such as "test".
    """
    kept = [pair for pair in of_ranks if pair is not None]
    if not kept or len({images.shape[1:] for images, _ in kept}) > 1:
        return None
    images = torch.cat([images for images, _ in kept])
    rows = torch.cat([rows for _, rows in kept]).tolist()
    order = sorted(range(len(rows)), key=lambda place: (-rows[place][3], rows[place][0]))[:_MOST]
    captions = []
    for place in order:
        number, true, predicted, probability = rows[place]
        name = str(sample_names[int(number)]).rpartition("/")[2] if sample_names else f"sample {int(number):,}"
        said = f"{class_names[int(predicted)]} ({100 * probability:.0f} %)"
        captions.append((said, f"is {class_names[int(true)]}", name))
    note = "What the network said and how surely, what is true, and the sample; the most confident mistakes first."
    return ImageGrid(f"Mistakes, {part}", images[order], captions, note)
