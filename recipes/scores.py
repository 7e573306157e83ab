"""Scores of one pass over a data set.

All scores except the loss come from integer counts, so they are equal to the bit on any number of ranks.

Tested in `tests/recipes/test_classifier.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from callbacks.lib.exact_sums import DIGITS, from_whole_numbers, to_whole_numbers

_MAX_CLASSES_LOGGED = 25


class MeanOverTargets(Metric):
    """Mean over all targets of all batches and ranks, equal to the bit on any number of ranks and in any order.

    The sum of a batch is converted to integers, whose sums are exact; see `callbacks.lib.exact_sums`. The batches must
    be the same on any number of ranks. The mean is NaN if the sum of a batch is not finite.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(DIGITS, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(1, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, total: Tensor, count: int | Tensor) -> None:
        """Add a batch.

        Args:
            total: the sum over the batch's targets, a scalar.
            count: the number of its targets.
        """
        self.total += to_whole_numbers(total)
        self.count += count

    @override
    def compute(self) -> Tensor:
        *total, count = torch.cat((self.total, self.count)).tolist()
        return torch.tensor(from_whole_numbers(total) / max(1, count), device=self.device)


def macro_f1(confusion: Tensor) -> Tensor:
    """Return the mean F1 score over classes, in float64.

    Classes without samples and without predictions are left out, as in scikit-learn.

    Args:
        confusion: counts of shape (classes, classes): true class by predicted class.
    """
    either = (confusion.sum(0) + confusion.sum(1)).double()
    return (2 * confusion.diagonal() / either.clamp(min=1)).sum() / (either > 0).sum().clamp(min=1)


class _Counts(Metric):
    """Confusion matrix, and hits among the five most probable classes, as integers.

    `update` never waits for the device; torchmetrics' confusion matrix does, in its bincount.
    """

    full_state_update = False
    confusion: Tensor
    top5: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        for name, shape in (("confusion", (num_classes, num_classes)), ("top5", ())):
            self.add_state(name, torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, logits: Tensor, targets: Tensor) -> None:
        classes = self.confusion.shape[0]
        cells = targets.clamp(min=0) * classes + logits.argmax(1)
        # A target of -100 adds 0 to the first row.
        self.confusion.view(-1).index_add_(0, cells, (targets >= 0).long())
        if classes > 5:
            self.top5 += (logits.topk(5, 1).indices == targets.unsqueeze(1)).sum()

    @override
    def compute(self) -> tuple[Tensor, Tensor]:
        return self.confusion.cpu(), self.top5.cpu()


class ClassificationScores(torch.nn.Module):
    """Loss, accuracy, macro-F1 and the confusion matrix of one pass over a set.

    More than five classes have a top-5 accuracy, and up to 25 classes have an accuracy for each class (0 without
    samples). All scores except the loss come from integer counts, so they are equal on any number of ranks.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanOverTargets()
        self.counts = _Counts(num_classes)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits of shape (batch, classes) and targets int64 of shape (batch,), where -100 is ignored."""
        self.loss.update(F.cross_entropy(logits.float(), targets, reduction="sum"), (targets >= 0).sum())
        self.counts.update(logits.float(), targets)

    def compute(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the scalars by name, and the confusion matrix: (classes, classes), true class by predicted class."""
        matrix, top5 = self.counts.compute()
        present = matrix.sum(1)
        correct = matrix.diagonal().double()
        samples = present.sum().clamp(min=1)
        scores = {
            "loss": self.loss.compute(),
            "accuracy": correct.sum() / samples,
            "macro_f1": macro_f1(matrix),
        }
        if len(matrix) > 5:
            scores["top5_accuracy"] = top5 / samples
        if len(matrix) <= _MAX_CLASSES_LOGGED:
            per_class = correct / present.clamp(min=1)
            scores |= {f"accuracy_class_{i}": value for i, value in enumerate(per_class)}
        return scores, matrix

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.counts.reset()
