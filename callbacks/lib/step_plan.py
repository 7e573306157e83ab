"""A training step of Lightning without what costs time around its hooks; beside `lightning_internals` private names.

Lightning 2.6 opens a profiler's context, formats a debug message and sets an attribute through torch's search for
parameters and buffers, around each of the 16 hooks of a step and each hook of a callback; and it inspects the signature
of `training_step` each time. For a small network that takes longer than the arithmetic.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from callbacks.lib.hooks import is_idle
from callbacks.lib.lightning_internals import RUNNING_HOOK

_RELEASES = ("2.6.6",)
"""The releases of Lightning whose step this is; another one's own step is taken."""

_UPDATE = ("optimizer_step",)
_STRATEGY = ("backward", "pre_backward", "post_backward", "optimizer_step", "batch_to_device", "post_training_step")
_PRECISION = (
    *("pre_backward", "backward", "post_backward", "optimizer_step"),
    *("_wrap_closure", "_after_closure", "_clip_gradients"),
)
_CLIPPING = ("configure_gradient_clipping", "clip_gradients")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Methods that a `StepPlan` does not call, as long as they are Lightning's own."""

_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)

_STOCK = {
    getattr(kind, name)
    for kind in (Strategy, DDPStrategy, Precision, MixedPrecision, pl.LightningModule, pl.LightningDataModule)
    for name in {*_UPDATE, *_STRATEGY, *_PRECISION, *_CLIPPING, *_TRANSFERS}
    if hasattr(kind, name)
}
"""They do what a `StepPlan` does, where there is no GradScaler."""


def _call_hook(owner: Any, name: str, *args: Any) -> Any:
    return hook(*args) if callable(hook := getattr(owner, name)) else None


