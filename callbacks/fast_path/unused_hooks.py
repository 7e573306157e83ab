"""Lightning calls six hooks of every callback in every step, whether they do anything or not.

A call of an empty hook takes 2 microseconds, or 5 where the callback's key is long: with ten callbacks a tenth of a
millisecond per step. Lightning skips a hook that is not callable, so hooks that are not overridden are set to None.
`LeanLoop` does the same for itself; this is for runs that need Lightning's own loop.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.lib.trainer_attributes import callbacks_of

__all__ = ["STEP_HOOKS", "SkipUnusedHooks", "hide_unused", "is_used"]

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What Lightning calls in every step, of each callback and of the module."""


def is_used(instance: Any, base: type, name: str) -> bool:
    """Whether a hook does something: it is overridden, and not hidden."""
    own = vars(instance)
    return callable(own[name]) if name in own else getattr(type(instance), name) is not getattr(base, name)


def hide_unused(instance: Any, base: type, hooks: tuple[str, ...] = STEP_HOOKS) -> Callable[[], None]:
    """Sets those hooks to None on the instance that are still its base class's; returns how to undo it.

    Example:
        >>> class Mine(pl.Callback):
        ...     def on_after_backward(self, trainer, pl_module):
        ...         pass
        >>> mine = Mine()
        >>> show_again = hide_unused(mine, pl.Callback)
        >>> mine.on_before_backward is None, mine.on_after_backward is None
        (True, False)
        >>> show_again()
        >>> callable(mine.on_before_backward)
        True
    """
    hidden = [name for name in hooks if name not in vars(instance) and not is_used(instance, base, name)]
    for name in hidden:
        setattr(instance, name, None)

    def show_again() -> None:
        for name in hidden:
            # Unless somebody has put a hook of their own there meanwhile.
            if vars(instance).get(name, show_again) is None:
                delattr(instance, name)

    return show_again


class SkipUnusedHooks(pl.Callback):
    """Skips the calls of hooks that no callback and no module overrides.

    Results stay the same, since an empty hook does nothing. A hook that is set on an instance before training is kept;
    one that is set on a *class* during training is called after the next `on_train_start`.

    Runs on: `on_train_start`, `on_train_end`, `on_exception`, `teardown`.

    Example:
        >>> trainer = pl.Trainer(callbacks=[SkipUnusedHooks()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__()
        self._undo: list[Callable[[], None]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_again()
        self._undo = [hide_unused(callback, pl.Callback) for callback in callbacks_of(trainer)]
        self._undo.append(hide_unused(pl_module, pl.LightningModule))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_again()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._show_again()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._show_again()

    def _show_again(self) -> None:
        while self._undo:
            self._undo.pop()()
