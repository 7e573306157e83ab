"""Checks for gradients that a module computes or keeps itself, which an update would lose.

Lightning loses them as well in an update of one micro-batch, since it zeroes gradients after `training_step`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from datamodules.errors import UserError
from datamodules.lightning import pl

Result = TypeVar("Result")


def _gradient_versions(parameters: Sequence[Tensor]) -> list[Any]:
    """Return the identity and version of each gradient, of which any backward pass changes one."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def without_backward(
    trainer: pl.Trainer, parameters: Sequence[Tensor], is_first: bool, step: Callable[..., Result], *args: Any
) -> Result:
    """Call a function that runs `training_step`, and check that it runs no backward pass.

    Args:
        is_first: whether this is the first step of the fit. Under DDP only that step is checked.

    Raises:
        UserError: the function has computed gradients of the parameters.
    """
    if isinstance(trainer.strategy.model, DistributedDataParallel):
        # DDP's forward pass itself replaces gradients with views of its buckets, so versions do not tell. Hooks do, but
        # registering them takes longer than a small step.
        if is_first:
            return _checked_by_hooks(trainer, parameters, step, *args)
        return step(*args)
    versions_before = _gradient_versions(parameters)
    result = step(*args)
    if _gradient_versions(parameters) != versions_before:
        _refuse(trainer.lightning_module)
    return result


def _checked_by_hooks(
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
    """Check that the module's own `optimizer_zero_grad` has left no gradient; waits for the device.

    Raises:
        UserError: a parameter has a gradient of another update.
    """
    if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
        raise UserError(
            f"{type(module).__name__}.optimizer_zero_grad keeps gradients of another update, and an update is the mean"
            " of its own micro-batches: leave it out, and pass GradientAccumulation(n)"
        )
