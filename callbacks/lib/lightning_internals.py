"""Lightning's private names: beside `step_plan`, no other file touches them.

Each function does one thing that Lightning has no public name for. `tests/callbacks/lib/test_lightning_internals.py`
holds a test for each, so that a release of Lightning that renames one fails there.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

# Hooks

RUNNING_HOOK = "_current_fx_name"
"""The entry of a LightningModule's ``__dict__`` with the name of the running hook, which decides how `log` logs.

A name and no function: `callbacks.lib.step_plan` writes it several times in each step.
"""


# The loops


def training_is_done(trainer: pl.Trainer) -> bool:
    """Whether the epoch's last batch was trained or `max_steps` is reached."""
    return bool(trainer.fit_loop.epoch_loop._is_training_done)


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


def hold_to_updates(
    trainer: pl.Trainer, update_is_whole: Callable[[pl.Trainer], bool], validation_is_next: Callable[[pl.Trainer], bool]
) -> Callable[[], None]:
    """Makes a run validate and stop after complete updates only; returns how to undo it.

    Lightning stops at the next micro-batch, whoever has set `should_stop` and in whichever hook, and validates between
    two micro-batches of an update; asked to stop as an epoch starts, it counts that epoch as done. Here all wait for an
    update's last. A request to stop that cannot be followed then, since ``min_epochs`` or ``min_steps`` is not reached,
    is dropped: Lightning keeps it, but in no checkpoint.

    Args:
        trainer: one that trains now.
        update_is_whole: whether the micro-batch just trained was its update's last.
        validation_is_next: whether a validation is due after the update that is complete.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop.val_loop._has_run = False  # In an earlier fit: the run may go on with a validation that was interrupted.
    if "on_advance_end" in vars(loop):
        return lambda: None
    start_epoch, end_batch, requested = loop.reset, loop.on_advance_end, False

    def reset() -> None:
        nonlocal requested
        start_epoch()
        requested, trainer.should_stop = requested or trainer.should_stop, False

    def on_advance_end(data_fetcher: Any) -> None:
        nonlocal requested
        if trainer.should_stop or requested:
            trainer.should_stop = update_is_whole(trainer)
            requested = not trainer.should_stop
        end_batch(data_fetcher)
        if trainer.should_stop and not trainer.is_last_batch:
            drop_early_stop(trainer)

    def should_validate(data_fetcher: Any) -> bool:
        goes_on = loop.restarting and loop.val_loop.restarted_mid_evaluation
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        is_due = goes_on or (update_is_whole(trainer) and (stops or validation_is_next(trainer)))
        return is_due and loop._should_check_val_epoch()

    def undo() -> None:
        for name in ("reset", "on_advance_end", "_should_check_val_fx"):
            vars(loop).pop(name, None)

    loop.reset, loop.on_advance_end, loop._should_check_val_fx = reset, on_advance_end, should_validate
    return undo


def drop_early_stop(trainer: pl.Trainer) -> None:
    """Takes back a request to stop that comes before ``min_epochs`` and ``min_steps`` are reached."""
    trainer.should_stop = trainer.should_stop and trainer.fit_loop._can_stop_early


def restore_modes(trainer: pl.Trainer) -> None:
    """Puts the module back into training mode where a validation was interrupted, as the validation's end does."""
    if trainer.validating and trainer.state.fn == "fit":
        trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)


def validation_scores(trainer: pl.Trainer) -> list[str]:
    """The names of what the last validation of a fit has logged; for `on_validation_end`."""
    metrics: Any = trainer.fit_loop.epoch_loop.val_loop._results.valid_items()
    return sorted({str(metric.meta.forked_name(on_step=False)) for _, metric in metrics})


def validation_time_is_over(trainer: pl.Trainer) -> bool | None:
    """Whether the time given as ``val_check_interval`` has passed since the last validation; None where none is."""
    untyped: Any = trainer
    seconds: float | None = untyped._val_check_time_interval
    return None if seconds is None else bool(time.monotonic() - untyped._last_val_time >= seconds)


