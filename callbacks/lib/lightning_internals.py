"""Access to Lightning's private names. Only the update loop and its parts use such names outside of this file.

Each function does one thing for which Lightning has no public name. `tests/callbacks/lib/test_lightning_internals.py`
tests each of them, so a release of Lightning that renames one fails there. The base of our callbacks is here too, which
rejects a Trainer of the other package of Lightning.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor
from typing_extensions import override

from datamodules.lightning import (
    CombinedLoader,
    CSVLogger,
    ModelCheckpoint,
    RunningStage,
    Strategy,
    TensorBoardLogger,
    TrainerFn,
    _process_dataloader,
    _resolve_overfit_batches,
    _set_sampler_epoch,
    checkpoint_connector,
    pl,
)
from datamodules.lightning_package import check_package, package_of


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks in the order of their calls."""
    untyped: Any = trainer
    callbacks: list[pl.Callback] = untyped.callbacks
    return callbacks


def set_callbacks(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Replace all callbacks; not while the Trainer runs."""
    untyped: Any = trainer
    untyped.callbacks = callbacks


def converts_batchnorm(trainer: pl.Trainer) -> bool:
    """Return whether the Trainer was built with ``sync_batchnorm=True`` for several devices."""
    # The attribute of strategies of several devices; on one device Lightning converts nothing.
    return getattr(trainer.strategy, "_layer_sync", None) is not None


def surround_callbacks(trainer: pl.Trainer, first: pl.Callback, last: pl.Callback) -> Callable[[], None]:
    """Put one callback before all others and one after them; return a function to undo it."""
    original = callbacks_of(trainer)
    set_callbacks(trainer, [first, *(callback for callback in original if callback is not last), last])

    def undo() -> None:
        # Other callbacks may have come and gone since.
        current = callbacks_of(trainer)
        added = [callback for callback in current if callback not in (*original, first)]
        set_callbacks(trainer, [*(callback for callback in original if callback in current), *added])

    return undo


def is_idle(owner: Any, name: str, stock: type) -> bool:
    """Whether a hook is inherited from Lightning's base class, which does nothing."""
    # Not Lightning's `is_overridden`: it takes a hook wrapped on the instance by `functools.wraps` for not overridden.
    cls: Any = type(owner)
    is_plain = isinstance(owner, stock) and cls.__getattribute__ is object.__getattribute__
    return is_plain and getattr(cls, name, None) is getattr(stock, name) and name not in vars(owner)


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the Trainer that runs a module; None without one and under Fabric."""
    try:
        return None if module.fabric is not None else module.trainer
    except RuntimeError:
        return None


def is_training(trainer: pl.Trainer) -> bool:
    """Return ``trainer.training`` in a tenth of its time, since that compares texts."""
    return trainer.state.stage is RunningStage.TRAINING


def log_interval(trainer: pl.Trainer) -> int:
    """Return ``log_every_n_steps``; 0 if nothing is logged."""
    untyped: Any = trainer
    return int(untyped.log_every_n_steps)


def log_after_update(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Log numbers and the epoch to every logger, at the step of the update that was just made."""
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)


# Hooks

RUNNING_HOOK = "_current_fx_name"
"""Key in a LightningModule's ``__dict__`` of the name of the running hook, which decides how `log` logs.

A key and not a function, since `callbacks.lib.hook_calls` writes the entry several times in each step.
"""


# The loops


def unused_loader_states(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the loader states of a checkpoint saved at an epoch's end, which Lightning does not load."""
    loop: Any = trainer.fit_loop
    states: list[dict[str, Any]] = loop._combined_loader_states_to_load
    return states


def resume_max_steps_at_epoch_end(trainer: pl.Trainer) -> None:
    """Resume a run with `max_steps` from an epoch's end like one with `max_epochs`.

    Lightning would take that point for the middle of the epoch and repeat `on_train_epoch_end`.
    """
    loop: Any = trainer.fit_loop
    loop._iteration_based_training = lambda: False


def restore_modes(trainer: pl.Trainer) -> None:
    """Restore the module's training mode after an interrupted validation, as the validation's end does."""
    if trainer.validating and trainer.state.fn == "fit":
        trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)


def validation_scores(trainer: pl.Trainer) -> list[str]:
    """Return the names of the metrics that the last validation of a fit has logged; for `on_validation_end`."""
    results: Any = trainer.fit_loop.epoch_loop.val_loop._results
    # The names of `callback_metrics`: with several loaders they have the number of the loader as suffix.
    return sorted(
        {results._forked_name(metric, on_step=False)[1] for metric in results.values() if not metric.has_reset}
    )


def epoch_sums(trainer: pl.Trainer) -> dict[str, list[Tensor] | None]:
    """Return sum and weight of each ``log(on_epoch=True)`` of this epoch on this rank, by key.

    None for a torchmetrics object, which has its own state.
    """
    sums: dict[str, list[Tensor] | None] = {}
    for key, metric in _epoch_metrics(trainer):
        if metric.is_tensor:
            weight = getattr(metric, "cumulated_batch_size", metric.value)
            sums[key] = [metric.value.clone().cpu(), weight.clone().cpu()]
        else:
            sums[key] = None
    return sums


