"""A trial run on copies, after which module, data, generators and memory are as before."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl

from callbacks.lib.generators import untouched_generators
from callbacks.lib.lightning_internals import forget_module
from callbacks.lib.memory import release_memory
from datamodules.errors import UserError

__all__ = ["fit_copies"]

Search = TypeVar("Search", bound=pl.Callback)


def fit_copies(
    module: pl.LightningModule,
    data: Any,
    search: Search,
    build_trainer: Callable[[Search], pl.Trainer],
    instead: str,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Train copies for a callback that finds a setting.

    Args:
        build_trainer: makes a Trainer with that callback.
        instead: what to pass where the copies cannot be made, such as "lr=NUMBER".
        prepare: changes the copy of the data, before the Trainer is made.

    Raises:
        UserError: module or data cannot be copied.
    """
    with untouched_generators():
        try:
            module, data = copy.deepcopy((module, data))
        except TypeError as error:
            raise UserError(f"the search trains copies, and these cannot be copied: {error}; pass {instead}") from error
        if prepare is not None:
            prepare(data)
        trainer = build_trainer(search)
        trainer.fit(module, data)
    device = trainer.strategy.root_device
    forget_module(search)
    del trainer, module, data
    release_memory(device)  # Before the run, which may need all of it.
