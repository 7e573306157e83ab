"""Gradients that a module makes or keeps itself, beside those of the losses that it returns: an update would lose them.

Lightning loses those of a `training_step` as well where an update is one micro-batch, since it zeroes after the step.
"""

import contextlib
from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
from torch import Tensor

from datamodules.errors import UserError


@contextlib.contextmanager
def refuse_own_backward(module: pl.LightningModule, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Surrounds a `training_step`; it registers hooks, which takes longer than a small step: for the first only.

    Raises:
        UserError: it has computed gradients of parameters.
    """
    computed: list[Tensor] = []
    # A look at the gradients before and after would find those that DDP makes views of its buckets.
    hooks = [p.register_post_accumulate_grad_hook(computed.append) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if computed:
        raise UserError(
            f"{type(module).__name__}.training_step calls backward() itself, and an update is the mean of the losses"
            " that it returns: add that loss to the one it returns, take gradients of inputs by torch.autograd.grad, or"
            " set automatic_optimization = False"
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