def torchmetrics_of_epoch(trainer: pl.Trainer) -> set[str]:
    """Return the names of the torchmetrics objects that were logged with ``on_epoch=True`` in this epoch."""
    return {key.partition(".")[2] for key, metric in _epoch_metrics(trainer) if not metric.is_tensor}


def _epoch_metrics(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """Yield key and state of each metric that was logged with ``on_epoch=True`` in this epoch."""
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.meta.on_epoch and not metric.has_reset:
            yield key, metric


def means_of_epoch(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the values of ``log(on_epoch=True)`` for the epoch that is over; a collective call."""
    results: Any = trainer.fit_loop.epoch_loop._results
    results.share()
    means = {}
    for _, metric in _epoch_metrics(trainer):
        if metric.is_tensor:
            means[str(metric.meta.forked_name(on_step=False))] = results._get_cache(metric, on_step=False)
    return means


def process_training_loader(trainer: pl.Trainer, loader: Any) -> Any:
    """Prepare a training loader as Lightning does, for example with a `DistributedSampler` on several devices."""
    return _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader)


def turn_off_shuffling(loaders: CombinedLoader) -> None:
    """Replace loaders that shuffle by loaders that do not, as Lightning does for ``overfit_batches``."""
    _resolve_overfit_batches(loaders, RunningStage.TRAINING)


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """Whether Lightning distributes the samples of a loader over several devices."""
    connector: Any = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler)


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's samplers."""
    _set_sampler_epoch(loader, epoch)


# Signals, strategies and loggers


def keep_signal_handlers(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep Lightning from installing signal handlers; return a function to undo it."""
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = lambda: None  # On the instance, so that undoing it is a deletion.
    return lambda: vars(connector).pop("register_signal_handlers", None)


def collective_timeout(strategy: Strategy) -> timedelta | None:
    """Return how long a rank waits for the others in a collective call; None if the strategy has no such setting."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return timeout


def set_collective_timeout(strategy: Strategy, timeout: timedelta) -> None:
    """Set the timeout before the processes connect; Lightning takes it only in the constructor of each strategy."""
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout


def set_writer(logger: TensorBoardLogger | CSVLogger, writer: Any) -> None:
    """Replace the writer that the logger's `experiment` returns; after None it makes a new one."""
    logger._experiment = writer


# Checkpoints


def raised_by_restoring(error: BaseException) -> bool:
    """Whether an exception was raised while Lightning restored a checkpoint, by it or by code that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    connector = [each for each in frames if each.f_globals.get("__name__") == checkpoint_connector.__name__]
    # The connector saves checkpoints as well.
    return any("restore" in frame.f_code.co_name or "resume" in frame.f_code.co_name for frame in connector)


def saves_within_epochs(checkpoint: ModelCheckpoint) -> bool:
    """Whether a checkpoint callback saves after a number of updates or at an interval of time."""
    return checkpoint._every_n_train_steps >= 1 or checkpoint._train_time_interval is not None


def saves_by_time(checkpoint: ModelCheckpoint) -> bool:
    """Whether a checkpoint callback saves at an interval of time."""
    return checkpoint._train_time_interval is not None


def is_due_by_updates(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether a checkpoint callback that saves after a number of updates is to save after this one."""
    every = checkpoint._every_n_train_steps
    return every >= 1 and trainer.global_step % every == 0


def saves_at_epoch_end(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether a checkpoint callback saves at the end of an epoch, and not after validations."""
    return checkpoint._should_save_on_train_epoch_end(trainer)


def is_saved(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether a checkpoint callback has saved the present update."""
    return checkpoint._last_global_step_saved == trainer.global_step


def saves_after_validation(checkpoint: ModelCheckpoint) -> bool:
    """Whether a save by score waits for the next validation."""
    return bool(checkpoint._defer_save_until_validation)


def save_after_validation(checkpoint: ModelCheckpoint, waits: bool = True) -> None:
    """Let a save by score wait for the next validation, or not."""
    checkpoint._defer_save_until_validation = waits


def save_last(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Save ``last.ckpt`` now."""
    checkpoint._save_last_checkpoint(trainer, checkpoint._monitor_candidates(trainer))


def save_newest(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Save the whole state as ``last.ckpt`` now, whatever the callback keeps; its own saves do not count this one."""
    keeps_last = checkpoint.save_last
    saves_weights_only = checkpoint.save_weights_only
    saved_step = checkpoint._last_global_step_saved
    checkpoint.save_last = True
    checkpoint.save_weights_only = False
    try:
        save_last(checkpoint, trainer)
    finally:
        checkpoint.save_last = keeps_last
        checkpoint.save_weights_only = saves_weights_only
        checkpoint._last_global_step_saved = saved_step


def save_now_unless_saved(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Save as at the end of the interval, unless the update is saved already or the callback must not save."""
    if not checkpoint._should_skip_saving_checkpoint(trainer):
        candidates = checkpoint._monitor_candidates(trainer)
        checkpoint._save_topk_checkpoint(trainer, candidates)
        checkpoint._save_last_checkpoint(trainer, candidates)


class OneLightningCallback(pl.Callback):
    """Callback whose first hook ends a run in a Trainer of the other package, in one line."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_package(package_of(trainer), self)
        super().setup(trainer, pl_module, stage)
