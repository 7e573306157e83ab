"""Number of targets behind a mean loss: the ``count`` that `training_step` returns, else the batch size."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from datamodules.lightning import MisconfigurationException, extract_batch_size, pl
from datamodules.notes import warn


def count_targets(output: Any, batch: Any) -> int | Tensor:
    """Return the ``count`` that a step returned with its loss, else the number of samples in the batch.

    Raises:
        ValueError: the step returned no count, and the size of the batch is unknown.

    Example:
        >>> count_targets({"loss": torch.tensor(0.5), "count": 7}, batch=torch.zeros(3, 10))
        7
        >>> count_targets(torch.tensor(0.5), batch=torch.zeros(3, 10))
        3
    """
    is_mapping = type(output) is dict or isinstance(output, Mapping)
    count: int | Tensor | None = output.get("count") if is_mapping else None
    if count is not None:
        return count
    try:
        return extract_batch_size(batch)
    except MisconfigurationException as error:
        raise ValueError(
            f"cannot tell how many targets a batch of type {type(batch).__name__} holds: return"
            ' {"loss": loss, "count": number_of_targets} from training_step'
        ) from error


class TargetCounter:
    """Counter by `count_targets` that warns once per fit if the batch size may not be the number of targets."""

    def __init__(self) -> None:
        self._has_checked_labels = False
        self._checks_batches = True
        """Whether no step has returned a count yet, and no warning was given."""

    def count(self, output: Any, batch: Any) -> int | Tensor:
        """Return the number of targets behind a mean loss; the first call waits for the device."""
        if self._checks_batches:
            self._check(output, batch)
        return count_targets(output, batch)

    def _check(self, output: Any, batch: Any) -> None:
        if _has_count(output):
            self._checks_batches = False
            return
        if not self._has_checked_labels:
            self._has_checked_labels = True
            warn_of_ignored_targets(output, batch)
        lengths = _lengths(batch)
        if len(set(lengths)) > 1:
            self._checks_batches = False
            unequal = ", ".join(map(str, sorted(set(lengths) - {lengths[0]})))
            warn(
                f"warning: a batch counts as {lengths[0]} samples, the length of its first tensor, and others have"
                f' {unequal}: return {{"loss": loss, "count": number_of_samples}} from training_step, which weighs the'
                " mean"
            )


def _has_count(output: Any) -> bool:
    return isinstance(output, Mapping) and output.get("count") is not None


def _lengths(batch: Any) -> list[int]:
    """Return the length of each tensor of a batch; a scalar has length 1."""
    tensors = batch if type(batch) in (tuple, list) else [batch]
    # Most batches are flat, and Lightning's visit of nested collections takes longer.
    if not all(type(tensor) is Tensor for tensor in tensors):
        tensors = []
        apply_to_collection(batch, Tensor, tensors.append)
    return [len(tensor) if tensor.ndim else 1 for tensor in tensors]


def warn_of_ignored_targets(output: Any, batch: Any) -> None:
    """Warn if a step without ``count`` has labels of -100, torch's `ignore_index`; waits for the device."""
    if _has_count(output):
        return
    values: Any = [batch]
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (tuple, list)):
        values = batch
    labels = [value for value in values if isinstance(value, Tensor) and value.dtype == torch.int64]
    if any(bool((tensor == -100).any()) for tensor in labels):
        warn(
            "warning: the first batch holds labels of -100, which cross_entropy leaves out of its mean: return"
            ' {"loss": loss, "count": (labels != -100).sum()} from training_step, to weigh as a mean over the others'
        )


def micro_batch_outputs(trainer: pl.Trainer, outputs: Any) -> list[dict[str, Any]]:
    """Return the outputs of `training_step` for each micro-batch of this rank.

    Args:
        outputs: argument of `on_train_batch_end`. A Trainer without `UpdateLoop` has one micro-batch.
    """
    if not isinstance(outputs, dict):
        return []
    micro_batches: list[dict[str, Any]] | None = outputs.get("micro_batches")
    if micro_batches is not None:
        return micro_batches
    # A Trainer that accumulates by itself has divided the loss, which is undone here.
    divisor = trainer.accumulate_grad_batches
    if divisor == 1 or outputs.get("loss") is None:
        return [outputs]
    return [{**outputs, "loss": outputs["loss"] * divisor}]


def joined_outputs(outputs: list[dict[str, Any]], is_stand_in: bool) -> dict[str, Any]:
    """Join the outputs of several micro-batches, with the mean loss over their targets.

    Args:
        is_stand_in: whether the only micro-batch is a stand-in, which does not count.
    """
    trained = [output for output in outputs if output["loss"] is not None]
    loss = None
    if trained:
        total = sum(output.get("count", 1) for output in trained)
        loss = sum(output["loss"] * output.get("count", 1) for output in trained) / total
    return {**outputs[-1], "loss": loss, "micro_batches": [] if is_stand_in else outputs}
