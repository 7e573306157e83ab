"""The number of targets behind a mean loss: what `training_step` says, else the size of the batch."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from datamodules.notes import warn


def count_targets(output: Any, batch: Any) -> int | Tensor:
    """The ``count`` that a step returned beside its loss, else the number of samples in the batch.

    Raises:
        ValueError: the step gave no count, and the size of the batch is unknown.

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
    """Counts targets by `count_targets`, and warns once in a fit where the size of a batch may be another number."""

    def __init__(self) -> None:
        self._has_looked_at_labels = False
        self._guesses = True
        """Whether no step has returned a count, and nothing was said of it."""

    def count(self, output: Any, batch: Any) -> int | Tensor:
        """The targets behind a mean loss; of the first batch the device is waited for."""
        if self._guesses:
            self._look(output, batch)
        return count_targets(output, batch)

    def _look(self, output: Any, batch: Any) -> None:
        if _has_count(output):
            self._guesses = False
            return
        if not self._has_looked_at_labels:
            self._has_looked_at_labels = True
            warn_of_ignored_targets(output, batch)
        lengths = _lengths(batch)
        if len(set(lengths)) > 1:
            self._guesses = False
            others = ", ".join(map(str, sorted(set(lengths) - {lengths[0]})))
            warn(
                f"warning: a batch counts as {lengths[0]} samples, the length of its first tensor, and others have"
                f' {others}: return {{"loss": loss, "count": number_of_samples}} from training_step, which weighs the'
                " mean"
            )


def _has_count(output: Any) -> bool:
    return isinstance(output, Mapping) and output.get("count") is not None


def _lengths(batch: Any) -> list[int]:
    """The length of each tensor of a batch; 1 of a number."""
    parts = batch if type(batch) in (tuple, list) else [batch]
    if not all(type(part) is Tensor for part in parts):
        parts = []
        apply_to_collection(batch, Tensor, parts.append)
    return [len(part) if part.ndim else 1 for part in parts]


def warn_of_ignored_targets(output: Any, batch: Any) -> None:
    """Warn of a step without ``count`` whose batch holds labels of -100, which torch leaves out of the mean.

    The device is waited for.
    """
    if _has_count(output):
        return
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
    labels = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.int64]
    if any(bool((part == -100).any()) for part in labels):
        warn(
            "warning: the first batch holds labels of -100, which cross_entropy leaves out of its mean: return"
            ' {"loss": loss, "count": (labels != -100).sum()} from training_step, to weigh as a mean over the others'
        )


def micro_batch_outputs(trainer: pl.Trainer, outputs: Any) -> list[dict[str, Any]]:
    """What `training_step` returned for each micro-batch of this rank, with the ``count`` of its targets.

    Args:
        outputs: of `on_train_batch_end`. A Trainer without `UpdateLoop` has one micro-batch, and has divided its loss
            where it accumulates; here the loss is whole.
    """
    if not isinstance(outputs, dict):
        return []
    several: list[dict[str, Any]] | None = outputs.get("micro_batches")
    if several is not None:
        return several
    divisor = trainer.accumulate_grad_batches
    if divisor == 1 or outputs.get("loss") is None:
        return [outputs]
    return [{**outputs, "loss": outputs["loss"] * divisor}]


def joined_outputs(outputs: list[dict[str, Any]], is_stand_in: bool) -> dict[str, Any]:
    """The outputs of several micro-batches: the mean loss over their targets, and all of them.

    Args:
        is_stand_in: whether the only micro-batch counts for nothing.
    """
    trained = [output for output in outputs if output["loss"] is not None]
    loss = None
    if trained:
        total = sum(output.get("count", 1) for output in trained)
        loss = sum(output["loss"] * output.get("count", 1) for output in trained) / total
    return {**outputs[-1], "loss": loss, "micro_batches": [] if is_stand_in else outputs}
