"""The number of targets behind a mean loss: what `training_step` says, else the size of the batch."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from callbacks.lib.hooks import attached_trainer, is_training
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
    count: int | Tensor | None = output.get("count") if isinstance(output, Mapping) else None
    if count is not None:
        return count
    try:
        return extract_batch_size(batch)
    except MisconfigurationException as error:
        raise ValueError(
            f"cannot tell how many targets a batch of type {type(batch).__name__} holds: return"
            ' {"loss": loss, "count": number_of_targets} from training_step'
        ) from error


def is_empty(batch: Any) -> bool:
    """Whether a batch has no samples; False where their number is unknown."""
    try:
        return extract_batch_size(batch) == 0
    except MisconfigurationException:
        return False


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


def observe_steps(
    pl_module: pl.LightningModule, after: Callable[[Any, Any], None], before: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Have each `training_step` of training observed until the function returned here is called.

    The method is wrapped on the instance, because no hook sees its output before the backward pass, nor the loss before
    Lightning divides it. Several may observe, and are released in any order. Where a `validation_step`
    calls it, nothing is observed.

    Args:
        after: called with its output and its batch.
        before: called before it.
    """
    module: Any = pl_module
    own, observer = vars(pl_module).get("training_step"), (before, after)
    step = own if own is not None and hasattr(own, "observers") else _observed(pl_module, own)
    module.training_step = step
    step.observers.append(observer)

    def release() -> None:
        step.observers.remove(observer)
        if step.observers or vars(pl_module).get("training_step") != step:
            return
        del module.training_step
        if step.own is not None:
            module.training_step = step.own

    return release


def _observed(pl_module: pl.LightningModule, own: Any) -> Any:
    """A `training_step` that calls its observers; `own` is the one that the instance had."""
    original = pl_module.training_step
    observers: list[tuple[Callable[[], None], Callable[[Any, Any], None]]] = []

    @wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        trainer = attached_trainer(pl_module)
        observing = observers if trainer is None or is_training(trainer) else []
        for before, _ in observing:
            before()
        output = original(*args, **kwargs)
        for _, after in observing:
            after(output, args[0] if args else next(iter(kwargs.values())))
        return output

    step: Any = training_step
    step.observers, step.own = observers, own
    return step
