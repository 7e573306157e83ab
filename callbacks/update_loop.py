"""A training loop whose step is an update.

Lightning's loop steps from micro-batch to micro-batch. A step of this loop is an optimizer step: a list of numbered
micro-batches, of which each rank computes a range. So everything that Lightning counts, `batch_idx`, limits, intervals,
checkpoints and stops, is counted in updates, on any number of devices.
"""

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from callbacks.lib.hook_calls import HookCalls
from callbacks.lib.hooks import callbacks_of
from callbacks.lib.loaded_updates import LoadedUpdates
from callbacks.lib.training_loaders import check_interval, number_micro_batches
from callbacks.lib.update_results import UpdateResults
from callbacks.lib.update_step import UpdateStep
from callbacks.lib.updates import resumable_loaders
from datamodules.errors import UserError


class UpdateLoop(_TrainingEpochLoop):
    """Lightning's epoch loop, whose step is an update.

    The gradient of an update is the mean over all its targets; with `GradientAccumulation` it has the same bits on any
    number of ranks. `install_update_loop` puts the loop into a Trainer.

    Hooks are called in Lightning's order and once in an update, but for `on_before_backward`, which is called for each
    micro-batch. `on_after_backward` finds the gradient of the update. `on_train_batch_start` and `on_train_batch_end`
    get the batch of an update that is one micro-batch, and an `Update` where it is several. Callbacks may have
    ``on_update_end(trainer, pl_module)``, which is called after an update, its validation and its schedules: from there
    a checkpoint resumes with the next update.
    """

    def __init__(self, stock: _TrainingEpochLoop) -> None:
        super().__init__(stock.trainer, stock.min_steps, stock.max_steps)
        # Counters, results, and the validation loop, which `fit` has given its loaders already.
        vars(self).update(vars(stock))
        self.results = UpdateResults()
        self._results = self.results
        self.calls = HookCalls(self.trainer)
        self.step = UpdateStep(self.trainer, self.calls)
        self.source: Any = self.trainer.fit_loop._data_source
        self.prepare_loaders: Callable[[Any], Any] | None = None
        """What `GradientAccumulation` makes of the training loaders."""
        self.watches_sigterm = True
        """Whether Lightning asks all ranks in each update whether it has received SIGTERM."""
        self.loaded = LoadedUpdates(self.trainer)
        self._stop_requested = False
        self._plateaus_stepped = False
        self._validates = False
        self._validates_every = 1
        self._has_schedules = False
        self._has_plateaus = False
        self._updates_in_epoch: int | float = 0

    # The loaders

    def training_loaders(self) -> Any:
        """The training loaders, before Lightning asks for their length."""
        trainer: Any = self.trainer
        loaders = number_micro_batches(type(self.source).dataloader(self.source), trainer, self.step.seeds)
        for loader in resumable_loaders(loaders):
            loader.keeps_order = trainer.overfit_batches > 0
        if self.prepare_loaders is not None:
            loaders = self.prepare_loaders(loaders)
        check_interval(loaders, trainer)
        return loaders

    # The epoch

    @override
    def reset(self) -> None:
        is_restarting = self.restarting
        if is_restarting:
            self.val_loop._has_run = False  # In an earlier fit: the run may go on with a validation.
        super().reset()
        if is_restarting:
            # A checkpoint may have been written before or after Lightning counts the update in this number.
            progress: Any = self.batch_progress.total
            self._batches_that_stepped = progress.processed - self.val_loop.restarted_mid_evaluation
        # Asked to stop as an epoch starts, Lightning counts that epoch as done. Here it stops after the first update.
        self.drop_early_stop()
        self._stop_requested = self._stop_requested or self.trainer.should_stop
        self.trainer.should_stop = False
        self._plateaus_stepped = False

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        self.loaded.look_at(self.trainer.train_dataloader)
        if self.step.seeds is not None:
            # Here the loader's iterator is made, and drawn from. The module's hook before may have drawn, too.
            self.step.seeds.seed_iterator(self.trainer)
        if self.restarting:
            self.loaded.resume(data_fetcher, self.batch_progress)
        else:
            self.loaded.begin_anew(data_fetcher)
        super().on_run_start(data_fetcher)
        self.calls.begin_epoch()
        self.step.skips_backward = self.automatic_optimization._skip_backward
        configs = self.trainer.lr_scheduler_configs
        self._has_schedules = bool(configs)
        self._has_plateaus = any(config.reduce_on_plateau for config in configs)
        self._updates_in_epoch = self.trainer.num_training_batches
        self._validates = self._should_check_val_epoch()
        interval: Any = self.trainer.val_check_batch
        # Lightning counts updates of the run, or looks at the clock, where it is no number of updates of an epoch.
        is_within_epoch = type(interval) is int and self.trainer.check_val_every_n_epoch is not None
        self._validates_every = interval if is_within_epoch else 1

    @override
    def advance(self, data_fetcher: Any) -> None:
        trainer: Any = self.trainer
        progress = self.batch_progress
        if self.restarting and self._goes_on_with_validation(data_fetcher):
            return
        if self.val_loop.restarting:
            self.val_loop.restarting = False
        if self.calls.world_size > 1 and self.watches_sigterm:
            self._broadcast_sigterm_tensor()
        batch_idx = self.batch_idx + 1
        number = self.loaded.first_number(batch_idx)
        # A loader without numbers draws the order of the epoch with its first batch.
        if self.step.seeds is not None and (batch_idx > 0 or self.loaded.division is not None):
            self.step.seed_loading(number)
        self.loaded.keep_position(data_fetcher)
        item, _, _ = next(data_fetcher)
        progress.is_last_batch = data_fetcher.done
        update = self.loaded.as_update(item, batch_idx, number, self.calls.world_size)
        first = self.calls.to_device(update.batches[0])
        shown = first if len(update) == 1 else update
        progress.increment_ready()
        connector = trainer._logger_connector
        results = self.results
        connector.on_batch_start(first)
        outputs: Any = None
        stops = False
        if all(batch is None for batch in update.batches):
            warnings.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...", stacklevel=2)
        else:
            stops = self.calls.hook("on_train_batch_start", shown, batch_idx) == -1
            self.calls.strategy_hook("on_train_batch_start", shown, batch_idx)
            if stops:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                outputs = self.calls.profile("run_training_batch", self.step.make, update, first, batch_idx)
        progress.increment_processed()
        if self._has_schedules:
            if self.calls.module.automatic_optimization:
                self.calls.scheduler_steps(batch_idx + 1, self.scheduler_progress)
            if self.epoch_is_over:
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if stops:
            raise StopIteration
        self.calls.hook("on_train_batch_end", outputs, shown, batch_idx)
        if results:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    def _goes_on_with_validation(self, data_fetcher: Any) -> bool:
        """Whether the restarted run was interrupted in a validation, which is to be made first."""
        is_due = self._should_check_val_fx(data_fetcher)
        if is_due and self.val_loop.restarted_mid_evaluation:
            return True
        if self.training_is_over:
            raise StopIteration  # Saved after the last update of an epoch: only the epoch's end is left.
        if is_due and not self.restarted_on_last:
            self.val_loop.increment_progress_to_evaluation_end()
        return False

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch's last update was made, or is being made."""
        progress = self.batch_progress
        return progress.is_last_batch or progress.current.ready == self.trainer.num_training_batches

    @property
    def training_is_over(self) -> bool:
        """Whether the epoch is over, or `max_steps` is reached."""
        return self.epoch_is_over or 0 <= self.max_steps <= self.global_step

    @property
    @override
    def global_step(self) -> int:
        # Callbacks ask for it several times in an update: the counter of a module that optimizes automatically.
        if self.calls.is_lean:
            return self.automatic_optimization.optim_progress.optimizer.step.total.completed
        return super().global_step

    @property
    @override
    def done(self) -> bool:
        # What is asked before each update, without Lightning's way to the number of steps.
        if self.max_steps == -1 and not self.restarting and not self.trainer.should_stop:
            progress = self.batch_progress
            return progress.is_last_batch or progress.current.ready == self._updates_in_epoch
        return super().done

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        trainer: Any = self.trainer
        trainer.should_stop = trainer.should_stop or self._stop_requested
        self._stop_requested = False
        progress = self.batch_progress
        may_validate = progress.is_last_batch or trainer.should_stop or self.restarting
        may_validate = may_validate or progress.current.ready % self._validates_every == 0
        if self._validates and may_validate and self._should_check_val_fx(data_fetcher):
            super().on_advance_end(data_fetcher)
        else:
            if self._has_plateaus:
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._batches_that_stepped += 1
            if trainer.should_stop:
                for logger in trainer.loggers:
                    logger.save()
            if self.watches_sigterm and trainer.received_sigterm and not self.training_is_over:
                raise SIGTERMException
        if trainer.should_stop and not self.batch_progress.is_last_batch:
            self.drop_early_stop()
        self.calls.end_update()

    def drop_early_stop(self) -> None:
        """Take back a request to stop that comes before ``min_epochs`` and ``min_steps`` are reached.

        Lightning keeps it, but in no checkpoint; who has asked may ask again.
        """
        self.trainer.should_stop = self.trainer.should_stop and self.trainer.fit_loop._can_stop_early

    @override
    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        trainer: Any = self.trainer
        if self.restarting and self.val_loop.restarted_mid_evaluation:
            return self._should_check_val_epoch()
        if trainer._val_check_time_interval is None:
            return super()._should_check_val_fx(data_fetcher)
        if not self._should_check_val_epoch():
            return False
        is_over = time.monotonic() - trainer._last_val_time >= trainer._val_check_time_interval
        # The ranks' clocks differ: that of rank 0 decides.
        is_due: bool = trainer.strategy.broadcast(is_over)
        return is_due or (trainer.should_stop and trainer.fit_loop._can_stop_early)

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "epoch" and update_plateau_schedulers:
            if self._plateaus_stepped:
                return
            self._plateaus_stepped = True
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    def step_plateaus_of_epoch(self) -> None:
        """Make the steps of ReduceLROnPlateau at an epoch's end now, before a checkpoint is saved; Lightning's follow.

        Nor does Lightning make those of the epoch in which a run resumes.
        """
        if self.epoch_is_over:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    @override
    def teardown(self) -> None:
        super().teardown()
        for loader in resumable_loaders(self.trainer.train_dataloader):
            loader.keeps_order = False
        self.results.reset()
        self.step.release()
        self.calls.is_lean = False
        self._stop_requested = False
        self.loaded.look_at(None)