class PlateauSteps:
    """Makes the steps of ReduceLROnPlateau before a checkpoint is saved, which Lightning makes after it.

    Nor does Lightning make those of the epoch in which a run resumes. A step that was made here is not made again.

    Args:
        trainer: one that trains now.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        loop: Any = trainer.fit_loop.epoch_loop
        self._loop, self._update = loop, loop.update_lr_schedulers
        self._made_at: dict[str, int] = {}
        loop.update_lr_schedulers = self._update_unless_made

    def make(self, interval: Literal["step", "epoch"]) -> None:
        """Make the steps that are due after this batch, or at the epoch's end if its last batch was trained.

        A value that is not known in mid-epoch may come from the module's own hook, which follows: left to Lightning.
        """
        configs = [c for c in self._trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == interval]
        if interval == "step":
            known = self._trainer.callback_metrics if configs else {}
            ready = all(config.monitor in known for config in configs)
        else:
            ready = self._loop._num_ready_batches_reached()
        if not configs or not ready:
            return
        self._update_unless_made(interval, update_plateau_schedulers=True)
        self._made_at[interval] = self._loop.total_batch_idx

    def _update_unless_made(self, interval: str, update_plateau_schedulers: bool) -> None:
        if not update_plateau_schedulers or self._made_at.get(interval) != self._loop.total_batch_idx:
            self._update(interval, update_plateau_schedulers=update_plateau_schedulers)

    def remove(self) -> None:
        """Leave the steps to Lightning again."""
        vars(self._loop).pop("update_lr_schedulers", None)


def epoch_sums(trainer: pl.Trainer) -> dict[str, list[Tensor] | None]:
    """What ``log(on_epoch=True)`` has summed up in this epoch on this rank: its sum and weight, by key.

    None for an object of torchmetrics, which holds a state of its own.
    """
    return {
        key: [metric.value.clone(), getattr(metric, "cumulated_batch_size", metric.value).clone()]
        if metric.is_tensor
        else None
        for key, metric in _epoch_metrics(trainer)
    }


def _epoch_metrics(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The key and the state of each number that is logged for the epoch, and was in this one."""
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.meta.on_epoch and not metric.has_reset:
            yield key, metric


def continue_epoch_sums(trainer: pl.Trainer, by_rank: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
    """Lets each sum of this epoch go on from those of a checkpoint; returns how to undo it.

    Args:
        by_rank: what `epoch_sums` gave on each rank; on another number of ranks, rank 0 takes over the sums of all.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    update, rank = results.update_metrics, trainer.global_rank
    same = len(by_rank) == trainer.world_size
    left, epoch = [dict(sums) for sums in (by_rank[rank : rank + 1] if same else by_rank)], trainer.current_epoch

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        if trainer.current_epoch != epoch:
            left.clear()
        metric, found = results[key], [part for sums in left if (part := sums.pop(key, None))]
        if found:
            device = metric.value.device
            values, weights = (torch.stack(part).to(device) for part in zip(*found, strict=True))
            if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
                metric.value = metric.meta.reduce_fx(values)
            elif same or rank == 0:
                metric.value = values.sum()
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = weights.sum()
        update(key, value, batch_size)

    results.update_metrics = update_metrics
    return lambda: vars(results).pop("update_metrics", None)


def means_of_trained_epoch(trainer: pl.Trainer) -> dict[str, Tensor]:
    """What ``log(on_epoch=True)`` gives for the epoch, once its last batch is trained; to be called on all ranks."""
    if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        return {}
    found = {}
    for _, metric in _epoch_metrics(trainer):
        if metric.is_tensor:
            found[str(metric.meta.forked_name(on_step=False))] = metric.compute()
            metric._computed = None
    return found


def uncount_update(loop_state: dict[str, Any]) -> None:
    """Takes the last update out of the count that `log` uses as its step.

    Args:
        loop_state: a checkpoint's entry for the fit loop; changed in place.
    """
    loop_state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether steps run without backward pass and update, as when `StochasticWeightAveraging` measures BatchNorm."""
    return bool(trainer.fit_loop._skip_backward)


def make_no_update(trainer: pl.Trainer) -> Callable[[], None]:
    """Keeps the loop from the update that it makes at the last batch of an epoch even where it skips backward passes.

    Returns:
        How to undo it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._should_accumulate = lambda: True

    def undo() -> None:
        del loop._should_accumulate

    return undo


def when_training_loader_is_made(trainer: pl.Trainer, prepare: Callable[[Any], None]) -> Callable[[], None]:
    """Calls `prepare` with each training loader before Lightning asks for its length; returns how to undo it."""
    source: Any = trainer.fit_loop._data_source
    make = source.dataloader

    def dataloader() -> Any:
        loader = make()
        prepare(loader)
        return loader

    source.dataloader = dataloader
    return lambda: vars(source).pop("dataloader", None)


def _setup_data(loop: Any) -> None:
    type(loop).setup_data(loop)
    if loop.restarting and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def load_states_into_made_loaders(trainer: pl.Trainer) -> None:
    """Has a resume load the states of training loaders that were made before its checkpoint was restored, too.

    They are where `configure_optimizers` asks for ``estimated_stepping_batches`` (Lightning #20550).
    """
    loop: Any = trainer.fit_loop
    loop.setup_data = partial(_setup_data, loop)


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


def iterate_anew(trainer: pl.Trainer) -> None:
    """Has the training loaders iterated over again in the epoch that begins, also where it is the first after a resume.

    Lightning takes the iterator of its set-up then, in the order of epoch 0.
    """
    trainer.fit_loop._resuming_from_checkpoint = False


# Signals, strategies and loggers


def keep_signal_handlers(trainer: pl.Trainer) -> Callable[[], None]:
    """Keeps Lightning from installing signal handlers; returns how to undo it.

    Nor does it ask in each batch whether its handler on rank 0 has seen SIGTERM: with several processes a broadcast,
    which each of them waits for, and the device for the host.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = loop._broadcast_sigterm_tensor = lambda: None

    def undo() -> None:
        del connector.register_signal_handlers, loop._broadcast_sigterm_tensor

    return undo


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
