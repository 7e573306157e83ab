"""Optimizers that wrap another one, as timm's `Lookahead` and implementations of SAM do."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from datamodules.errors import UserError


def optimizer_layers(optimizer: Optimizer) -> Sequence[Optimizer]:
    """An optimizer and the one that it wraps, which has the same parameter groups, and so on."""
    groups = optimizer.param_groups
    wrapped: list[Any] = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    inner = [each for each in wrapped if each.param_groups is groups]
    return [optimizer, *optimizer_layers(inner[0])] if inner else [optimizer]


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """The innermost optimizer, whose step calls the hooks that are registered; that of a wrapper may not.

    Raises:
        UserError: its step calls none.
    """
    innermost = optimizer_layers(optimizer)[-1]
    if not getattr(type(innermost).step, "hooked", False):  # So torch marks a step that calls them.
        raise UserError(
            f"{type(innermost).__name__}.step() calls no hooks, as where its constructor leaves out"
            " super().__init__(): call it there, or pass another optimizer"
        )
    return innermost
