"""Labels of a classifier: classes by name, and checks before use: a number out of range ends a process on a GPU."""

import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
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


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """The distinct names of classes, sorted; numbers as such, so that the label 10 comes after 9."""
    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def same_name(name: str) -> str:
    """The name of a class with composed letters (NFC): macOS writes "Bär" with a letter and a mark."""
    return unicodedata.normalize("NFC", name)


def check_classes(by_part: Mapping[str, Collection[str]], where: str, expected: str) -> list[str]:
    """Refuse classes that cannot be trained on, and remark on those that a part lacks.

    Args:
        by_part: the names of the classes that have images: of "train", and of others.
        where: what holds them, such as a folder, with its verb.
        expected: what to pass instead.

    Returns:
        Remarks for the user, a line each.

    Raises:
        UserError: there are fewer than two classes to train on, or another part has one that train lacks.
    """
    classes = by_part["train"]
    if len(classes) < 2:
        what = "no image to train on"
        if classes:
            what = f"images of one class only, {next(iter(classes))}"
        raise UserError(f"{where} {what}; {expected}")
    notes = []
    for part, names in by_part.items():
        if unknown := sorted(set(names) - set(classes)):
            known = ", ".join(list(classes)[:10])
            more = ", ..." * (len(classes) > 10)
            raise UserError(
                f"{part} holds classes that train has no image of: {', '.join(unknown[:10])}; expected only {known}"
                f"{more}"
            )
        if missing := sorted(set(classes) - set(names)):
            notes.append(f"{part} has no image of {', '.join(missing)}: scores say nothing about them")
    return notes


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Weights with which all classes that have labels weigh the same, float32 of shape (classes,).

    A class with count_c of n labels gets n / (classes with labels * count_c), as scikit-learn's "balanced"; their mean
    over the labels is 1. A class without labels gets 0.

    Args:
        labels: int64 of shape (n,); negative ones do not count.

    Example:
        >>> balanced_class_weights(torch.tensor([0, 0, 0, 2, -100]), num_classes=3)
        tensor([0.6667, 0.0000, 2.0000])
    """
    counts = torch.bincount(labels[labels >= 0], minlength=num_classes).double()
    present = (counts > 0).sum()
    return torch.where(counts > 0, counts.sum() / (present * counts), 0.0).float()


def describe_classes(names: Sequence[str], counts: Sequence[int]) -> str:
    """A line on the classes and how many samples each has, which a run prints before it trains; ten are named."""
    named = [f"{name} ({count:,})" for name, count in zip(names[:10], counts)]
    if len(names) > 10:
        named.append(f"and {len(names) - 10:,} more")
    return f"{len(names):,} classes: {', '.join(named)}"


def refuse_other_classes(saved: Sequence[str], here: Sequence[str], shown: int) -> None:
    """Refuse a checkpoint of other classes than those that are here, naming the first `shown` of them.

    Raises:
        UserError: they differ.
    """
    if tuple(saved) == tuple(here):
        return
    theirs, ours = (
        ", ".join(names[:shown]) + f", ... ({len(names)} in all)" * (len(names) > shown) for names in (saved, here)
    )
    raise UserError(
        f"the checkpoint was trained on the classes {theirs}, found {ours}; pass the `data_dir` that it was trained on"
    )


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
