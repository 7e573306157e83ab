"""Lightning's private names: no other file touches them.

Each function does one thing that Lightning has no public name for. `tests/callbacks/lib/test_lightning_internals.py`
holds a test for each, so that a release of Lightning that renames one fails there.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader

__all__ = [
    "RUNNING_HOOK",
    "StepInternals",
    "TrainingStepResult",
    "attached_trainer",
    "averages_models",
    "collective_timeout",
    "has_standard_training_loop",
    "keep_signal_handlers",
    "original_training_loader",
    "restart_training_loaders",
    "resume_max_steps_at_epoch_end",
    "save_last",
    "save_now_unless_saved",
    "saves_within_epochs",
    "set_collective_timeout",
    "set_writer",
    "training_is_done",
    "uncount_update",
    "warn_of_step_without_loss",
]

RUNNING_HOOK = "_current_fx_name"
"""The entry of a LightningModule's ``__dict__`` with the name of the running hook, which decides how `log` logs.

A name and no function: `LeanLoop` writes it several times in each step.
"""

TrainingStepResult = ClosureResult
"""What Lightning makes of the output of `training_step`: the loss for backward, a detached copy, and other entries."""


# The module


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that runs a module; None where `LightningModule.trainer` would raise."""
    trainer: pl.Trainer | None = module._trainer
    return trainer


# The loops


def has_standard_training_loop(trainer: pl.Trainer) -> bool:
    """Whether the loop over batches, and the one that makes updates, are Lightning's own."""
    loop = trainer.fit_loop.epoch_loop
    return type(loop) is _TrainingEpochLoop and type(loop.automatic_optimization) is _AutomaticOptimization


class StepInternals:
    """What Lightning's loop calls in each step, looked up once, so that a step costs no more than the calls.

    Args:
        trainer: one that trains now.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
        self._loop, self._optimization = loop, loop.automatic_optimization
        self.broadcast_sigterm: Callable[[], None] = loop._broadcast_sigterm_tensor
        self.is_last_batch: Callable[[], bool] = loop._num_ready_batches_reached
        self.accumulates: Callable[[], bool] = trainer.fit_loop._should_accumulate
        self.transfer_batch: Callable[..., Any] = module._on_before_batch_transfer
        self.clip_gradients: Callable[..., None] = trainer.precision_plugin._clip_gradients
        logs = trainer._logger_connector
        self.begin_batch_logs: Callable[[Any], None] = logs.on_batch_start
        self.end_batch_logs: Callable[[], None] = logs.on_batch_end
        self.log_step: Callable[[], None] = logs.update_train_step_metrics

    def skips_backward(self) -> bool:
        """Whether steps run without backward pass and update, as when SWA measures batch normalisation."""
        return bool(self._optimization._skip_backward)

    def logged(self) -> bool:
        """Whether anything was logged with `LightningModule.log` since the epoch began."""
        return bool(self._loop._results)

    def forget_batch(self) -> None:
        """What `end_batch_logs` does where nothing was logged."""
        results = self._loop._results
        results.batch = results.batch_size = None

    def warn_of_missing_batch(self) -> None:
        """Lightning's warning about a loader that yields None, once a run."""
        message = "train_dataloader yielded None. If this was on purpose, ignore this warning..."
        self._loop._warning_cache.warn(message)


def warn_of_step_without_loss() -> None:
    """Lightning's warning about a `training_step` that returns None, once a process."""
    Closure.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")


def training_is_done(trainer: pl.Trainer) -> bool:
    """Whether the epoch's last batch was trained or `max_steps` is reached."""
    return bool(trainer.fit_loop.epoch_loop._is_training_done)


def resume_max_steps_at_epoch_end(trainer: pl.Trainer) -> None:
    """Resumes a run with `max_steps` from an epoch's end as one with `max_epochs`.

    Lightning takes that place for the middle of the epoch and repeats the epoch's last hook.
    """
    loop: Any = trainer.fit_loop
    loop._iteration_based_training = lambda: False


def uncount_update(loop_state: dict[str, Any]) -> None:
    """Takes the last update out of the count that `log` uses as its step.

    Args:
        loop_state: a checkpoint's entry for the fit loop; changed in place.
    """
    loop_state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def original_training_loader(trainer: pl.Trainer) -> tuple[Any, bool]:
    """The training loader before Lightning has replaced its sampler.

    Returns:
        The loader, and whether it is a new one: a module or data module makes another, while the one that was passed to
        `fit` is what training iterates over.
    """
    source = trainer.fit_loop._data_source
    return source.dataloader(), source.is_module()


def restart_training_loaders(trainer: pl.Trainer, skip: int, seed: Callable[[pl.Trainer], None] | None = None) -> None:
    """Starts the training loaders again, in the order of the present epoch, and reads over some batches.

    Args:
        skip: how many.
        seed: called where Lightning's loop would call `on_train_epoch_start`.
    """
    loop = trainer.fit_loop
    fetcher: Any = loop._data_fetcher
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        _set_sampler_epoch(loader, trainer.current_epoch)
    if seed is not None:
        seed(trainer)
    # Epoch 0 has its iterator already: Lightning makes it before that hook, and later ones after it.
    if trainer.current_epoch > 0:
        iter(fetcher)
    for _ in range(skip):
        next(fetcher)
    fetcher.fetched -= skip


# Signals, strategies and loggers


def keep_signal_handlers(trainer: pl.Trainer) -> Callable[[], None]:
    """Keeps Lightning from installing signal handlers; returns how to undo it."""
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = lambda: None

    def undo() -> None:
        del connector.register_signal_handlers

    return undo


def averages_models(strategy: Strategy) -> bool:
    """Whether DDP averages the weights of the ranks now and then (post-local SGD)."""
    return getattr(strategy, "_model_averager", None) is not None


def collective_timeout(strategy: Strategy) -> timedelta | None:
    """How long a rank waits for the others in a collective call; None where the strategy has no such setting."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return timeout


def set_collective_timeout(strategy: Strategy, timeout: timedelta) -> None:
    """Sets it before the processes connect. Lightning takes it only in the constructor of each strategy."""
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout


def set_writer(logger: TensorBoardLogger, writer: Any) -> None:
    """Replaces what `TensorBoardLogger.experiment` returns."""
    logger._experiment = writer


# ModelCheckpoint


def saves_within_epochs(checkpoint: ModelCheckpoint) -> bool:
    """Whether it saves after a number of updates or at an interval of time."""
    return checkpoint._every_n_train_steps >= 1 or checkpoint._train_time_interval is not None


def save_last(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Saves its ``last.ckpt`` now."""
    checkpoint._save_last_checkpoint(trainer, checkpoint._monitor_candidates(trainer))


def save_now_unless_saved(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Saves as at the end of its interval, unless it has saved after this update or must not save at all."""
    if not checkpoint._should_skip_saving_checkpoint(trainer):
        checkpoint._save_topk_checkpoint(trainer, checkpoint._monitor_candidates(trainer))
