"""What is known of a classifier after one pass over a set: scores, a row for each class, and the mistakes.

All but the loss come from integer counts, so they are the same on any number of ranks to the last digit.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from recipes.recipe import MeanOverTargets, Table

__all__ = [
    "ClassificationScores",
    "ScoredSamples",
    "calibration_error",
    "class_table",
    "macro_f1",
    "mistakes_table",
]

_BINS = 15
# What float32 holds below 1. A sum of integers is the same in any order, and 2^39 samples fit.
_FIXED_POINT = 2**24
_MOST_CLASSES_LOGGED = 25


def macro_f1(confusion: Tensor) -> Tensor:
    """The mean F1 score over classes, in float64.

    Classes that neither a sample nor a prediction has are left out, as in scikit-learn.

    Args:
        confusion: counts of shape (classes, classes): true class by predicted class.

    Example:
        >>> macro_f1(torch.tensor([[3, 1, 0], [0, 2, 0], [0, 0, 0]]))
        tensor(0.8286, dtype=torch.float64)
    """
    either = (confusion.sum(0) + confusion.sum(1)).double()
    return (2 * confusion.diagonal() / either.clamp(min=1)).sum() / (either > 0).sum().clamp(min=1)


def calibration_error(counts: Tensor, correct: Tensor, confidence: Tensor) -> Tensor:
    """Expected calibration error (Guo et al., 2017): how far confidence is from accuracy, over bins of confidence.

    Args:
        counts: samples in each bin, of shape (bins,).
        correct: how many of them were right.
        confidence: the sum of their probabilities of the predicted class.

    Example:
        >>> calibration_error(torch.tensor([4, 4]), torch.tensor([1, 4]), torch.tensor([1.0, 3.0]))
        tensor(0.1250, dtype=torch.float64)
    """
    return (correct.double() - confidence.double()).abs().sum() / counts.sum().clamp(min=1)


class _Counts(Metric):
    """The confusion matrix, samples by bins of confidence, and hits among the five likeliest classes, as integers.

    Nothing here waits for the device: torchmetrics' confusion matrix does, in its bincount.
    """

    full_state_update = False
    confusion: Tensor
    bins: Tensor
    top5: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        for name, shape in (("confusion", (num_classes, num_classes)), ("bins", (3, _BINS)), ("top5", ())):
            self.add_state(name, torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, logits: Tensor, targets: Tensor) -> None:
        classes = self.confusion.shape[0]
        confidence, predicted = logits.softmax(1).max(1)
        confidence = confidence.nan_to_num(0.0)  # Of a network that has diverged.
        counts = (targets >= 0).long()
        self.confusion.view(-1).index_add_(0, targets.clamp(min=0) * classes + predicted, counts)
        # The bins are ]0, 1/15], ]1/15, 2/15] and so on.
        bins = (confidence * _BINS).ceil().long().sub(1).clamp(0, _BINS - 1)
        fixed_point = (confidence * _FIXED_POINT).round().long() * counts
        self.bins.index_add_(1, bins, torch.stack((counts, (predicted == targets).long(), fixed_point)))
        if classes > 5:
            self.top5 += (logits.topk(5, 1).indices == targets.unsqueeze(1)).sum()

    @override
    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.confusion.cpu(), self.bins.cpu(), self.top5.cpu()


class ClassificationScores(torch.nn.Module):
    """Loss, accuracy, macro-F1, calibration error and the confusion matrix of one pass over a set.

    With more than five classes there is the top-5 accuracy too, and with up to 25 classes the accuracy of each (0
    without samples). All but the loss come from integer counts, so they are the same on any number of
    ranks to the last digit.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanOverTargets()
        self.counts = _Counts(num_classes)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits of shape (batch, classes), targets int64 of shape (batch,), where -100 does not count."""
        self.loss.update(F.cross_entropy(logits.float(), targets, reduction="sum"), (targets >= 0).sum())
        self.counts.update(logits.float(), targets)

    def compute(self) -> tuple[dict[str, Tensor], Tensor]:
        """The scalars by name, and the confusion matrix of shape (classes, classes): true class by predicted."""
        matrix, bins, top5 = self.counts.compute()
        present, correct = matrix.sum(1), matrix.diagonal().double()
        samples = present.sum().clamp(min=1)
        scores = {
            "loss": self.loss.compute(),
            "accuracy": correct.sum() / samples,
            "macro_f1": macro_f1(matrix),
            "ece": calibration_error(bins[0], bins[1], bins[2].double() / _FIXED_POINT),
        }
        if len(matrix) > 5:
            scores["top5_accuracy"] = top5 / samples
        if len(matrix) <= _MOST_CLASSES_LOGGED:
            per_class = correct / present.clamp(min=1)
            scores |= {f"accuracy_class_{i}": value for i, value in enumerate(per_class)}
        return scores, matrix

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.counts.reset()


class ScoredSamples:
    """The true and the predicted class of each sample of this rank, and their probabilities."""

    def __init__(self) -> None:
        self.reset()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch, as `ClassificationScores` does."""
        probabilities = logits.float().softmax(1)
        probability, predicted = probabilities.max(1)
        of_target = probabilities.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        # One tensor a batch; float32 holds the number of any class.
        self._batches.append(torch.stack((targets.float(), predicted.float(), probability, of_target), 1))

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[Tensor] = []

    def mistakes(self, numbers: Tensor) -> Tensor | None:
        """Number, true and predicted class and their probabilities of each mistake, float64 of shape (m, 5).

        Args:
            numbers: of the samples in their order, int64 of shape (n,) or longer; None is returned for fewer.
        """
        found = torch.cat(self._batches).cpu().double() if self._batches else torch.empty(0, 4).double()
        if len(numbers) < len(found):
            return None
        wrong = (found[:, 0] >= 0) & (found[:, 0] != found[:, 1])
        return torch.cat((numbers[: len(found), None].double(), found), 1)[wrong].nan_to_num(0.0)


