"""Checks for gradients that a module computes or keeps itself, which an update would lose.

Lightning loses them as well in an update of one micro-batch, since it zeroes gradients after `training_step`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from datamodules.errors import UserError
from datamodules.lightning import pl

Result = TypeVar("Result")


def without_backward(
    module: pl.LightningModule, parameters: Sequence[Tensor], step: Callable[..., Result], *args: Any
) -> Result:
    """Call a function that runs `training_step`, and check that it computes no gradient of the parameters.

    Meanwhile ``.grad`` is None, on any number of devices: `zero_grad` and clipping find nothing to change, and what is
    there afterwards was computed. The gradients of the last update are put back for `on_before_zero_grad`.

    Raises:
        UserError: the function has computed gradients.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    result = step(*args)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not None:
            raise UserError(
                f"{type(module).__name__}.training_step calls backward() itself, and an update is the mean of the"
                " losses that it returns: add that loss to the one it returns, take gradients of inputs by"
                " torch.autograd.grad, or set automatic_optimization = False"
            )
        parameter.grad = gradient
    return result


def refuse_kept_gradients(module: pl.LightningModule, parameters: Sequence[Tensor]) -> None:
    """Check that the module's own `optimizer_zero_grad` has left no gradient; waits for the device.

    Raises:
        UserError: a parameter has a gradient of another update.
    """
    if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
        raise UserError(
            f"{type(module).__name__}.optimizer_zero_grad keeps gradients of another update, and an update is the mean"
            " of its own micro-batches: leave it out, and pass GradientAccumulation(n)"
        )
