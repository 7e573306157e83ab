"""The labels of a classifier's batches: which of them count, and which cannot be."""

from typing import Any

import torch
from torch import Tensor

from datamodules.errors import RunFailedError, UserError
from datamodules.images.labels import IGNORED, check_form, check_labels, labels_in_memory

__all__ = ["LabelCheck"]

_BATCHES = 50  # On a GPU, between two looks at what was found there.


def _as_int64(labels: Tensor) -> Tensor:
    """Whole numbers of any type as int64, which alone cross-entropy takes."""
    return labels if labels.is_floating_point() else labels.long()


class LabelCheck:
    """Checks the labels of one part of the data, before its batches where they are in memory, and else in each batch.

    On a GPU a label out of range is ignored at first: the device is waited for once in 50 batches, and when
    `raise_found` is called.

    Args:
        num_classes: labels are 0 to this less one, or -100, which leaves the sample out.
        part: of the data: "training", "validation" or "test".
    """

    at_once: bool | None = None
    """Whether labels are read in each batch; by default where they are on the CPU."""

    def __init__(self, num_classes: int, part: str) -> None:
        self.num_classes, self.part = num_classes, part
        self.all_count = False
        """Whether all labels have been checked, and none is -100."""
        self._found: Tensor | None = None
        self._batches = 0

    def check_set(self, loaders: Any) -> None:
        """Check all labels of the loaders, where they are in memory.

        Args:
            loaders: one, several, or None where the batches may be changed after loading.

        Raises:
            UserError: one is out of range, or none is left.
        """
        known = [labels_in_memory(loader) for loader in (loaders if isinstance(loaders, list) else [loaders])]
        ignored = [self._check_all(*labels) for labels in known if labels is not None]
        self.all_count = len(ignored) == len(known) and not any(ignored)

    def _check_all(self, labels: Tensor, rows: Tensor) -> int:
        source, labels = f"the {self.part} set", _as_int64(labels)
        if self.part == "training" and labels.is_floating_point():
            check_form(labels, self.num_classes, source, soft=True)
            return 0
        ignored = check_labels(labels, self.num_classes, source, rows)
        if 0 < len(labels) == ignored:
            raise UserError(f"all {ignored:,} labels of {source} are {IGNORED}, which leaves every sample out")
        return ignored

    def __call__(self, labels: Tensor) -> tuple[Tensor, int | Tensor]:
        """The labels of a batch without those that cannot be, int64 or soft, and how many of them count.

        Raises:
            RunFailedError: one is out of range.
        """
        labels = _as_int64(labels)
        if self.all_count or not len(labels):
            return labels, len(labels)
        source = f"a {self.part} batch"
        soft = self.part == "training" and labels.is_floating_point()
        check_form(labels, self.num_classes, source, soft, RunFailedError)
        if soft:
            return labels, len(labels)
        if labels.device.type == "cpu" if self.at_once is None else self.at_once:
            return labels, len(labels) - check_labels(labels, self.num_classes, source, error=RunFailedError)
        return self._without_waiting(labels)

    def _without_waiting(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        classes = (labels >= 0) & (labels < self.num_classes)
        # 0 is a class, so it stands for all that are in range.
        low, high = labels.masked_fill(classes | (labels == IGNORED), 0).aminmax()
        if self._found is not None:
            low, high = torch.minimum(low, self._found[0]), torch.maximum(high, self._found[1])
        self._found = torch.stack((low, high))
        self._batches += 1
        if self._batches % _BATCHES == 0:
            self.raise_found()
        return labels.masked_fill(~classes, IGNORED), classes.sum()

    def raise_found(self) -> None:
        """Wait for the device, where labels were checked on it.

        Raises:
            RunFailedError: one was out of range.
        """
        if self._found is None:
            return
        (low, high), self._found = self._found.tolist(), None
        if low < 0 or high >= self.num_classes:
            how = f"pass num_classes={high + 1} or correct" if high >= self.num_classes else "correct"
            raise RunFailedError(
                f"labels {low} to {high} of {self.part} batches were found, expected 0..{self.num_classes - 1};"
                f" {how} the labels ({IGNORED} leaves a sample out)"
            )
