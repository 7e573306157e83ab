"""Lightning's training step, with everything that cannot change within an epoch looked up once per epoch.

Around the forward pass, the backward pass and the update, Lightning 2.6 makes 1,300 calls per step: it looks for
overridden hooks, reads the signature of `training_step`, opens contexts for a profiler, and wraps closures in closures.
For a small network that takes as long as the arithmetic. The calls that remain are in Lightning's order, with its
counters. Private names of Lightning are resolved in `callbacks.lib.lightning_internals`.
"""

from contextlib import nullcontext
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from typing_extensions import override

from callbacks.fast_path.no_profiler import NoProfiler
from callbacks.fast_path.unused_hooks import STEP_HOOKS, is_used
from callbacks.lib.lightning_internals import (
    RUNNING_HOOK,
    StepInternals,
    TrainingStepResult,
    averages_models,
    has_standard_training_loop,
    warn_of_step_without_loss,
)
from callbacks.lib.trainer_attributes import callbacks_of, datamodule_of, profiler_of

__all__ = ["LeanLoop", "unsupported"]

_VERSION = "2.6."
"""The releases of Lightning whose loop this follows."""

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def unsupported(trainer: pl.Trainer) -> str:
    """What in a run `LeanLoop` does not support, in words; empty where it may be used."""
    module, precision, strategy = trainer.lightning_module, trainer.precision_plugin, trainer.strategy
    profiler = profiler_of(trainer)
    known = {
        f"Lightning {lightning.__version__}": lightning.__version__.startswith(_VERSION),
        "another loop": has_standard_training_loop(trainer),
        "manual optimization": module.automatic_optimization,
        type(strategy).__name__: type(strategy) in (SingleDeviceStrategy, DDPStrategy)
        and not averages_models(strategy),
        type(precision).__name__: type(precision) in (Precision, MixedPrecision)
        and getattr(precision, "scaler", None) is None,
        type(profiler).__name__: type(profiler) in (NoProfiler, PassThroughProfiler),
        "several optimizers": len(trainer.optimizers) == 1,
        "its own optimizer_step": not is_overridden("optimizer_step", module),
        "its own on_train_batch_start": not is_overridden("on_train_batch_start", module),
        "a training_step that takes the loader": not is_param_in_hook_signature(
            module.training_step, "dataloader_iter", explicit=True
        ),
    }
    return next((what for what, is_known in known.items() if not is_known), "")


