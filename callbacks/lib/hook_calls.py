"""Fast calls of Lightning's hooks, in Lightning's order.

Around each of the 16 hooks of a step, and each hook of a callback, Lightning 2.6 opens a profiler's context, formats a
debug message and sets a module attribute through torch's search for parameters and buffers. In each step it inspects
the signature of `training_step`. For a small network this takes longer than the arithmetic. Like `lightning_internals`,
this file uses private names of Lightning.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

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
    for name in {*_UPDATE, *_STRATEGY, *_STEP, *_CLIPPING, *_ZEROING, *_TRANSFERS}
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
    """Ends the step of an optimizer whose update has no target on any rank."""


def _as_prefix(folder: Path) -> str:
    return f"{folder}{os.sep}"


_LIGHTNING = _as_prefix(Path(pl.__file__).parent)
_PROJECT = tuple(_as_prefix(Path(__file__).parents[2] / name) for name in ("callbacks", "datamodules", "recipes"))


def _file_of(function: Any) -> str:
    """Return the file with the code of a function; "" for a callable without code in Python."""
    code = getattr(function, "__code__", None)
    return "" if code is None else str(code.co_filename)


def _is_foreign(function: Any) -> bool:
    """Whether a function may draw random numbers: it is neither Lightning's nor of this project, which draw none."""
    return not _file_of(function).startswith((_LIGHTNING, *_PROJECT))