def mistakes_table(mistakes: Tensor, class_names: Sequence[str], sample_names: Sequence[str] = ()) -> Table:
    """A row for each mistake, the most confident first.

    Args:
        mistakes: those of all ranks, as `ScoredSamples.mistakes` gives them.
        sample_names: of the samples by their numbers; by default the numbers stand for themselves.

    Example:
        >>> table = mistakes_table(torch.tensor([[7.0, 0.0, 1.0, 0.75, 0.25]]), ["cat", "dog"])
        >>> list(table.rows[0].values())
        [7, 'cat', 'dog', 0.75, 0.25]
    """
    columns = ("file" if sample_names else "sample", "true", "predicted", "probability_predicted", "probability_true")
    order = sorted(mistakes.tolist(), key=lambda row: (-row[3], row[0]))
    rows = []
    for number, *classes, predicted, true in order:
        name = sample_names[int(number)] if sample_names else int(number)
        rows.append((name, *(class_names[int(index)] for index in classes), round(predicted, 6), round(true, 6)))
    return Table(columns, [dict(zip(columns, row, strict=True)) for row in rows])


def class_table(confusion: Tensor, class_names: Sequence[str]) -> Table:
    """A row for each class: samples, precision, recall, F1, and which other class its samples are taken for most often.

    What is not defined is None: the recall of a class without samples, the precision of one that is never predicted.

    Args:
        confusion: counts of shape (classes, classes): true class by predicted class.

    Example:
        >>> class_table(torch.tensor([[3, 1], [0, 2]]), ["cat", "dog"]).rows[0]
        {'class': 'cat', 'samples': 4, 'precision': 1.0, 'recall': 0.75, 'f1': 0.857143, 'taken_for': 'dog', 'times': 1}
    """
    columns = ("class", "samples", "precision", "recall", "f1", "taken_for", "times")
    counts = [part.tolist() for part in (confusion.diagonal(), confusion.sum(1), confusion.sum(0))]
    times, other = (confusion - confusion.diagonal().diag()).max(1)
    rows = []
    for name, right, samples, predicted, most, taken in zip(class_names, *counts, times.tolist(), other.tolist()):
        shares = ((right, predicted), (right, samples), (2 * right, samples + predicted))
        scores = (round(part / whole, 6) if whole else None for part, whole in shares)
        rows.append((name, samples, *scores, class_names[taken] if most else None, most))
    return Table(columns, [dict(zip(columns, row, strict=True)) for row in rows])
