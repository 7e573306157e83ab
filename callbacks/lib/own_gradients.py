"""Gradients that a module makes or keeps itself, beside those of the losses that it returns: an update would lose them.

Lightning loses those of a `training_step` as well where an update is one micro-batch, since it zeroes after the step.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from datamodules.errors import UserError

Result = TypeVar("Result")


def _marks(parameters: Sequence[Tensor]) -> list[Any]:
    """What any backward pass changes."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def without_backward(
    trainer: pl.Trainer, parameters: Sequence[Tensor], is_first: bool, step: Callable[..., Result], *args: Any
) -> Result:
    """What a function returns that calls the module's `training_step`.

    Args:
        is_first: this is the first one. DDP's forward pass makes gradients views of its buckets, so that a look before
            and after does not tell; hooks do, and registering them takes longer than a small step.

    Raises:
        UserError: it has computed gradients of the parameters.
    """
    if isinstance(trainer.strategy.model, DistributedDataParallel):
        return _seen_by_hooks(trainer, parameters, step, *args) if is_first else step(*args)
    before = _marks(parameters)
    result = step(*args)
    if _marks(parameters) != before:
        _refuse(trainer.lightning_module)
    return result


def _seen_by_hooks(
    trainer: pl.Trainer, parameters: Sequence[Tensor], step: Callable[..., Result], *args: Any
) -> Result:
    computed: list[Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(computed.append) for p in parameters if p.requires_grad]
    try:
        result = step(*args)
    finally:
        for hook in hooks:
            hook.remove()
    if computed:
        _refuse(trainer.lightning_module)
    return result


def _refuse(module: pl.LightningModule) -> None:
    raise UserError(
        f"{type(module).__name__}.training_step calls backward() itself, and an update is the mean of the losses that"
        " it returns: add that loss to the one it returns, take gradients of inputs by torch.autograd.grad, or set"
        " automatic_optimization = False"
    )


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
