"""Lightning's loop, with cheaper calls of hooks: it calls the same hooks in the same order.

A step calls 16 hooks of the module and the strategy, and six of every callback. Around each of them Lightning 2.6 opens
a profiler's context, formats a debug message and sets an attribute through torch's search for parameters and buffers;
in each step, and in each `self.log`, it inspects the signature of `training_step`. For a small network that takes
longer than the arithmetic. The functions here call the hook and nothing else. Where a profiler or a log would notice,
they leave the call to Lightning's. All else is Lightning's: the loops, the closures, the counters, the logs.
"""

import logging
from functools import lru_cache
from types import FunctionType
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

from callbacks.lib.lightning_internals import RUNNING_HOOK, HookCalls, hook_calls, replace_hook_calls

__all__ = ["LeanLoop"]

_VERSION = "2.6."
"""The releases of Lightning whose functions are replaced."""

_STOCK = hook_calls()
_DEBUG_LOG = logging.getLogger(_STOCK.of_callbacks.__module__)
_PROFILING = frozenset({"profile", "start", "stop"})


def _is_unobserved(trainer: Any) -> bool:
    """Whether nothing would be profiled or written about a hook."""
    profiler = trainer.profiler
    return (
        type(profiler) is PassThroughProfiler
        and _PROFILING.isdisjoint(vars(profiler))
        and not _DEBUG_LOG.isEnabledFor(logging.DEBUG)
    )


def _call_callbacks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    module = trainer.lightning_module
    if not module or monitoring_callbacks is not None or not _is_unobserved(trainer):
        _STOCK.of_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    attributes = vars(module)
    before = attributes[RUNNING_HOOK]
    attributes[RUNNING_HOOK] = hook_name
    for callback in trainer.callbacks:
        hook = getattr(callback, hook_name)
        if callable(hook):
            hook(trainer, module, *args, **kwargs)
    attributes[RUNNING_HOOK] = before


def _call_module(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    module = pl_module or trainer.lightning_module
    if module is None or not _is_unobserved(trainer):
        return _STOCK.of_module(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    hook = getattr(module, hook_name)
    if not callable(hook):
        return None
    attributes = vars(module)
    before = attributes[RUNNING_HOOK]
    attributes[RUNNING_HOOK] = hook_name
    output = hook(*args, **kwargs)
    attributes[RUNNING_HOOK] = before
    return output


def _call_datamodule(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if trainer.datamodule is None or not _is_unobserved(trainer):
        return _STOCK.of_datamodule(trainer, hook_name, *args, **kwargs)
    hook = getattr(trainer.datamodule, hook_name)
    return hook(*args, **kwargs) if callable(hook) else None


def _call_strategy(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    module = trainer.lightning_module
    if module is None or not _is_unobserved(trainer):
        return _STOCK.of_strategy(trainer, hook_name, *args, **kwargs)
    attributes = vars(module)
    before = attributes[RUNNING_HOOK]
    attributes[RUNNING_HOOK] = hook_name
    hook = getattr(trainer.strategy, hook_name)
    if not callable(hook):
        return None
    output = hook(*args, **kwargs)
    attributes[RUNNING_HOOK] = before
    return output


_cached_has_parameter = lru_cache(_STOCK.has_parameter)


def _has_parameter(hook: Any, param: str, explicit: bool = False, min_args: int | None = None) -> bool:
    function = getattr(hook, "__func__", hook)
    if type(function) is FunctionType:
        return _cached_has_parameter(function, param, explicit, min_args)
    return _STOCK.has_parameter(hook, param, explicit, min_args)


_LEAN = HookCalls(_call_callbacks, _call_module, _call_datamodule, _call_strategy, _has_parameter)


class LeanLoop(pl.Callback):
    """Cheaper calls of hooks, for any module, strategy, precision and loop, in training and evaluation.

    Results, counters, logs and the order of hooks are those of Lightning, whose loops run unchanged. With a profiler,
    or at the logging level DEBUG, Lightning's own functions make the calls. The functions are replaced for the process:
    a Trainer that runs meanwhile has the faster calls, too.

    Runs on: `setup`, where it replaces the functions, and `on_exception` and `teardown`, where it restores them.

    Example:
        >>> trainer = pl.Trainer(callbacks=[LeanLoop()], logger=False, accelerator="cpu")
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if lightning.__version__.startswith(_VERSION):
            replace_hook_calls(_STOCK, _LEAN)

    def _restore(self, *args: Any, **kwargs: Any) -> None:
        replace_hook_calls(_LEAN, _STOCK)
        _cached_has_parameter.cache_clear()

    on_exception = teardown = _restore
