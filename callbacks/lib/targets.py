"""The number of targets behind a mean loss: what `training_step` says, else the size of the batch."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
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


def warn_of_ignored_targets(output: Any, batch: Any) -> None:
    """Warn of a step without ``count`` whose batch holds labels of -100, which torch leaves out of the mean.

    The device is waited for.
    """
    if isinstance(output, Mapping) and output.get("count") is not None:
        return
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
    labels = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.int64]
    if any(bool((part == -100).any()) for part in labels):
        warn(
            "warning: the first batch holds labels of -100, which cross_entropy leaves out of its mean: return"
            ' {"loss": loss, "count": (labels != -100).sum()} from training_step, to weigh as a mean over the others'
        )


def micro_batch_outputs(outputs: Any) -> list[dict[str, Any]]:
    """What `training_step` returned for each micro-batch of this rank, with the ``count`` of its targets.

    Args:
        outputs: of `on_train_batch_end`. A Trainer without `UpdateLoop` has one micro-batch.
    """
    if not isinstance(outputs, dict):
        return []
    several: list[dict[str, Any]] | None = outputs.get("micro_batches")
    return [outputs] if several is None else several


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