class StepPlan:
    """Makes the steps of one Trainer's training, with Lightning's order of hooks, counters, logs and contexts.

    What it does not know, it leaves to Lightning: manual optimisation, a profiler, logging at the level DEBUG, a step
    that takes the ``dataloader_iter``, GradScaler, and strategies, precisions and optimisers with methods of their own
    for what is made here. It looks at each step; so a run may change over and back, and each rank for itself, since
    both ways communicate alike. Which hooks of callbacks and of the module's class do nothing it looks at once in an
    epoch, and when the list of callbacks has changed.

    Args:
        trainer: one that begins to train.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer
        self.loop: Any = trainer.fit_loop.epoch_loop
        self.stock: Callable[[Any], None] = self.loop.advance
        self.module: Any = trainer.lightning_module
        """That of the running step."""
        self.callbacks: list[pl.Callback] = []
        """Those of the Trainer when `hooked` was made."""
        self.hooked: dict[str, list[tuple[int, pl.Callback]]] = {}
        """Which of them have a hook of their own, by its name, with their places."""
        self.idle: set[str] = set()
        """The hooks of which neither they nor the module's class have one."""
        self.classes: dict[tuple[type, tuple[str, ...]], bool] = {}
        """Whether these methods of a class are stock."""
        self.step: Any = None
        """The `training_step` of which is known whether it takes ``batch_idx``."""
        self.takes_index = True

    def has_stock(self, owner: Any, names: tuple[str, ...]) -> bool:
        """Whether these methods are Lightning's own: no subclass overrides one, and none was set on the object."""
        key = type(owner), names
        if key not in self.classes:
            self.classes[key] = all(getattr(type(owner), name, None) in _STOCK for name in names)
        return self.classes[key] and vars(owner).keys().isdisjoint(names)

    def is_ordinary(self, data_fetcher: Any) -> bool:
        """Whether nothing in the next step is unknown here."""
        trainer, loop = self.trainer, self.loop
        module, strategy, precision = self.module, trainer.strategy, trainer.precision_plugin
        optimization, optimizers = loop.automatic_optimization, strategy._lightning_optimizers
        return (
            not loop.restarting
            and type(data_fetcher) is not _DataLoaderIterDataFetcher
            and type(trainer.profiler) is PassThroughProfiler
            and vars(trainer.profiler).keys().isdisjoint(("profile", "start", "stop"))
            and not call.log.isEnabledFor(logging.DEBUG)
            and module.automatic_optimization
            and not optimization._skip_backward
            and vars(optimization).keys().isdisjoint(vars(_AutomaticOptimization))
            and getattr(precision, "scaler", None) is None
            and getattr(strategy, "_model_averager", None) is None
            and not strategy.handles_gradient_accumulation
            and len(optimizers) == 1
            and type(optimizers[0]).step is LightningOptimizer.step
            and optimizers[0]._on_before_step is optimizers[0]._on_after_step is do_nothing_closure
            and self.has_stock(module, _UPDATE)
            and self.has_stock(strategy, _STRATEGY)
            and self.has_stock(precision, _PRECISION)
        )

    def find_hooks(self) -> None:
        """Looks which callbacks have hooks of their own; one that is set on an object later counts from here on."""
        self.callbacks, self.idle = list(self.trainer.callbacks), set()
        for name in _HOOKS:
            places = enumerate(self.callbacks)
            self.hooked[name] = [(i, each) for i, each in places if not is_idle(each, name, pl.Callback)]
            if not self.hooked[name] and is_idle(self.module, name, pl.LightningModule):
                self.idle.add(name)

    def advance(self, data_fetcher: Any) -> None:
        """One training batch: `_TrainingEpochLoop.advance`."""
        self.module = self.trainer.lightning_module
        if not self.is_ordinary(data_fetcher):
            self.hooked = {}
            self.stock(data_fetcher)
            return
        trainer, loop = self.trainer, self.loop
        progress, results, connector = loop.batch_progress, loop._results, trainer._logger_connector
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        batch, _, _ = next(data_fetcher)
        batch_idx = loop.batch_idx + 1
        if batch_idx == 0 or not self.hooked:
            self.find_hooks()
        progress.is_last_batch = data_fetcher.done
        batch = self.to_device(batch)
        progress.increment_ready()
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        outputs, stops = None, False
        if batch is None:
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            stops = self.call("on_train_batch_start", batch, batch_idx) == -1
            trainer.strategy.on_train_batch_start(batch, batch_idx)
            if stops:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                outputs = self.train(batch, batch_idx)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            if not loop._should_accumulate():
                self.schedule(batch_idx + 1)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if stops:
            raise StopIteration
        self.call("on_train_batch_end", outputs, batch, batch_idx)
        if results:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    def schedule(self, number: int) -> None:
        """The schedules of the step, but for plateaus: `_TrainingEpochLoop.update_lr_schedulers`."""
        progress = self.loop.scheduler_progress
        for config in self.trainer.lr_scheduler_configs:
            if not config.reduce_on_plateau and config.interval == "step" and number % config.frequency == 0:
                progress.increment_ready()
                self.named("lr_scheduler_step", self.module.lr_scheduler_step, config.scheduler, None)
                progress.increment_completed()

    def named(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function as the hook of this name."""
        attributes = vars(self.module)
        before, attributes[RUNNING_HOOK] = attributes[RUNNING_HOOK], name
        answer = function(*args)
        attributes[RUNNING_HOOK] = before
        return answer

    def call(self, name: str, *args: Any) -> Any:
        """A hook of all callbacks and then of the module, whose answer is returned."""
        trainer, module, callbacks = self.trainer, self.module, self.trainer.callbacks
        attributes = vars(module)
        if callbacks != self.callbacks:
            self.find_hooks()
        if name in self.idle and name not in attributes:
            return None
        before, attributes[RUNNING_HOOK] = attributes[RUNNING_HOOK], name
        for place, callback in self.hooked[name]:
            if callable(hook := getattr(callback, name)):
                hook(trainer, module, *args)
            if callbacks != self.callbacks:  # As Lightning goes on, by places, where a hook has changed the list.
                for other in islice(callbacks, place + 1, None):
                    _call_hook(other, name, trainer, module, *args)
                break
        answer = _call_hook(module, name, *args)
        attributes[RUNNING_HOOK] = before
        return answer

    def to_device(self, batch: Any) -> Any:
        trainer = self.trainer
        module, data = self.module, trainer.datamodule
        batch = trainer.precision_plugin.convert_input(batch)
        if self.has_stock(module, _TRANSFERS) and (data is None or self.has_stock(data, _TRANSFERS)):
            device = trainer.strategy.root_device
            # On the CPU nothing moves, and visiting the parts takes longer than all else here.
            if type(batch) in (tuple, list) and all(type(part) is Tensor and part.device == device for part in batch):
                return type(batch)(batch)
            return move_data_to_device(batch, device)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def arguments(self, training_step: Any, *batch: Any) -> tuple[Any, ...]:
        """What the step takes: the batch, and its number where it has a parameter for that."""
        step = getattr(training_step, "__func__", training_step)
        if step is not self.step:
            self.step, self.takes_index = step, "batch_idx" in self.loop._build_kwargs(OrderedDict(), *batch)
        return batch if self.takes_index else batch[:1]

    def train(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Loss, gradients and update: `_AutomaticOptimization.run`."""
        trainer, loop = self.trainer, self.loop
        module, strategy, optimizer = self.module, trainer.strategy, trainer.optimizers[0]
        progress = loop.automatic_optimization.optim_progress.optimizer
        args = self.arguments(module.training_step, batch, batch_idx)

        def training_step() -> ClosureResult:
            output = self.named("training_step", strategy.training_step, *args)
            if output is None and trainer.world_size > 1:
                raise RuntimeError(
                    "Skipping the `training_step` by returning None in distributed training is not supported."
                    " It is recommended that you rewrite your training logic to avoid having to skip the step in the"
                    " first place."
                )
            # A division by 1 costs an operation forwards and one backwards.
            parts = output if type(output) is dict else {"loss": output}
            if type(parts.get("loss")) is Tensor and trainer.accumulate_grad_batches == 1:
                return ClosureResult(parts["loss"], extra={name: parts[name] for name in parts if name != "loss"})
            return ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)

        def zero_grad() -> None:
            progress.zero_grad.increment_ready()
            self.call("on_before_zero_grad", optimizer)
            progress.zero_grad.increment_started()
            epoch = trainer.current_epoch
            self.named("optimizer_zero_grad", module.optimizer_zero_grad, epoch, batch_idx, optimizer)
            progress.zero_grad.increment_completed()

        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        backward = partial(self.named, "backward", self.backward)
        closure = Closure(training_step, backward, zero_grad if is_first else None)
        if loop._should_accumulate():
            with _block_parallel_sync_behavior(strategy, block=True):
                closure()
        else:
            progress.step.increment_ready()
            self.named("optimizer_step", self.update, strategy._lightning_optimizers[0].optimizer, closure)
            progress.step.increment_completed()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def backward(self, loss: Any) -> None:
        """`Strategy.backward`."""
        self.call("on_before_backward", loss)
        self.module.backward(loss)
        self.call("on_after_backward")

    def update(self, optimizer: Any, closure: Closure) -> None:
        """`LightningModule.optimizer_step`."""
        trainer, module = self.trainer, self.module
        clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm

        def gradients() -> Any:
            loss = closure()
            self.call("on_before_optimizer_step", optimizer)
            if clipping[0] is not None or not self.has_stock(module, _CLIPPING):
                trainer.precision_plugin._clip_gradients(module, optimizer, *clipping)
            return loss

        optimizer.step(closure=gradients)


def plan_steps(trainer: pl.Trainer) -> Callable[[], None]:
    """Has the training steps of this Trainer made by a `StepPlan`; returns how to undo it."""
    loop: Any = trainer.fit_loop.epoch_loop
    if lightning.__version__ not in _RELEASES or type(loop) is not _TrainingEpochLoop or "advance" in vars(loop):
        return lambda: None
    vars(loop)["advance"] = StepPlan(trainer).advance
    return lambda: vars(loop).pop("advance", None)
