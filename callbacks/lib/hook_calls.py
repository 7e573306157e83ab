"""Calls of Lightning's hooks in a step, in Lightning's order: by its own functions, or without their contexts.

Around each of the 16 hooks of a step, and each hook of a callback, Lightning 2.6 opens a profiler's context, formats a
debug message and sets a module attribute through torch's search for parameters and buffers. In each step it inspects
the signature of `training_step`. For a small network this takes longer than the arithmetic. `StockCalls` calls hooks as
Lightning does; `LeanCalls` leaves out what an ordinary run does not need, and `epoch_calls` chooses. Like
`lightning_internals`, this file uses private names of Lightning.

Tested in `tests/callbacks/test_update_loop.py`.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from callbacks.lib.lightning_internals import RUNNING_HOOK, is_idle
from callbacks.lib.optimizers import has_plain_zeroing, is_torchs
from datamodules.errors import UserError
from datamodules.lightning import (
    DDPStrategy,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    PassThroughProfiler,
    Precision,
    Strategy,
    call,
    is_param_in_hook_signature,
    move_data_to_device,
    pl,
)

_UPDATE = ("optimizer_step",)
_STRATEGY = ("backward", "pre_backward", "post_backward", "optimizer_step", "batch_to_device", "post_training_step")
_STEP = ("training_step",)
_CLIPPING = ("configure_gradient_clipping", "clip_gradients")
_ZEROING = ("optimizer_zero_grad",)
_BACKWARD = ("backward",)
_SCHEDULES = ("lr_scheduler_step",)
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Methods whose work is done here, as long as they are Lightning's own."""

_PRECISIONS = (Precision, MixedPrecision, DoublePrecision, HalfPrecision)
"""Precision plugins that add nothing to a step but a GradScaler."""

_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)

_STOCK = {
    getattr(kind, name)
    for kind in (Strategy, DDPStrategy, pl.LightningModule, pl.LightningDataModule)
    for name in {*_UPDATE, *_STRATEGY, *_STEP, *_CLIPPING, *_ZEROING, *_BACKWARD, *_SCHEDULES, *_TRANSFERS}
    if hasattr(kind, name)
}
"""Lightning's own implementations of these methods, which this file replaces if there is no GradScaler."""


def _has_stock(owner: Any, names: tuple[str, ...]) -> bool:
    """Whether an object's methods are Lightning's own: not overridden in a subclass nor set on the object."""
    is_stock = all(getattr(type(owner), name, None) in _STOCK for name in names)
    return is_stock and vars(owner).keys().isdisjoint(names)


def _call_hook(owner: Any, name: str, *args: Any) -> Any:
    hook = getattr(owner, name)
    return hook(*args) if callable(hook) else None


class NoTargets(Exception):
    """Exception that ends the step of an optimizer whose update has no target on any rank."""


def _as_prefix(folder: Path) -> str:
    return f"{folder}{os.sep}"


_LIGHTNING = _as_prefix(Path(pl.__file__).parent)
_PROJECT = tuple(_as_prefix(Path(__file__).parents[2] / name) for name in ("callbacks", "datamodules", "recipes"))


def _file_of(function: Any) -> str:
    """Return the file with the code of a function or callable object; "" for one without code in Python."""
    if not callable(function):
        return ""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else str(code.co_filename)


def is_foreign(function: Any) -> bool:
    """Whether a function may draw random numbers: it is neither Lightning's nor of this project, which draw none."""
    return not _file_of(function).startswith((_LIGHTNING, *_PROJECT))


