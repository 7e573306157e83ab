"""Class names and labels of a classifier, and checks of both.

Labels are checked before they are used: on a GPU, a label out of range ends the process with an assertion that does
not name the sample.
"""

import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.errors import UserError, spelled

IGNORED = -100
"""Label of samples without a class: `ignore_index` of `torch.nn.functional.cross_entropy`."""


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct class names in order: numbers by value, so that "10" follows "9", else alphabetically."""

    def by_value(name: str) -> tuple[int, str]:
        # The name breaks the tie between "1" and "01".
        return int(name), name

    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        return tuple(sorted(distinct, key=by_value))
    return tuple(sorted(distinct))


def same_name(name: str) -> str:
    """Return a class name in Unicode form NFC. macOS writes "ä" in a file name as a letter and a combining mark."""
    return unicodedata.normalize("NFC", name)


def check_classes(by_part: Mapping[str, Collection[str]], where: str, expected: str) -> list[str]:
    """Check that a classifier can be trained on the classes, and return remarks on classes that a part lacks.

    Args:
        by_part: names of the classes that have images, for "train" and any other part.
        where: beginning of a message: the path and a verb, as in "photos holds".
        expected: end of a message: what to pass instead.

    Returns:
        Remarks for the user, one line each.

    Raises:
        UserError: there are fewer than two classes to train on, or another part has a class that train lacks.
    """
    classes = by_part["train"]
    if len(classes) < 2:
        problem = "no image to train on"
        if classes:
            problem = f"images of one class only, {next(iter(classes))}"
        raise UserError(f"{where} {problem}; {expected}")
    notes = []
    for part, names in by_part.items():
        unknown = sorted(set(names) - set(classes))
        if unknown:
            known = ", ".join(list(classes)[:10])
            more = ", ..." if len(classes) > 10 else ""
            raise UserError(
                f"{part} holds classes that train has no image of: {', '.join(unknown[:10])}; expected only {known}"
                f"{more}"
            )
        missing = sorted(set(classes) - set(names))
        if missing:
            notes.append(f"{part} has no image of {', '.join(missing)}: scores say nothing about them")
    return notes


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Return class weights such that all classes have the same total weight, float32 of shape (classes,).

    A class with count_c of n labels has the weight n / (classes with labels * count_c), as scikit-learn's "balanced".
    The mean weight over the labels is 1. A class without labels has the weight 0.

    Args:
        labels: class numbers, int64 of shape (n,); negative labels are ignored.
        num_classes: number of classes.

    Example:
        >>> balanced_class_weights(torch.tensor([0, 0, 0, 2, -100]), num_classes=3)
        tensor([0.6667, 0.0000, 2.0000])
    """
    counts = torch.bincount(labels[labels >= 0], minlength=num_classes).double()
    present = (counts > 0).sum()
    return torch.where(counts > 0, counts.sum() / (present * counts), 0.0).float()


def describe_classes(names: Sequence[str], counts: Sequence[int]) -> str:
    """Return a line with the number of classes, and the names and sizes of the first ten."""
    phrases = [f"{name} ({count:,})" for name, count in zip(names[:10], counts)]
    if len(names) > 10:
        phrases.append(f"and {len(names) - 10:,} more")
    return f"{len(names):,} classes: {', '.join(phrases)}"


def check_same_classes(saved: Sequence[str], here: Sequence[str]) -> None:
    """Check that a checkpoint and the data set have the same classes. The error lists the first ten of both.

    Raises:
        UserError: the classes differ.
    """

    def describe(names: Sequence[str]) -> str:
        listed = ", ".join(names[:10])
        return f"{listed}, ... ({len(names)} in all)" if len(names) > 10 else listed

    if tuple(saved) != tuple(here):
        raise UserError(
            f"the checkpoint was trained on the classes {describe(saved)}, found {describe(here)}; pass the"
            f" {spelled('data_dir')} that it was trained on"
        )


def check_array(values: npt.NDArray[Any], source: str, count: int) -> npt.NDArray[Any]:
    """Check labels in an array, and return them as integers or strings of shape (n,).

    Args:
        values: labels of shape (n,) or (n, 1).
        source: name of the labels, for the message.
        count: number of images.

    Raises:
        UserError: the labels have another shape or type.
    """
    if values.shape == (count, 1):
        values = values[:, 0]
    if values.shape != (count,):
        raise UserError(f"{source} are of shape {values.shape}, expected one for each of {count:,} images, ({count},)")
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str)
    if values.dtype.kind not in "iuU":
        advice = ": pass labels.astype(int)" if values.dtype.kind == "f" and (values == values.round()).all() else ""
        raise UserError(f"{source} are {values.dtype}, expected class numbers from 0, or names{advice}")
    return values


def check_form(
    labels: Tensor, num_classes: int, source: str, soft: bool = False, error: type[UserError] = UserError
) -> None:
    """Check that labels are integers of shape (n,), without reading their values, which would synchronize.

    Args:
        labels: the labels.
        num_classes: number of classes.
        source: name of the data, for the message.
        soft: whether probabilities of shape (n, classes) are valid labels.
        error: type of the exception.

    Raises:
        error: the labels have another type or shape.
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
    advice = f": pass labels.{cure}" if cure else ""
    dtype = str(labels.dtype).removeprefix("torch.")
    raise error(
        f"the labels of {source} are {dtype} of shape {tuple(labels.shape)}, expected class numbers 0 to"
        f" {num_classes - 1}, whole numbers of shape ({len(labels)},){advice}"
    )


def check_labels(
    labels: Tensor, num_classes: int, source: str, rows: Tensor | None = None, error: type[UserError] = UserError
) -> int:
    """Check that each label is a class or -100, and return how many are -100.

    Args:
        labels: labels of shape (n,).
        num_classes: number of classes.
        source: name of the data, for the message.
        rows: row of each label in `source`; by default 0 to n - 1.
        error: type of the exception.

    Raises:
        error: a label is out of range; the message has the first row.
    """
    check_form(labels, num_classes, source, error=error)
    ignored = labels == IGNORED
    outside = ~ignored & ((labels < 0) | (labels >= num_classes))
    # One transfer for both counts: a single synchronization if all labels are valid.
    num_ignored, num_outside = torch.stack((ignored.sum(), outside.sum())).tolist()
    if num_outside:
        first = int(outside.nonzero()[0])
        largest = int(labels.max())
        row = first if rows is None else int(rows[first])
        if largest >= num_classes:
            advice = f"pass {spelled('num_classes', largest + 1)} or correct the labels"
        else:
            advice = f"correct the labels; {IGNORED} leaves a sample out"
        raise error(
            f"label {int(labels[first])} at row {row} of {source} is outside 0..{num_classes - 1}"
            f" ({num_outside:,} of {len(labels):,} labels are); {advice}"
        )
    return int(num_ignored)