def install_update_loop(trainer: pl.Trainer) -> UpdateLoop:
    """Make a Trainer's steps updates; call it in `setup` of a callback.

    Raises:
        UserError: the Trainer accumulates micro-batches itself, or `training_step` takes `dataloader_iter`.
    """
    module = trainer.lightning_module
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        # Lightning's hooks then get the number of another batch (#18619).
        raise UserError(
            f"{type(module).__name__}.training_step takes a dataloader_iter, and callbacks that count updates have to"
            " know which batch it reads: write training_step(self, batch, batch_idx), or remove GradientAccumulation,"
            " SeedControl, ExactCheckpoint, Preemption or SyncBN"
        )
    loop: Any = trainer.fit_loop.epoch_loop
    if isinstance(loop, UpdateLoop):
        return loop
    if trainer.accumulate_grad_batches != 1:
        steps = trainer.accumulate_grad_batches
        raise UserError(
            f"Trainer(accumulate_grad_batches={steps}) counts micro-batches, and the callbacks of this library count"
            f" updates: pass callbacks=[GradientAccumulation({steps})] in its place"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
        raise UserError(
            "GradientAccumulationScheduler changes how many updates an epoch has: pass GradientAccumulation, which"
            " accumulates by one number"
        )
    own = UpdateLoop(loop)
    untyped: Any = trainer
    untyped.fit_loop.epoch_loop = own
    own.source.dataloader = own.training_loaders
    return own
