"""Training loop for Lightning that makes one optimizer update per step.

A step of Lightning's own loop is a micro-batch. A step of this loop is an update: a list of numbered micro-batches, of
which each rank computes a range. So `batch_idx`, limits, intervals, checkpoints and stops are counted in updates, on
any number of devices.
"""

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from callbacks.lib.hook_calls import StockCalls, epoch_calls
from callbacks.lib.lightning_internals import callbacks_of
from callbacks.lib.loaded_updates import LoadedUpdates, check_interval, numbered_loaders, wrap_training_loaders
from callbacks.lib.optimizers import UpdateSchedule
from callbacks.lib.ranks import check_decision
from callbacks.lib.results import SharedEvaluationLoop, UpdateResults, share_evaluations
from callbacks.lib.threads import RunThreads
from callbacks.lib.update_step import NO_CONTEXT, UpdateStep, uneven_micro_batch
from datamodules.errors import UserError
from datamodules.lightning import GradientAccumulationScheduler, SIGTERMException, _TrainingEpochLoop, pl
from datamodules.loading.updates import Update


class UpdateLoop(_TrainingEpochLoop):
    """Epoch loop of Lightning whose step is an update.

    The gradient of an update is the mean over all its targets; with `GradientAccumulation` it has the same bits on any
    number of ranks. `install_update_loop` puts the loop into a Trainer.

    Hooks are called in Lightning's order. `on_train_batch_start` and `on_before_backward` are called for each
    micro-batch. The hooks from `on_after_backward` to `on_train_batch_end` are called once per update, when its
    gradients are summed. `on_train_batch_end` gets this rank's last micro-batch. Callbacks may define
    ``on_update_end(trainer, pl_module)``. The loop calls it after an update, its validation and its schedules; a
    checkpoint saved there resumes with the next update.
    """

    def __init__(self, stock: _TrainingEpochLoop) -> None:
        super().__init__(stock.trainer, stock.min_steps, stock.max_steps)
        # `fit` gives the validation loop its loaders before it calls `setup` of callbacks, which install this loop. So
        # the attributes of the replaced loop are taken over: counters, results and validation loop.
        vars(self).update(vars(stock))
        self.results = UpdateResults(stock.trainer)
        self._results = self.results
        self.val_loop = SharedEvaluationLoop(stock.val_loop)
        self.calls = StockCalls(self.trainer)
        """The caller of the hooks of the running epoch."""
        self.step = UpdateStep(self.trainer, self)
        self.threads = RunThreads(self.trainer)
        self.source: Any = self.trainer.fit_loop._data_source
        self.prepare_loaders: Callable[[Any], Any] | None = None
        """Function by which `GradientAccumulation` turns the training loaders into loaders of updates."""
        self.watches_sigterm = True
        """Whether Lightning broadcasts a received SIGTERM to all ranks in each update."""
        self.loaded = LoadedUpdates(self.trainer)
        self._is_automatic = False
        self._stop_requested = False
        self._plateaus_stepped = False
        self._validates = False
        self._validates_every = 1
        self._has_schedules = False
        self._schedules: list[UpdateSchedule] = []
        self._has_plateaus = False
        self._updates_in_epoch: int | float = 0

    # The loaders

    def training_loaders(self) -> Any:
        """Return the training loaders as loaders of updates, before Lightning asks for their length."""
        trainer: Any = self.trainer
        # Called on the class: on the instance, `dataloader` is this method.
        loaders = wrap_training_loaders(type(self.source).dataloader(self.source), trainer, self.step.seeds)
        if self.prepare_loaders is not None:
            loaders = self.prepare_loaders(loaders)
        check_interval(loaders, trainer)
        return loaders

    # The epoch

    @override
    def reset(self) -> None:
        is_restarting = self.restarting
        if is_restarting:
            # True after an earlier fit of this Trainer; the resumed run may begin with a validation.
            self.val_loop._has_run = False
        super().reset()
        if is_restarting:
            # Some checkpoints are saved before Lightning adds the last update to this counter, others after.
            progress: Any = self.batch_progress.total
            self._batches_that_stepped = progress.processed - self.val_loop.restarted_mid_evaluation
        # If a stop is requested as an epoch starts, Lightning counts that epoch as done without training it. The
        # request is kept aside, and the run stops after the first update.
        self.drop_early_stop()
        self._stop_requested = self._stop_requested or self.trainer.should_stop
        self.trainer.should_stop = False
        self._plateaus_stepped = False

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        self.loaded.inspect_loaders(self.trainer.train_dataloader)
        self.loaded.set_epoch(self.trainer.current_epoch)
        self.threads.report()
        if self.step.seeds is not None:
            # Below, the loader's iterator is made, which may draw the order of the epoch. Without seeding, that order
            # would depend on the numbers that the module's `on_train_epoch_start` has drawn.
            self.step.seeds.seed_iterator(self.trainer)
        if self.restarting:
            self.loaded.resume(data_fetcher, self.batch_progress)
        else:
            self.loaded.restart_iterators(data_fetcher)
        super().on_run_start(data_fetcher)
        self.calls = self.step.calls = epoch_calls(self.trainer)
        self._is_automatic = self.calls.is_automatic
        self.results.begin_epoch()
        self.step.skips_backward = self.automatic_optimization._skip_backward
        configs = self.trainer.lr_scheduler_configs
        self._has_schedules = bool(configs)
        self._begin_schedules()
        self._has_plateaus = any(config.reduce_on_plateau for config in configs)
        self._updates_in_epoch = self.trainer.num_training_batches
        self._validates = self._should_check_val_epoch()
        interval: Any = self.trainer.val_check_batch
        # Otherwise the interval is a time, or counts the updates of the whole run: then each update asks Lightning.
        is_within_epoch = type(interval) is int and self.trainer.check_val_every_n_epoch is not None
        self._validates_every = interval if is_within_epoch else 1

    def _begin_schedules(self) -> None:
        """Pass the epoch to the schedules of its updates. A schedule that Lightning's Tuner has replaced sets none."""
        self._end_schedules()
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        self._schedules = [scheduler for scheduler in schedulers if isinstance(scheduler, UpdateSchedule)]
        for schedule in self._schedules:
            schedule.begin_epoch(self.trainer)

    def _end_schedules(self) -> None:
        for schedule in self._schedules:
            schedule.end_epoch()
        self._schedules = []

    @override
    def run(self, data_fetcher: Any) -> None:
        super().run(data_fetcher)
        self.results.share()

    @override
    def advance(self, data_fetcher: Any) -> None:
        trainer: Any = self.trainer
        progress = self.batch_progress
        if self.restarting and self._resumes_in_validation(data_fetcher):
            return
        # Read before it is written: the setter visits all attributes of the loop, in each step.
        if self.val_loop.restarting:
            self.val_loop.restarting = False
        if self.calls.world_size > 1 and self.watches_sigterm:
            self._broadcast_sigterm_tensor()
        batch_idx = self.batch_idx + 1
        number = self.loaded.first_number(batch_idx)
        if self.step.seeds is None:
            self.step.watch_generators()
        # A loader without numbers draws the order of the epoch with its first batch: that keeps the epoch's seed.
        elif self.loaded.draws and (batch_idx > 0 or self.loaded.division is not None):
            self.step.seeds.seed_loading(trainer, number)
        self.loaded.keep_position(data_fetcher)
        item, _, _ = next(data_fetcher)
        progress.is_last_batch = data_fetcher.done
        update = self.loaded.as_update(item, number, self.calls.world_size)
        first_batch = self.step.begin(update)
        progress.increment_ready()
        connector = trainer._logger_connector
        results = self.results
        connector.on_batch_start(first_batch)
        results.batch_size = update.samples[0]  # By which `log` weights the mean of an epoch.
        outputs: Any = None
        stops = False
        if first_batch is None and all(batch is None for batch in update.batches):
            warnings.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...", stacklevel=2)
        else:
            with self._logs_of(update):
                # A collate function may return None for one micro-batch only.
                stops = first_batch is not None and self.calls.start_batch(first_batch, batch_idx)
            if stops:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                results.begin_update()
                outputs = self.calls.profile("run_training_batch", self.step.make, update, batch_idx)
                results.end_update()
        progress.increment_processed()
        if self._has_schedules:
            if self._is_automatic and not self.step.is_skipped:
                self.calls.step_schedulers(batch_idx + 1, self.scheduler_progress)
            if self.epoch_is_over:
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if stops:
            raise StopIteration
        with self._logs_of(update):
            self.calls.hook("on_train_batch_end", outputs, self.step.end(batch_idx), batch_idx)
        if results:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.increment_completed()
        if results:
            connector.update_train_step_metrics()

    def _logs_of(self, update: Update[Any]) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the hooks of an update; on a rank with a stand-in, what they log does not count."""
        if not update.is_dummy:
            return NO_CONTEXT
        return uneven_micro_batch(self.calls.module, self.results, (), is_dummy=True)

    def _resumes_in_validation(self, data_fetcher: Any) -> bool:
        """Whether the resumed run was interrupted in a validation, which comes before the next update."""
        is_due = self._should_check_val_fx(data_fetcher)
        if is_due and self.val_loop.restarted_mid_evaluation:
            return True
        if self.epoch_trains_no_more:
            raise StopIteration  # The checkpoint was saved after the epoch's last update: only the epoch's end is left.
        if is_due and not self.restarted_on_last:
            # The validation after the update of the checkpoint counts as done, as in Lightning's loop.
            self.val_loop.increment_progress_to_evaluation_end()
        return False

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch's last update is being made or was made."""
        progress = self.batch_progress
        return progress.is_last_batch or progress.current.ready == self.trainer.num_training_batches

    @property
    def max_steps_is_reached(self) -> bool:
        """Whether the run has made `max_steps` updates; never without a limit, which is -1."""
        return 0 <= self.max_steps <= self.global_step

    @property
    def epoch_trains_no_more(self) -> bool:
        """Whether the epoch is over or `max_steps` is reached."""
        return self.epoch_is_over or self.max_steps_is_reached

    @property
    def updates_made(self) -> int | None:
        """Number of updates so far in a running epoch of automatic optimization; else None, see `updates_made`."""
        return self.automatic_optimization.optim_progress.optimizer.step.total.completed if self._is_automatic else None

    @property
    @override
    def global_step(self) -> int:
        # Callbacks read this several times in an update. Under automatic optimization one counter holds the number.
        made = self.updates_made
        return super().global_step if made is None else made

    @property
    @override
    def done(self) -> bool:
        # Read before each update: the common case needs neither `global_step` nor the conditions of an early stop.
        if self.max_steps == -1 and not self.restarting and not self.trainer.should_stop:
            progress = self.batch_progress
            return progress.is_last_batch or progress.current.ready == self._updates_in_epoch
        return super().done

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        trainer: Any = self.trainer
        if self._stop_requested:
            trainer.should_stop = True
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
            if self.watches_sigterm and trainer.received_sigterm and not self.epoch_trains_no_more:
                raise SIGTERMException
        if trainer.should_stop and not self.batch_progress.is_last_batch:
            self.drop_early_stop()
        self.calls.end_update()

    def drop_early_stop(self) -> None:
        """Drop a request to stop that comes before ``min_epochs`` and ``min_steps`` are reached.

        Lightning would remember the request until then, but no checkpoint holds it, so a resumed run would train on
        (#19966). A callback such as `EarlyStopping` may request the stop again.
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
        # The clocks of the ranks differ, and a validation waits for all of them: the clock of rank 0 decides.
        is_due: bool = trainer.strategy.broadcast(is_over)
        return is_due or (trainer.should_stop and trainer.fit_loop._can_stop_early)

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "epoch" and update_plateau_schedulers:
            # `step_plateaus_of_epoch` may have stepped them for this epoch, before Lightning's own call.
            if self._plateaus_stepped:
                return
            self._plateaus_stepped = True
        if update_plateau_schedulers and self.trainer.world_size > 1:
            self._check_plateaus(interval)
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _check_plateaus(self, interval: str) -> None:
        """Check that all ranks step the due ReduceLROnPlateau schedulers by one value."""
        periods = 1 + (self.batch_idx if interval == "step" else self.trainer.current_epoch)
        for config in self.trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == interval and periods % config.frequency == 0:
                name: Any = config.monitor
                check_decision(name, self.trainer.callback_metrics.get(name), type(config.scheduler).__name__)

    def step_plateaus_of_epoch(self) -> None:
        """Step ReduceLROnPlateau at an epoch's end now, so that the checkpoint of the epoch holds the new rates.

        Lightning steps it after the save, and never in the epoch in which a run resumes.
        """
        if self.epoch_is_over:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), **self.threads.state()}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.threads.resume(state_dict)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.threads.end()
        self._end_schedules()
        for loader in numbered_loaders(self.trainer.train_dataloader):
            loader.keeps_order = False
            loader.divide_updates(None)
        self.results.reset()
        self.step.release()
        self._is_automatic = False
        self._stop_requested = False
        self.loaded.inspect_loaders(None)


def install_update_loop(trainer: pl.Trainer) -> UpdateLoop:
    """Replace the epoch loop of a Trainer with an `UpdateLoop`, and return it; call this in `setup` of a callback.

    Raises:
        UserError: the Trainer accumulates micro-batches itself, or `training_step` takes `dataloader_iter`.
    """
    module = trainer.lightning_module
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        # `batch_idx` of Lightning's hooks then lags by one (#18619), so an update would be counted as another.
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
    update_loop = UpdateLoop(loop)
    untyped: Any = trainer
    untyped.fit_loop.epoch_loop = update_loop
    update_loop.source.dataloader = update_loop.training_loaders
    share_evaluations(trainer)
    return update_loop