class StockCalls:
    """Caller of the hooks of a step by Lightning's own functions.

    It reads once, for an epoch, which objects and hooks take part.

    Args:
        trainer: a Trainer whose epoch loop is the caller.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer
        self.module: Any = trainer.lightning_module
        self.strategy: Any = trainer.strategy
        self.precision: Any = trainer.precision_plugin
        self.optimizers: list[Any] = trainer.optimizers
        self.world_size = trainer.world_size
        self.is_automatic: bool = self.module.automatic_optimization
        configs = trainer.lr_scheduler_configs
        self.schedulers = [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]
        """Configurations of the learning-rate schedulers that step once per update."""
        self.has_zeroing = not _has_stock(self.module, _ZEROING)
        """Whether the module overrides the zeroing of gradients."""
        self._attributes = vars(self.module)  # Read and written without torch's `__setattr__`.
        self._inspected: Any = None
        """The `training_step` for which `_takes_index` was determined."""
        self._takes_index = True
        self._find_hooks()

    def _find_hooks(self) -> None:
        """Find the hooks that callbacks and the module override, or that were set on these objects."""
        self.callbacks = list(self.trainer.callbacks)
        """The Trainer's callbacks when their hooks were found."""
        self.after_update = [member.on_update_end for member in self.callbacks if hasattr(member, "on_update_end")]
        """The ``on_update_end`` of callbacks that have one."""
        self.hooked: dict[str, list[tuple[int, Callable[..., Any]]]] = {}
        """Hooks that callbacks override, by name, with the index of each callback."""
        for name in _HOOKS:
            hooks = [
                (index, getattr(callback, name))
                for index, callback in enumerate(self.callbacks)
                if not is_idle(callback, name, pl.Callback)
            ]
            self.hooked[name] = [(index, hook) for index, hook in hooks if callable(hook)]
        self.module_hooks = {name for name in _HOOKS if not is_idle(self.module, name, pl.LightningModule)}
        """Names of the hooks that the module's class overrides."""
        # Lightning's own callbacks look at no batch: they count updates, or log once in each.
        self.batch_hooks = [
            (f"[Callback]{self.callbacks[index].state_key}.on_train_batch_start", hook)
            for index, hook in self.hooked["on_train_batch_start"]
            if not _file_of(hook).startswith(_LIGHTNING)
        ]
        """The `on_train_batch_start` of callbacks that see each micro-batch, with its name in a profile."""
        self._find_foreign_hooks()

    def _find_foreign_hooks(self) -> None:
        """Find where foreign code runs that may draw random numbers.

        That is between the loading of a micro-batch and its forward pass, in the optimizer's step, between the
        gradients and the weights, and after the update.
        """
        module = self.module
        names = {name for name, hooks in self.hooked.items() if any(is_foreign(hook) for _, hook in hooks)}
        names |= {name for name in self.module_hooks if is_foreign(getattr(module, name))}
        names |= {name for name in (*_UPDATE, *_CLIPPING, *_TRANSFERS) if is_foreign(getattr(module, name))}
        data = self.trainer.datamodule
        if data is not None:
            names |= {name for name in _TRANSFERS if is_foreign(getattr(data, name))}
        self.draws_in_transfer = not names.isdisjoint((*_TRANSFERS, "on_train_batch_start"))
        self.draws_in_step = "optimizer_step" in names or not all(map(is_torchs, self.optimizers))
        is_hooked = not names.isdisjoint(("on_after_backward", "on_before_optimizer_step", *_CLIPPING))
        self.draws_after_gradients = self.draws_in_step or is_hooked
        self.draws_at_end = "on_train_batch_end" in names or any(map(is_foreign, self.after_update))

    # Hooks

    def hook(self, name: str, *args: Any) -> Any:
        """Call a hook of all callbacks and then of the module, and return the module's result."""
        call._call_callback_hooks(self.trainer, name, *args)
        return call._call_lightning_module_hook(self.trainer, name, *args)

    def module_hook(self, name: str, *args: Any) -> Any:
        """Call a method of the module as the hook of its name."""
        return call._call_lightning_module_hook(self.trainer, name, *args)

    def strategy_hook(self, name: str, *args: Any) -> Any:
        """Call a hook of the strategy."""
        return call._call_strategy_hook(self.trainer, name, *args)

    def profile(self, action: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function within the profiler's context of an action."""
        with self.trainer.profiler.profile(action):
            return function(*args)

    def named(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as the running hook of this name, which decides how `log` logs."""
        attributes = self._attributes
        outer_hook = attributes[RUNNING_HOOK]
        attributes[RUNNING_HOOK] = name
        result = function(*args)
        attributes[RUNNING_HOOK] = outer_hook
        return result

    def start_batch(self, batch: Any, batch_idx: int) -> bool:
        """Call `on_train_batch_start` for an update's first micro-batch, and return whether the epoch ends there."""
        stops: bool = self.hook("on_train_batch_start", batch, batch_idx) == -1
        self.strategy_hook("on_train_batch_start", batch, batch_idx)
        return stops

    def start_next_batch(self, batch: Any, batch_idx: int) -> None:
        """Call `on_train_batch_start` for another micro-batch of an update, except for Lightning's own callbacks.

        Raises:
            UserError: the module asks to skip the rest of the epoch.
        """
        name = "on_train_batch_start"
        module = self.module
        if self.trainer.callbacks != self.callbacks:
            self._find_hooks()
        for action, hook in self.batch_hooks:
            self.profile(action, self.named, name, hook, self.trainer, module, batch, batch_idx)
        if name not in self.module_hooks and name not in self._attributes:
            return
        action = f"[LightningModule]{type(module).__name__}.{name}"
        if self.profile(action, self.named, name, _call_hook, module, name, batch, batch_idx) == -1:
            raise UserError(
                f"{type(module).__name__}.on_train_batch_start returned -1 within an update, which is then half done:"
                " return it by batch_idx, so that it comes with the update's first micro-batch"
            )

    def end_update(self) -> None:
        """Call ``on_update_end`` of the callbacks that have it."""
        if self.trainer.callbacks != self.callbacks:
            self._find_hooks()
        for hook in self.after_update:
            hook(self.trainer, self.module)

    # The parts of a step

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device, with the module's hooks."""
        batch = self.precision.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)

    def step_arguments(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the arguments of the module's `training_step`, which need not take ``batch_idx``."""
        # The signature is inspected once; Lightning inspects it in each step.
        step = self.module.training_step
        function = getattr(step, "__func__", step)
        if function is not self._inspected:
            self._inspected = function
            self._takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return {"batch": batch, "batch_idx": batch_idx} if self._takes_index else {"batch": batch}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `training_step` through the strategy, and return its output."""
        args = self.step_arguments(batch, batch_idx).values()
        output = call._call_strategy_hook(self.trainer, "training_step", *args)
        self.strategy.post_training_step()
        return output

    def zero_gradients(self, batch_idx: int, optimizer: Any) -> None:
        """Zero the gradients by the module's `optimizer_zero_grad`."""
        self.module_hook("optimizer_zero_grad", self.trainer.current_epoch, batch_idx, optimizer)

    def backward(self, loss: Any, optimizer: Any, *, is_whole: bool) -> None:
        """Run the backward pass of a micro-batch, with the hooks before it.

        Args:
            is_whole: whether the micro-batch is the whole update, so that `on_after_backward` follows. Otherwise that
                hook follows once all gradients of the update are summed.
        """
        if is_whole:
            call._call_strategy_hook(self.trainer, "backward", loss, optimizer)
            return
        strategy = self.strategy
        with self.trainer.profiler.profile(f"[Strategy]{type(strategy).__name__}.backward"):
            strategy.pre_backward(loss)
            scaled = self.precision.pre_backward(loss, self.module)
            self.precision.backward(scaled, self.module, optimizer)
            strategy.post_backward(scaled.detach())

    def optimizer_step(self, batch_idx: int, closure: Callable[[], Any]) -> bool:
        """Step the optimizer, which calls the closure; `on_before_optimizer_step` and clipping follow the closure.

        Returns:
            Whether a step was made: False if the closure has raised `NoTargets`.
        """
        progress = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        outer_hook = self._attributes[RUNNING_HOOK]
        progress.increment_ready()
        try:
            self._step_optimizer(batch_idx, closure)
        except NoTargets:
            self._attributes[RUNNING_HOOK] = outer_hook
            for counters in (progress.total, progress.current):
                counters.ready -= 1
            return False
        progress.increment_completed()
        return True

    def _step_optimizer(self, batch_idx: int, closure: Callable[[], Any]) -> None:
        optimizer = self.module.optimizers()  # As Lightning wraps it.
        self.module_hook("optimizer_step", self.trainer.current_epoch, batch_idx, optimizer, closure)

    def step_schedulers(self, updates: int, progress: Any) -> None:
        """Step the learning-rate schedulers after an update, except ReduceLROnPlateau.

        Args:
            updates: number of updates of the epoch so far.
            progress: Lightning's counter of the schedulers' steps.
        """
        for config in self.schedulers:
            if updates % config.frequency == 0:
                progress.increment_ready()
                self._step_scheduler(config.scheduler)
                progress.increment_completed()

    def _step_scheduler(self, scheduler: Any) -> None:
        self.module_hook("lr_scheduler_step", scheduler, None)


class LeanCalls(StockCalls):
    """Caller of the hooks of a step in a run for which `is_ordinary` holds: idle hooks and contexts are left out."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        data = self.trainer.datamodule
        self._moves_plainly = _has_stock(self.module, _TRANSFERS) and (data is None or _has_stock(data, _TRANSFERS))
        self._converts = type(self.precision) not in (Precision, MixedPrecision)  # These return a batch unchanged.
        self._clips = not _has_stock(self.module, _CLIPPING)
        self._has_backward = not _has_stock(self.module, _BACKWARD)
        self._has_scheduling = not _has_stock(self.module, _SCHEDULES)
        self._zeroes_plainly = not self.has_zeroing and has_plain_zeroing(self.optimizers[0])
        self._calls_step = type(self.precision) is Precision and _has_stock(self.strategy, _STEP)
        """Whether `Strategy.training_step` adds no context around the module's."""

    @override
    def hook(self, name: str, *args: Any) -> Any:
        module = self.module
        callbacks = self.trainer.callbacks
        attributes = self._attributes
        if callbacks != self.callbacks:
            self._find_hooks()
        hooked = self.hooked[name]
        has_module_hook = name in self.module_hooks or name in attributes
        if not hooked and not has_module_hook:
            return None
        outer_hook = attributes[RUNNING_HOOK]
        attributes[RUNNING_HOOK] = name
        for index, hook in hooked:
            hook(self.trainer, module, *args)
            # If a hook changes the list, Lightning's loop over it continues at the next index of the changed list.
            if callbacks != self.callbacks:
                for callback in islice(callbacks, index + 1, None):
                    _call_hook(callback, name, self.trainer, module, *args)
                break
        result = _call_hook(module, name, *args) if has_module_hook else None
        attributes[RUNNING_HOOK] = outer_hook
        return result

    @override
    def module_hook(self, name: str, *args: Any) -> Any:
        return self.named(name, getattr(self.module, name), *args)

    @override
    def strategy_hook(self, name: str, *args: Any) -> Any:
        hook = getattr(self.strategy, name)
        is_idle = getattr(hook, "__func__", None) is getattr(Strategy, name)
        return None if is_idle else hook(*args)

    @override
    def profile(self, action: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @override
    def to_device(self, batch: Any) -> Any:
        if not self._moves_plainly:
            return super().to_device(batch)
        if self._converts:
            batch = self.precision.convert_input(batch)
        device = self.strategy.root_device
        if type(batch) not in (tuple, list):
            return move_data_to_device(batch, device)
        for element in batch:
            if type(element) is not Tensor or element.device != device:
                return move_data_to_device(batch, device)
        # All tensors are there already, as on the CPU: Lightning's visit of each element would take longer than this.
        return type(batch)(batch)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        args = self.step_arguments(batch, batch_idx).values()
        is_plain = self._calls_step and self.strategy.model is self.module
        step = self.module.training_step if is_plain else self.strategy.training_step
        return self.named("training_step", step, *args)

    @override
    def zero_gradients(self, batch_idx: int, optimizer: Any) -> None:
        if not self._zeroes_plainly:
            super().zero_gradients(batch_idx, optimizer)
            return
        # As `Optimizer.zero_grad`, whose `record_function` takes longer than this loop.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @override
    def backward(self, loss: Any, optimizer: Any, *, is_whole: bool) -> None:
        self.hook("on_before_backward", loss)
        if self._has_backward:
            self.named("backward", self.module.backward, loss)
        else:
            loss.backward()
        if is_whole:
            self.hook("on_after_backward")

    @override
    def _step_scheduler(self, scheduler: Any) -> None:
        if self._has_scheduling:
            super()._step_scheduler(scheduler)
        else:
            scheduler.step()

    @override
    def _step_optimizer(self, batch_idx: int, closure: Callable[[], Any]) -> None:
        """Step the optimizer as `LightningModule.optimizer_step` does: clip the gradients within its closure."""
        optimizer = self.optimizers[0]
        value = self.trainer.gradient_clip_val
        algorithm = self.trainer.gradient_clip_algorithm

        def clipped_closure() -> Any:
            loss = closure()
            self.hook("on_before_optimizer_step", optimizer)
            if value is not None or self._clips:
                clip = partial(self.module.configure_gradient_clipping, optimizer)
                clip = partial(clip, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
                self.named("configure_gradient_clipping", clip)
            return loss

        self.named("optimizer_step", partial(optimizer.step, closure=clipped_closure))


def is_ordinary(trainer: Any) -> bool:
    """Whether the hooks of a step need none of Lightning's own functions around them.

    They do with a profiler, logging at the level DEBUG, a GradScaler, several optimizers, or a strategy, precision
    plugin or module that overrides a method whose work is done here.
    """
    module = trainer.lightning_module
    strategy = trainer.strategy
    precision = trainer.precision_plugin
    return (
        type(trainer.profiler) is PassThroughProfiler
        and vars(trainer.profiler).keys().isdisjoint(("profile", "start", "stop"))
        and not call.log.isEnabledFor(logging.DEBUG)
        and module.automatic_optimization
        and getattr(precision, "scaler", None) is None
        and getattr(strategy, "_model_averager", None) is None
        and not strategy.handles_gradient_accumulation
        and len(trainer.optimizers) == 1
        and _has_stock(module, _UPDATE)
        and _has_stock(strategy, _STRATEGY)
        and type(precision) in _PRECISIONS
    )


def epoch_calls(trainer: pl.Trainer) -> StockCalls:
    """Return the caller of the hooks of an epoch that begins."""
    return LeanCalls(trainer) if is_ordinary(trainer) else StockCalls(trainer)
