"""Hooks of each step in which a callback has nothing to do.

Lightning opens a profiler's context around each of them, its own empty ones included: six in a step for every callback,
about a microsecond each. It passes over an attribute that is not callable.
"""

from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl

__all__ = ["drop_idle_hooks", "restore_hooks"]

_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def drop_idle_hooks(callback: pl.Callback, idle: Collection[Callable[..., Any]] = ()) -> None:
    """Keep Lightning from calling hooks of a callback in each step, until `restore_hooks`.

    Args:
        idle: methods of the callback's class that would do nothing in this run. Those that it inherits from Lightning's
            `Callback` do nothing in any. A method that a subclass overrides is called.

    Example:
        >>> class Prints(pl.Callback):
        ...     def on_train_batch_end(self, *args): ...
        >>> callback = Prints()
        >>> drop_idle_hooks(callback)
        >>> callback.on_train_batch_start is None, callback.on_train_batch_end is None
        (True, False)
        >>> restore_hooks(callback)
        >>> callback.on_train_batch_start is None
        False
    """
    for name in _OF_A_STEP:
        if name not in vars(callback) and getattr(type(callback), name) in (getattr(pl.Callback, name), *idle):
            setattr(callback, name, None)


def restore_hooks(callback: pl.Callback) -> None:
    """Have all hooks of a callback called again."""
    for name in _OF_A_STEP:
        if vars(callback).get(name, callback) is None:
            delattr(callback, name)
