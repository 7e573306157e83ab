"""Gradients that a module makes or keeps itself, beside those of the losses that it returns: an update would lose them.

Lightning loses those of a `training_step` as well where an update is one micro-batch, since it zeroes after the step.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor

from datamodules.errors import UserError

Result = TypeVar("Result")


def _marks(parameters: Sequence[Tensor]) -> list[Any]:
    """What any backward pass changes."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def without_backward(
    module: pl.LightningModule, parameters: Sequence[Tensor], step: Callable[..., Result], *args: Any
) -> Result:
    """What a function returns that calls the module's `training_step`.

    Raises:
        UserError: it has changed gradients of the parameters.
    """
    before = _marks(parameters)
    result = step(*args)
    if _marks(parameters) != before:
        raise UserError(
            f"{type(module).__name__}.training_step calls backward() itself, and an update is the mean of the losses"
            " that it returns: add that loss to the one it returns, take gradients of inputs by torch.autograd.grad, or"
            " set automatic_optimization = False"
        )
    return result


def refuse_kept_gradients(module: pl.LightningModule, parameters: Sequence[Tensor]) -> None:
    """Look at what the module's own `optimizer_zero_grad` has left; the device is waited for.

    Raises:
        UserError: gradients of another update.
    """
    if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
        raise UserError(
            f"{type(module).__name__}.optimizer_zero_grad keeps gradients of another update, and an update is the mean"
            " of its own micro-batches: leave it out, and pass GradientAccumulation(n)"
        )
