"""Access to the optimizer inside a wrapping optimizer, such as timm's `Lookahead` and implementations of SAM."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from datamodules.errors import UserError


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer is one of torch's, which draw no random numbers."""
    return type(optimizer).__module__.startswith("torch.optim.")


def calls_closure_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to call its closure once per step."""
    return is_torchs(optimizer) and not isinstance(optimizer, LBFGS)


def optimizer_layers(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return an optimizer, the one that it wraps, and so on; each has the same parameter groups."""
    groups = optimizer.param_groups
    members: list[Any] = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    inner = [member for member in members if member.param_groups is groups]
    return [optimizer, *optimizer_layers(inner[0])] if inner else [optimizer]


def _calls_hooks(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer calls registered hooks."""
    return getattr(type(optimizer).step, "hooked", False)  # torch marks such a step by this attribute.


def has_plain_zeroing(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `zero_grad` is torch's own, and does no more than setting gradients to None."""
    is_stock = getattr(type(optimizer), "zero_grad", None) is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
    # If a constructor leaves out torch's, it is the first `zero_grad` that makes the step call hooks.
    return is_stock and _calls_hooks(optimizer)


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer, whose step calls registered hooks; the step of a wrapper may not.

    Raises:
        UserError: the step calls no hooks.
    """
    innermost = optimizer_layers(optimizer)[-1]
    if not _calls_hooks(innermost):
        raise UserError(
            f"{type(innermost).__name__}.step() calls no hooks, as where its constructor leaves out"
            " super().__init__(): call it there, or pass another optimizer"
        )
    return innermost


def skip_step_on_device(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Let a fused optimizer of torch make no step where the device finds a flag of 1; None ends that.

    Others have no such switch, and make the step with gradients of zero.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    untyped: Any = optimizer
    untyped.grad_scale = None
    untyped.found_inf = flag
