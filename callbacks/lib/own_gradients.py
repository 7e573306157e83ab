"""Gradients that a module makes or keeps itself, beside those of the losses that it returns: an update would lose them.

Lightning loses those of a `training_step` as well where an update is one micro-batch, since it zeroes after the step.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from datamodules.errors import UserError


def _marks(parameters: Sequence[Tensor]) -> list[Any]:
    """What any backward pass changes."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def refuse_own_backward(
    trainer: pl.Trainer, parameters: Sequence[Tensor], is_first: bool
) -> contextlib.AbstractContextManager[None]:
    """Surrounds a `training_step`.

    Args:
        is_first: this is the first one. DDP's forward pass makes gradients views of its buckets, so that a look before
            and after does not tell; hooks do, and registering them takes longer than a small step.

    Raises:
        UserError: it has computed gradients of parameters.
    """
    if not isinstance(trainer.strategy.model, DistributedDataParallel):
        return _seen_in_gradients(trainer.lightning_module, parameters)
    return _seen_by_hooks(trainer.lightning_module, parameters) if is_first else contextlib.nullcontext()


def _refuse(module: pl.LightningModule) -> None:
    raise UserError(
        f"{type(module).__name__}.training_step calls backward() itself, and an update is the mean of the losses that"
        " it returns: add that loss to the one it returns, take gradients of inputs by torch.autograd.grad, or set"
        " automatic_optimization = False"
    )


@contextlib.contextmanager
def _seen_in_gradients(module: pl.LightningModule, parameters: Sequence[Tensor]) -> Iterator[None]:
    before = _marks(parameters)
    yield
    if _marks(parameters) != before:
        _refuse(module)


@contextlib.contextmanager
def _seen_by_hooks(module: pl.LightningModule, parameters: Sequence[Tensor]) -> Iterator[None]:
    computed: list[Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(computed.append) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if computed:
        _refuse(module)


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
