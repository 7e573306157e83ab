"""Lightning's private names: beside the update loop and what it is made of, no other file touches them.

Each function does one thing that Lightning has no public name for. `tests/callbacks/lib/test_lightning_internals.py`
holds a test for each, so that a release of Lightning that renames one fails there.
"""

import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

# Hooks

RUNNING_HOOK = "_current_fx_name"
"""The entry of a LightningModule's ``__dict__`` with the name of the running hook, which decides how `log` logs.

A name and no function: `callbacks.lib.hook_calls` writes it several times in each step.
"""


# The loops


def unused_loader_states(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """The states of the training loaders in a checkpoint, where Lightning does not load them: at an epoch's end."""
    loop: Any = trainer.fit_loop
    states: list[dict[str, Any]] = loop._combined_loader_states_to_load
    return states


def resume_max_steps_at_epoch_end(trainer: pl.Trainer) -> None:
    """Resumes a run with `max_steps` from an epoch's end as one with `max_epochs`.

    Lightning takes that place for the middle of the epoch and repeats the epoch's last hook.
    """
    loop: Any = trainer.fit_loop
    loop._iteration_based_training = lambda: False


def restore_modes(trainer: pl.Trainer) -> None:
    """Puts the module back into training mode where a validation was interrupted, as the validation's end does."""
    if trainer.validating and trainer.state.fn == "fit":
        trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)


def validation_scores(trainer: pl.Trainer) -> list[str]:
    """The names of what the last validation of a fit has logged; for `on_validation_end`."""
    results: Any = trainer.fit_loop.epoch_loop.val_loop._results
    # As in `callback_metrics`: with the number of the loader, where there are several.
    return sorted(
        {results._forked_name(metric, on_step=False)[1] for metric in results.values() if not metric.has_reset}
    )


def epoch_sums(trainer: pl.Trainer) -> dict[str, list[Tensor] | None]:
    """What ``log(on_epoch=True)`` has summed up in this epoch on this rank: its sum and weight, by key.

    None for an object of torchmetrics, which holds a state of its own.
    """
    return {
        key: [metric.value.clone().cpu(), getattr(metric, "cumulated_batch_size", metric.value).clone().cpu()]
        if metric.is_tensor
        else None
        for key, metric in _epoch_metrics(trainer)
    }


def _epoch_metrics(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The key and the state of each number that is logged for the epoch, and was in this one."""
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.meta.on_epoch and not metric.has_reset:
            yield key, metric


def means_of_epoch(trainer: pl.Trainer) -> dict[str, Tensor]:
    """What ``log(on_epoch=True)`` gives for the epoch so far; to be called on all ranks."""
    found = {}
    for _, metric in _epoch_metrics(trainer):
        if metric.is_tensor:
            found[str(metric.meta.forked_name(on_step=False))] = metric.compute()
            metric._computed = None
    return found


def process_training_loader(trainer: pl.Trainer, loader: Any) -> Any:
    """A training loader as Lightning prepares it: with a `DistributedSampler` on several devices, say."""
    return _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader)


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """Whether Lightning shares the samples of a loader out to several devices."""
    connector: Any = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler)


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader which epoch begins."""
    _set_sampler_epoch(loader, epoch)


# Signals, strategies and loggers


def keep_signal_handlers(trainer: pl.Trainer) -> Callable[[], None]:
    """Keeps Lightning from installing signal handlers; returns how to undo it."""
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = lambda: None
    return lambda: vars(connector).pop("register_signal_handlers", None)


def collective_timeout(strategy: Strategy) -> timedelta | None:
    """How long a rank waits for the others in a collective call; None where the strategy has no such setting."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return timeout


def set_collective_timeout(strategy: Strategy, timeout: timedelta) -> None:
    """Sets it before the processes connect. Lightning takes it only in the constructor of each strategy."""
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout


def set_writer(logger: TensorBoardLogger | CSVLogger, writer: Any) -> None:
    """Replaces what the logger's `experiment` returns; with None it makes a new one."""
    logger._experiment = writer


# Checkpoints


def raised_by_restoring(error: BaseException) -> bool:
    """Whether an exception was raised while a checkpoint was restored, by Lightning or by what it has called."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == checkpoint_connector.__name__ for frame, _ in frames)


def saves_within_epochs(checkpoint: ModelCheckpoint) -> bool:
    """Whether it saves after a number of updates or at an interval of time."""
    return checkpoint._every_n_train_steps >= 1 or checkpoint._train_time_interval is not None


def saves_after_validation(checkpoint: ModelCheckpoint) -> bool:
    """Whether a save of its best waits for the next validation."""
    return bool(checkpoint._defer_save_until_validation)


def save_after_validation(checkpoint: ModelCheckpoint, waits: bool = True) -> None:
    """Makes a save of its best wait for the next validation, or not."""
    checkpoint._defer_save_until_validation = waits


def save_last(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Saves its ``last.ckpt`` now."""
    checkpoint._save_last_checkpoint(trainer, checkpoint._monitor_candidates(trainer))


def save_untrained(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Saves before the first update, which Lightning takes for saved."""
    checkpoint._save_topk_checkpoint(trainer, checkpoint._monitor_candidates(trainer))


def save_now_unless_saved(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Saves as at the end of its interval, unless it has saved after this update or must not save at all."""
    if not checkpoint._should_skip_saving_checkpoint(trainer):
        checkpoint._save_topk_checkpoint(trainer, checkpoint._monitor_candidates(trainer))
