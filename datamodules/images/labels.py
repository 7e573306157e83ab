"""Labels of a classifier, checked before they are used: one out of range ends a process that uses a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from datamodules.loading.numbered import NumberedDataLoader
from datamodules.loading.worker_loaders import WorkerEvaluationLoader, WorkerTrainLoader

IGNORED = -100
"""The label of samples that have none: `ignore_index` of `torch.nn.functional.cross_entropy`."""


def check_form(
    labels: Tensor, num_classes: int, source: str, soft: bool = False, error: type[UserError] = UserError
) -> None:
    """Refuse labels that are no whole numbers of shape (n,); their values are not read.

    Args:
        source: what the labels are of, for the message.
        soft: whether probabilities of shape (n, classes) are labels, too.

    Raises:
        error: with what to do.
    """
    if soft and labels.is_floating_point() and tuple(labels.shape[1:]) == (num_classes,):
        return
    cure = ""
    if labels.dim() == 2 and labels.shape[1] == 1:
        cure = "squeeze(1)"
    elif labels.dim() == 2 and labels.shape[1] == num_classes:
        cure = "argmax(1)"
    elif labels.dim() == 1 and labels.is_floating_point():
        cure = "long()"
    elif labels.dim() == 1:
        return
    how = f": pass labels.{cure}" if cure else ""
    kind = str(labels.dtype).removeprefix("torch.")
    raise error(
        f"the labels of {source} are {kind} of shape {tuple(labels.shape)}, expected class numbers 0 to"
        f" {num_classes - 1}, whole numbers of shape ({len(labels)},){how}"
    )


def check_labels(
    labels: Tensor, num_classes: int, source: str, rows: Tensor | None = None, error: type[UserError] = UserError
) -> int:
    """Refuse labels that are neither a class nor -100; the device is waited for once.

    Args:
        labels: of shape (n,).
        source: what the labels are of, for the message.
        rows: the row of each in `source`; by default they are all of its rows.

    Returns:
        How many are -100.

    Raises:
        error: with the first row and what to type.
    """
    check_form(labels, num_classes, source, error=error)
    ignored = labels == IGNORED
    outside = ~ignored & ((labels < 0) | (labels >= num_classes))
    counts: list[int] = torch.stack((ignored.sum(), outside.sum())).tolist()
    if counts[1]:
        first, largest = int(outside.nonzero()[0]), int(labels.max())
        row = first if rows is None else int(rows[first])
        if largest >= num_classes:
            how = f"pass num_classes={largest + 1} or correct the labels"
        else:
            how = f"correct the labels; {IGNORED} leaves a sample out"
        raise error(
            f"label {int(labels[first])} at row {row} of {source} is outside 0..{num_classes - 1}"
            f" ({counts[1]:,} of {len(labels):,} labels are); {how}"
        )
    return counts[0]


def labels_in_memory(loader: Any) -> tuple[Tensor, Tensor] | None:
    """The labels of all samples of a loader, and their rows in the data set; None where they cannot be known.

    They are known of the loaders of this package, and of a `DataLoader` over a `TensorDataset` of inputs and labels, or
    over a subset of one.
    """
    match loader:
        case TrainLoader() | EvaluationLoader():
            return loader.targets.index_select(0, loader.rows.to(loader.targets.device)), loader.rows
        case WorkerTrainLoader() | WorkerEvaluationLoader():
            return loader.reader.targets.index_select(0, loader.rows), loader.rows
        case NumberedDataLoader():
            return labels_in_memory(loader.stock)
        case DataLoader(collate_fn=collate) if collate is default_collate:
            return _labels_of_set(loader.dataset)
    return None


def _labels_of_set(data: Any) -> tuple[Tensor, Tensor] | None:
    # Not isinstance: a subclass may change its samples.
    if type(data) is Subset and (whole := _labels_of_set(data.dataset)):
        rows = torch.as_tensor(data.indices, dtype=torch.int64)
        return whole[0][rows], whole[1][rows]
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[1], torch.arange(len(data))
    return None