class LeanLoop(pl.Callback):
    """A faster training step: the same hooks in the same order, looked up once per epoch.

    Weights, counters, logs and checkpoints are bit for bit those of Lightning's own loop. A run that needs something
    else uses that loop: `unsupported` says what, such as a gradient scaler, a profiler, or a strategy other than one
    device and DDP. Hooks that are set on a callback or on the module during an epoch are called from the next epoch on.

    Runs on: `on_train_start` and `on_train_epoch_start`, where it replaces the loop's step, and `on_train_end`,
    `on_exception` and `teardown`, where it restores it.

    Example:
        >>> trainer = pl.Trainer(callbacks=[LeanLoop()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._loop: Any = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._replace_step(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._replace_step(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore_step()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_step()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore_step()

    def _replace_step(self, trainer: pl.Trainer) -> None:
        self._restore_step()
        if not unsupported(trainer):
            self._loop = trainer.fit_loop.epoch_loop
            self._loop.advance = _Step(trainer).advance

    def _restore_step(self) -> None:
        if self._loop is not None:
            del self._loop.advance
            self._loop = None


class _Step:
    """`_TrainingEpochLoop.advance` and what it calls, for one epoch of one run."""

    def __init__(self, trainer: pl.Trainer) -> None:
        module, strategy = trainer.lightning_module, trainer.strategy
        self.trainer, self.module, self.strategy = trainer, module, strategy
        self.precision, self.optimizer = trainer.precision_plugin, trainer.optimizers[0]
        self.loop = trainer.fit_loop.epoch_loop
        self.stock = self.loop.advance
        self.internals, self.attributes = StepInternals(trainer), vars(module)
        callbacks = callbacks_of(trainer)
        self.hooks = {
            name: (
                [getattr(callback, name) for callback in callbacks if is_used(callback, pl.Callback, name)],
                getattr(module, name) if is_used(module, pl.LightningModule, name) else None,
            )
            for name in STEP_HOOKS
        }
        owners = (module, datamodule_of(trainer))
        self.transfers = any(is_overridden(name, owner) for name in _TRANSFERS for owner in owners)
        self.clips = is_overridden("configure_gradient_clipping", module)
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.batch: Any = None
        self.batch_idx = 0
        self.begins_window = True
        self.result: TrainingStepResult | None = None

    def _call(self, name: str, *args: Any) -> None:
        """A hook of the callbacks, then of the module."""
        of_callbacks, of_module = self.hooks[name]
        if not of_callbacks and of_module is None:
            return
        attributes = self.attributes
        before = attributes[RUNNING_HOOK]
        attributes[RUNNING_HOOK] = name
        for hook in of_callbacks:
            hook(self.trainer, self.module, *args)
        if of_module is not None:
            of_module(*args)
        attributes[RUNNING_HOOK] = before

    def _call_module(self, name: str, *args: Any) -> None:
        attributes = self.attributes
        before = attributes[RUNNING_HOOK]
        attributes[RUNNING_HOOK] = name
        getattr(self.module, name)(*args)
        attributes[RUNNING_HOOK] = before

    def advance(self, data_fetcher: Any) -> None:
        """One micro-batch, from fetching it to logging what came of it."""
        loop, trainer, internals = self.loop, self.trainer, self.internals
        if loop.restarting or internals.skips_backward():
            self.stock(data_fetcher)
            return
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            internals.broadcast_sigterm()

        batch, _, _ = next(data_fetcher)
        batch_idx = loop.batch_idx + 1
        progress = loop.batch_progress
        progress.is_last_batch = data_fetcher.done
        batch = self._moved(batch)
        progress.increment_ready()
        internals.begin_batch_logs(batch)

        outputs: Any = None
        if batch is None:
            internals.warn_of_missing_batch()
        else:
            self._call("on_train_batch_start", batch, batch_idx)
            progress.increment_started()
            outputs = self._optimize(batch, batch_idx)

        progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if internals.is_last_batch():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

        self._call("on_train_batch_end", outputs, batch, batch_idx)
        logged = internals.logged()
        if logged:
            internals.end_batch_logs()
        else:
            internals.forget_batch()
        progress.increment_completed()
        if logged:
            internals.log_step()

    def _moved(self, batch: Any) -> Any:
        batch = self.precision.convert_input(batch)
        if not self.transfers:
            return move_data_to_device(batch, self.strategy.root_device)
        batch = self.internals.transfer_batch(batch, dataloader_idx=0)
        return self.strategy.batch_to_device(batch, dataloader_idx=0)

    def _optimize(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Forward and backward, and the update where the window ends with this micro-batch."""
        self.batch, self.batch_idx = batch, batch_idx
        self.begins_window = batch_idx % self.trainer.accumulate_grad_batches == 0
        if self.internals.accumulates():
            with self.strategy.block_backward_sync() if isinstance(self.strategy, DDPStrategy) else nullcontext():
                self._forward_backward()
        else:
            progress = self.loop.automatic_optimization.optim_progress.optimizer.step
            progress.increment_ready()
            self.optimizer.step(closure=self._closure)  # type: ignore[arg-type]
            progress.increment_completed()
        result, self.result, self.batch = self.result, None, None
        return {} if result is None or result.loss is None else result.asdict()

    def _closure(self) -> Tensor | None:
        loss = self._forward_backward()
        self._call("on_before_optimizer_step", self.optimizer)
        trainer = self.trainer
        if self.clips or trainer.gradient_clip_val:
            self.internals.clip_gradients(
                self.module, self.optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )
        return loss

    @torch.enable_grad()
    def _forward_backward(self) -> Tensor | None:
        trainer, attributes = self.trainer, self.attributes
        before = attributes[RUNNING_HOOK]
        attributes[RUNNING_HOOK] = "training_step"
        args = (self.batch, self.batch_idx) if self.takes_index else (self.batch,)
        output = self.strategy.training_step(*args)
        attributes[RUNNING_HOOK] = before
        if output is None and trainer.world_size > 1:
            raise RuntimeError("`training_step` returned None, which Lightning does not support on several devices")
        self.result = result = TrainingStepResult.from_training_step_output(output, trainer.accumulate_grad_batches)
        loss = result.closure_loss
        if loss is None:
            warn_of_step_without_loss()
        if self.begins_window:
            progress = self.loop.automatic_optimization.optim_progress.optimizer.zero_grad
            progress.increment_ready()
            self._call("on_before_zero_grad", self.optimizer)
            progress.increment_started()
            self._call_module("optimizer_zero_grad", trainer.current_epoch, self.batch_idx, self.optimizer)
            progress.increment_completed()
        if loss is not None:
            self._call("on_before_backward", loss)
            self._call_module("backward", loss)
            self._call("on_after_backward")
        return result.loss