class HookCalls:
    """Caller of hooks in Lightning's order, with Lightning's contexts.

    It checks once per epoch, and when the list of callbacks changes, which hooks of callbacks and of the module's class
    do nothing, and whether the run is ordinary (`is_lean`). Other runs use Lightning's own functions: those with a
    profiler, logging at the level DEBUG, a GradScaler, or a strategy, precision plugin or optimizer that overrides a
    method of `_STOCK`.

    Args:
        trainer: a Trainer whose epoch loop is the caller.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer
        self.module: Any = None
        self.strategy: Any = None
        self.precision: Any = None
        self.optimizers: list[Any] = []
        self.world_size = 1
        """Module, strategy, precision, optimizers and ranks of the running epoch."""
        self.is_lean = False
        """Whether the running epoch needs none of Lightning's own functions."""
        self.after_update: list[Any] = []
        """The ``on_update_end`` of callbacks that have one."""
        self.callbacks: list[pl.Callback] = []
        """Callbacks of the Trainer when `hooked` was made."""
        self.hooked: dict[str, list[tuple[int, Callable[..., Any]]]] = {}
        """Hooks that callbacks override, by name, with the index of each callback."""
        self.module_hooks: set[str] = set()
        """Names of the hooks that the module's class overrides."""
        self.batch_hooks: list[tuple[str, Callable[..., Any]]] = []
        """The `on_train_batch_start` of callbacks that see each micro-batch, with its name in a profile."""
        self.draws_in_transfer = False
        self.draws_in_step = False
        self.draws_after_gradients = False
        self.draws_at_end = False
        """Whether foreign code that may draw random numbers runs between the loading of a micro-batch and its forward
        pass, in the optimizer's step, between the gradients and the weights, and after the update."""
        self.attributes: dict[str, Any] = {}
        """The module's ``__dict__``, which is read and written without torch's `__setattr__`."""
        self.schedulers: list[Any] = []
        """Configurations of the learning-rate schedulers that step once per update."""
        self.moves_batches = False
        """Whether a hook or the precision plugin takes part in moving a batch to the device."""
        self.has_clipping = False
        """Whether the module overrides the clipping of gradients."""
        self.has_zeroing = False
        """Whether the module overrides the zeroing of gradients."""
        self.zeroes_plainly = False
        """Whether gradients are set to None as torch's `zero_grad` does."""
        self.step: Any = None
        """The `training_step` for which `takes_index` was determined."""
        self.takes_index = True
        self.calls_step = False
        """Whether `Strategy.training_step` adds no context around the module's."""

    def begin_epoch(self) -> None:
        """Read which objects and hooks take part in the epoch that begins."""
        self.module = self.trainer.lightning_module
        self.strategy = self.trainer.strategy
        self.precision = self.trainer.precision_plugin
        self.optimizers = self.trainer.optimizers
        self.world_size = self.trainer.world_size
        self.attributes = vars(self.module)
        self.is_lean = self._is_ordinary()
        configs = self.trainer.lr_scheduler_configs
        self.schedulers = [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]
        data = self.trainer.datamodule
        is_stock = _has_stock(self.module, _TRANSFERS) and (data is None or _has_stock(data, _TRANSFERS))
        self.moves_batches = not (self.is_lean and is_stock)
        self.calls_step = type(self.precision) is Precision and _has_stock(self.strategy, _STEP)
        self.has_clipping = not _has_stock(self.module, _CLIPPING)
        self.has_zeroing = not _has_stock(self.module, _ZEROING)
        self.zeroes_plainly = self.is_lean and not self.has_zeroing and has_plain_zeroing(self.optimizers[0])
        self._find_hooks()

    def _is_ordinary(self) -> bool:
        trainer = self.trainer
        module = self.module
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

    def _find_hooks(self) -> None:
        """Find the hooks that callbacks and the module override, or that were set on these objects."""
        self.callbacks = list(self.trainer.callbacks)
        self.after_update = [member.on_update_end for member in self.callbacks if hasattr(member, "on_update_end")]
        for name in _HOOKS:
            hooks = [
                (index, getattr(callback, name))
                for index, callback in enumerate(self.callbacks)
                if not is_idle(callback, name, pl.Callback)
            ]
            self.hooked[name] = [(index, hook) for index, hook in hooks if callable(hook)]
        self.module_hooks = {name for name in _HOOKS if not is_idle(self.module, name, pl.LightningModule)}
        # Lightning's own callbacks look at no batch: they count updates, or log once in each.
        self.batch_hooks = [
            (f"[Callback]{self.callbacks[index].state_key}.on_train_batch_start", hook)
            for index, hook in self.hooked["on_train_batch_start"]
            if not _file_of(hook).startswith(_LIGHTNING)
        ]
        self._find_foreign_hooks()

    def _find_foreign_hooks(self) -> None:
        """Find where foreign code runs that may draw random numbers."""
        module = self.module
        names = {name for name, hooks in self.hooked.items() if any(_is_foreign(hook) for _, hook in hooks)}
        names |= {name for name in self.module_hooks if _is_foreign(getattr(module, name))}
        names |= {name for name in (*_UPDATE, *_CLIPPING, *_TRANSFERS) if _is_foreign(getattr(module, name))}
        data = self.trainer.datamodule
        if data is not None:
            names |= {name for name in _TRANSFERS if _is_foreign(getattr(data, name))}
        self.draws_in_transfer = not names.isdisjoint((*_TRANSFERS, "on_train_batch_start"))
        self.draws_in_step = "optimizer_step" in names or not all(map(is_torchs, self.optimizers))
        is_hooked = not names.isdisjoint(("on_after_backward", "on_before_optimizer_step", *_CLIPPING))
        self.draws_after_gradients = self.draws_in_step or is_hooked
        self.draws_at_end = "on_train_batch_end" in names or any(map(_is_foreign, self.after_update))

    def hook(self, name: str, *args: Any) -> Any:
        """Call a hook of all callbacks and then of the module, and return the module's result."""
        if not self.is_lean:
            call._call_callback_hooks(self.trainer, name, *args)
            return call._call_lightning_module_hook(self.trainer, name, *args)
        module = self.module
        callbacks = self.trainer.callbacks
        attributes = self.attributes
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

    def start_batch(self, batch: Any, batch_idx: int) -> bool:
        """Call `on_train_batch_start` for an update's first micro-batch, and return whether the epoch ends there."""
        stops: bool = self.hook("on_train_batch_start", batch, batch_idx) == -1
        self.strategy_hook("on_train_batch_start", batch, batch_idx)
        return stops

    def start_next_batch(self, batch: Any, batch_idx: int) -> None:
        """Call `on_train_batch_start` for another micro-batch of an update, except that of Lightning's own callbacks.

        Raises:
            UserError: the module asks to skip the rest of the epoch.
        """
        name = "on_train_batch_start"
        module = self.module
        if self.trainer.callbacks != self.callbacks:
            self._find_hooks()
        for action, hook in self.batch_hooks:
            self.profile(action, self.named, name, hook, self.trainer, module, batch, batch_idx)
        if name not in self.module_hooks and name not in self.attributes:
            return
        action = f"[LightningModule]{type(module).__name__}.{name}"
        if self.profile(action, self.named, name, _call_hook, module, name, batch, batch_idx) == -1:
            raise UserError(
                f"{type(module).__name__}.on_train_batch_start returned -1 within an update, which is then half done:"
                " return it by batch_idx, so that it comes with the update's first micro-batch"
            )

    def named(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as the running hook of this name, which decides how `log` logs."""
        attributes = self.attributes
        outer_hook = attributes[RUNNING_HOOK]
        attributes[RUNNING_HOOK] = name
        result = function(*args)
        attributes[RUNNING_HOOK] = outer_hook
        return result

    def profile(self, action: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function within the profiler's context of an action, if there is a profiler."""
        if self.is_lean:
            return function(*args)
        with self.trainer.profiler.profile(action):
            return function(*args)

    def end_update(self) -> None:
        """Call ``on_update_end`` of the callbacks that have it."""
        if self.trainer.callbacks != self.callbacks:
            self._find_hooks()
        for hook in self.after_update:
            hook(self.trainer, self.module)

    def scheduler_steps(self, updates: int, progress: Any) -> None:
        """Step the learning-rate schedulers after an update, except ReduceLROnPlateau.

        Args:
            updates: number of updates of the epoch so far.
            progress: Lightning's counter of the schedulers' steps.
        """
        for config in self.schedulers:
            if updates % config.frequency == 0:
                progress.increment_ready()
                self.module_hook("lr_scheduler_step", config.scheduler, None)
                progress.increment_completed()

    def module_hook(self, name: str, *args: Any) -> Any:
        """Call a method of the module as the hook of its name."""
        if not self.is_lean:
            return call._call_lightning_module_hook(self.trainer, name, *args)
        return self.named(name, getattr(self.module, name), *args)

    def zero_gradients(self, batch_idx: int, optimizer: Any) -> None:
        """Zero the gradients as the module's `optimizer_zero_grad` does."""
        if not self.zeroes_plainly:
            self.module_hook("optimizer_zero_grad", self.trainer.current_epoch, batch_idx, optimizer)
            return
        # As `Optimizer.zero_grad`, whose `record_function` takes longer than this loop.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def strategy_hook(self, name: str, *args: Any) -> Any:
        """Call a hook of the strategy."""
        if not self.is_lean:
            return call._call_strategy_hook(self.trainer, name, *args)
        hook = getattr(self.strategy, name)
        is_idle = getattr(hook, "__func__", None) is getattr(Strategy, name)
        return None if is_idle else hook(*args)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device, with the module's hooks."""
        if type(self.precision) not in (Precision, MixedPrecision):
            batch = self.precision.convert_input(batch)  # The two others return it unchanged.
        if self.moves_batches:
            batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
            return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)
        device = self.strategy.root_device
        if type(batch) not in (tuple, list):
            return move_data_to_device(batch, device)
        for element in batch:
            if type(element) is not Tensor or element.device != device:
                return move_data_to_device(batch, device)
        # All tensors are there already, as on the CPU: Lightning's visit of each element would take longer than this.
        return type(batch)(batch)

    def step_arguments(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the arguments of the module's `training_step`, which need not take ``batch_idx``."""
        # The signature is inspected once; Lightning inspects it in each step.
        step = self.module.training_step
        function = getattr(step, "__func__", step)
        if function is not self.step:
            self.step = function
            self.takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return {"batch": batch, "batch_idx": batch_idx} if self.takes_index else {"batch": batch}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `training_step` through the strategy, and return its output."""
        args = self.step_arguments(batch, batch_idx).values()
        strategy = self.strategy
        if self.is_lean and self.calls_step and strategy.model is self.module:
            return self.named("training_step", self.module.training_step, *args)
        if self.is_lean:
            return self.named("training_step", strategy.training_step, *args)
        output = call._call_strategy_hook(self.trainer, "training_step", *args)
        strategy.post_training_step()
        return output

    def backward(self, loss: Any, optimizer: Any) -> None:
        """Run the backward pass of a micro-batch, with the hooks before it.

        `on_after_backward` is called once per update, when all its gradients are summed.
        """
        if self.is_lean:
            self.hook("on_before_backward", loss)
            self.named("backward", self.module.backward, loss)
            return
        trainer = self.trainer
        strategy = trainer.strategy
        precision = trainer.precision_plugin
        with trainer.profiler.profile(f"[Strategy]{type(strategy).__name__}.backward"):
            strategy.pre_backward(loss)
            scaled = precision.pre_backward(loss, self.module)
            precision.backward(scaled, self.module, optimizer)
            strategy.post_backward(scaled.detach())

    def stock_backward(self, loss: Any, optimizer: Any) -> None:
        """Run Lightning's backward pass, with `on_after_backward`, for an update that is one micro-batch."""
        if self.is_lean:
            self.backward(loss, optimizer)
            self.hook("on_after_backward")
        else:
            call._call_strategy_hook(self.trainer, "backward", loss, optimizer)

    def optimizer_step(self, batch_idx: int, closure: Callable[[], Any]) -> bool:
        """Call the module's `optimizer_step`, whose optimizer calls the closure.

        Returns:
            Whether a step was made: False if the closure has raised `NoTargets`.
        """
        trainer = self.trainer
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        outer_hook = self.attributes[RUNNING_HOOK]
        progress.increment_ready()
        try:
            if self.is_lean:
                self.named("optimizer_step", self._run_optimizer, self.optimizers[0], closure)
            else:
                epoch = trainer.current_epoch
                optimizer = self.module.optimizers()  # As Lightning wraps it.
                call._call_lightning_module_hook(trainer, "optimizer_step", epoch, batch_idx, optimizer, closure)
        except NoTargets:
            self.attributes[RUNNING_HOOK] = outer_hook
            for counters in (progress.total, progress.current):
                counters.ready -= 1
            return False
        progress.increment_completed()
        return True

    def _run_optimizer(self, optimizer: Any, closure: Callable[[], Any]) -> None:
        """Step the optimizer as `LightningModule.optimizer_step` does: clip the gradients within its closure."""
        trainer = self.trainer
        module = self.module
        value = trainer.gradient_clip_val
        algorithm = trainer.gradient_clip_algorithm

        def clipped_closure() -> Any:
            loss = closure()
            self.hook("on_before_optimizer_step", optimizer)
            if value is not None or self.has_clipping:
                clip = partial(module.configure_gradient_clipping, optimizer)
                clip = partial(clip, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
                self.named("configure_gradient_clipping", clip)
            return loss

        optimizer.step(closure=clipped_closure)
