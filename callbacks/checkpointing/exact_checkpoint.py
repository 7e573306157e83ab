"""Checkpoints saved only at points from which a run resumes exactly, as listed in `stopping_points`.

Lightning's `ModelCheckpoint` also saves at other points: within an accumulation window, before an epoch or a validation
is counted, and after ``max_steps`` has cut an epoch, which then counts as done. Its checkpoints lack the scores that
decisions depend on and the sums behind an epoch's means, and ReduceLROnPlateau steps after the save.
"""

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing import replay
from callbacks.checkpointing.stopping_points import (
    SAVE_POINTS,
    rewind_interrupted_epoch,
    save_point_after_update,
    trains,
)
from callbacks.lib import lightning_internals as internals
from callbacks.lib.first_update import unsaved_state
from callbacks.lib.lightning_internals import OneLightningCallback, callbacks_of, set_callbacks
from callbacks.lib.ranks import check_decision, gather
from callbacks.lib.results import share_evaluations
from callbacks.lib.updates import Duration, read_time
from callbacks.update_loop import install_update_loop
from datamodules.errors import UserError
from datamodules.lightning import DoublePrecision, ModelCheckpoint, pl
from datamodules.notes import warn

# Entries of a checkpoint.
_METRICS = "monitored_metrics"  # All scores, which callbacks and ReduceLROnPlateau read again later.
_SCORED = "scored"  # Number of the update before the last validation, and the names of that validation's scores.
_SUMS = "epoch_sums"  # The sums behind the means of the present epoch, by rank.


def save_best_first(trainer: pl.Trainer) -> None:
    """Move the `ExactCheckpoint` callbacks that monitor a score before those that do not.

    The checkpoints of the latter then hold the best score of the same update.
    """
    callbacks = callbacks_of(trainer)
    checkpoints = [callback for callback in callbacks if isinstance(callback, ExactCheckpoint)]
    with_monitor = [checkpoint for checkpoint in checkpoints if checkpoint.monitor is not None]
    without_monitor = [checkpoint for checkpoint in checkpoints if checkpoint.monitor is None]
    ordered = iter([*with_monitor, *without_monitor])
    reordered: list[pl.Callback] = []
    for callback in callbacks:
        reordered.append(next(ordered) if isinstance(callback, ExactCheckpoint) else callback)
    set_callbacks(trainer, reordered)


def save_interval(text: str) -> Duration | timedelta:
    """Read the interval between two saves, in updates, epochs or time.

    Raises:
        UserError: the text is not an interval.

    Example:
        >>> save_interval("500 steps"), str(save_interval("10 minutes"))
        (Duration(value=500.0, unit='steps'), '0:10:00')
    """
    message = f'{text!r} is no interval between two saves: write "500 steps", "2 epochs" or "10 minutes"'
    if not isinstance(text, str):
        raise UserError(message)
    time_between = read_time(text)
    if time_between is not None:
        if not time_between:
            raise UserError(message)
        return time_between
    try:
        duration = Duration.parse(text)
    except UserError as error:
        raise UserError(message) from error
    if duration.unit == "%" or duration.value != int(duration.value) or not duration.value:
        raise UserError(message)
    return duration


class ExactCheckpoint(OneLightningCallback, ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, saved only after complete updates and at the end of an epoch.

    With `last_every` it also keeps the newest checkpoint in ``last.ckpt``, whatever its score: saved at an interval of
    its own and when the run ends, or with the initial weights if there is nothing to train.

    Of equal scores the later one is the best. If the weights have changed since the last validation, a save by score
    waits for the next validation; the last checkpoint does not wait.

    A run resumes within an epoch with a training loader that has ``state_dict`` and ``load_state_dict``, and with one
    `DataLoader` over a data set with a length and a sampler of torch. With any other it resumes at an epoch's end, so a
    save that is due within an epoch waits for its end: what cannot be resumed is not saved over what can. Weights alone
    (``save_weights_only=True``) do not wait, nor does the best by a score, except for its copy in ``last.ckpt``.

    A run validates and stops after complete updates. Stops before ``min_epochs`` or ``min_steps`` are
    ignored; `EarlyStopping` checks again later. ReduceLROnPlateau steps before the checkpoint is saved. A resumed run
    has the scores, and the sums behind the means of its epoch.

    Runs on: `on_update_end`, which comes after an update, its validation and its schedules, and `on_train_epoch_end`;
    `on_train_start` of a resumed run.

    Args:
        args: arguments of `ModelCheckpoint`, as are all others but one.
        last_every: "500 steps", "2 epochs" or "10 minutes" between two saves of ``last.ckpt``. All ranks follow rank
            0's clock.

    Raises:
        UserError: `last_every` is not an interval; `save_on_exception` is set, which saves within a batch; a state that
            decides the order, an optimizer's step or the run is in no checkpoint; or Lightning counts no step of a
            module that optimizes manually, and would save nothing.

    Example:
        >>> checkpoint = ExactCheckpoint("checkpoints", "best", monitor="val/loss", last_every="500 steps")
    """

    _best_model_path = ""
    _has_checked_states = False
    _has_validated = False
    _is_due = False
    """Whether a save within the epoch waits for the epoch's end."""
    _has_warned = False
    _resume_problem: tuple[int, str | None] = (-1, None)
    """An epoch, and why no run can resume within it."""
    _loaded: dict[str, Any] | None = None
    _resumed: dict[str, Any] | None = None
    _scored: tuple[int, list[str]] = (0, [])
    _last_waits = False
    """Whether a save of ``last.ckpt`` within the epoch waits for the epoch's end."""
    _last_step = 0
    """Number of updates in ``last.ckpt``."""
    _last_clock = 0.0

    def __init__(self, *args: Any, last_every: str | None = None, **kwargs: Any) -> None:
        self._last_every: Duration | timedelta | None = None
        if last_every is not None:
            self._last_every = save_interval(last_every)
            kwargs.setdefault("enable_version_counter", False)  # The newest is ``last.ckpt`` also in a second run.
        super().__init__(*args, **kwargs)

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint: the last one of equal scores, where Lightning takes the first."""
        path = self._best_model_path
        if path not in self.best_k_models:
            return path
        best_score = self.best_k_models[path]
        return [candidate for candidate, score in self.best_k_models.items() if score == best_score][-1]

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_model_path = path

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.save_on_exception:
            raise UserError(
                f"save_on_exception=True saves {SAVE_POINTS['within batch'].reason}, from where nothing resumes"
                " exactly:"
                " pass save_on_exception=False, and add Preemption(), which saves after the update in which Ctrl-C came"
            )
        if stage == "fit":
            install_update_loop(trainer)
            # A test or validation between two fits may have loaded another state.
            self._has_checked_states = False
            self._has_validated = self._is_due = self._has_warned = self._last_waits = False
            self._last_step = 0
            self._resume_problem = (-1, None)
            self._loaded = self._resumed = None
            save_best_first(trainer)
            if isinstance(trainer.precision_plugin, DoublePrecision):
                # Lightning converts the module after it has loaded the weights, which float32 would have rounded.
                trainer.precision_plugin.convert_module(pl_module)
        else:
            share_evaluations(trainer)
        internals.resume_max_steps_at_epoch_end(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["devices"] = trainer.world_size
        rewind_interrupted_epoch(checkpoint["loops"]["fit_loop"])
        if trainer.interrupted or _SUMS in checkpoint:
            # After an exception the other ranks may be gone, and the sums need a collective call. With several
            # callbacks of this class the first one has added the entries.
            return
        means = internals.means_of_epoch(trainer) if install_update_loop(trainer).epoch_is_over else {}
        metrics = trainer.callback_metrics | means
        checkpoint[_METRICS] = {name: torch.as_tensor(value).detach().clone() for name, value in metrics.items()}
        checkpoint[_SCORED] = self._scored
        checkpoint[replay.ORDERS] = replay.order_states(trainer)
        checkpoint[replay.UNSAVED] = unsaved_state(pl_module)
        checkpoint[_SUMS] = gather(internals.epoch_sums(trainer))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if trainer.state.fn == "fit" and "stock_loaders" in checkpoint:
            raise UserError(
                "the checkpoint is of a version that counted micro-batches, and this one counts updates: start a new"
                " run from its weights"
            )
        self._scored = checkpoint.get(_SCORED, self._scored)
        # Kept here, since `load_state_dict` is not called if this run saves at another interval or by another score.
        self._resumed = checkpoint if trainer.state.fn == "fit" else None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_clock = time.monotonic()
        self.on_fit_start(trainer, pl_module)  # Again, since some strategies load the checkpoint after that hook.
        resumed = self._resumed
        self._resumed = None
        # With several callbacks of this class, the first one alone completes the resume.
        checkpoints = [callback for callback in callbacks_of(trainer) if isinstance(callback, ExactCheckpoint)]
        if resumed and checkpoints[0] is self:
            replay.replay_epoch(trainer, resumed)
            trainer.should_stop = trainer.should_stop or replay.was_stopped_early(trainer)
            install_update_loop(trainer).drop_early_stop()
            sums = resumed.get(_SUMS)
            if sums and trainer.fit_loop.restarted_mid_epoch:
                replay.reject_torchmetrics(trainer, sums)
                install_update_loop(trainer).results.resume_from(trainer, sums)
        metrics = (resumed or {}).get(_METRICS) or {}
        trainer.callback_metrics.update({n: value.to(trainer.strategy.root_device) for n, value in metrics.items()})

    # `on_update_end` saves, after the module's own hook, a validation and schedules.
    on_train_batch_end = pl.Callback.on_train_batch_end

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trains(trainer):
            self._scored = trainer.global_step, internals.validation_scores(trainer)
            self._has_validated = True

    def on_update_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, except after an epoch's last update, when `on_train_epoch_end` saves."""
        if not self._has_checked_states:
            self._has_checked_states = True
            for optimizer in trainer.optimizers:
                replay.reject_states(trainer, optimizer)
        saves_at_interval = internals.saves_within_epochs(self)
        last_is_due = self._last_is_due(trainer)
        if not (saves_at_interval or self._has_validated or last_is_due):
            return
        if trainer.is_last_batch or not SAVE_POINTS[save_point_after_update(trainer)].saves:
            return
        problem = None if self.save_weights_only else self._problem_of_epoch(trainer)
        if problem is not None:
            self._warn(trainer, problem, last_is_due)
            self._last_waits = self._last_waits or last_is_due
            if self.monitor is None:
                # A validation is left for the epoch's end by `_has_validated`, an interval of time by its clock.
                self._is_due = self._is_due or internals.is_due_by_updates(self, trainer)
                return
        keeps_last = self.save_last
        self.save_last = keeps_last if problem is None else None
        if saves_at_interval:
            self._save_at_interval(trainer)
        if self._has_validated:
            self._has_validated = False
            super().on_validation_end(trainer, pl_module)
        self.save_last = keeps_last
        if problem is not None:
            self._is_due = self._is_due or internals.is_saved(self, trainer)
        elif last_is_due:
            self._save_last(trainer)  # After the best, so that the file holds the path of that.

    def _last_is_due(self, trainer: pl.Trainer, *, epoch_ends: bool = False) -> bool:
        """Whether the interval of ``last.ckpt`` has ended."""
        every = self._last_every
        if isinstance(every, timedelta):
            now = time.monotonic()
            is_due: bool = trainer.strategy.broadcast(now - self._last_clock >= every.total_seconds())
            if is_due:
                self._last_clock = now
            return is_due
        if every is None:
            return False
        if every.unit == "epochs":
            return epoch_ends and (trainer.current_epoch + 1) % every.value == 0
        return trainer.global_step % every.value == 0

    def _save_last(self, trainer: pl.Trainer) -> None:
        """Save ``last.ckpt``, unless it holds this update."""
        if trainer.global_step != self._last_step and not getattr(trainer, "fast_dev_run", False):
            self._last_step = trainer.global_step
            internals.save_newest(self, trainer)

    def _problem_of_epoch(self, trainer: pl.Trainer) -> str | None:
        """Return why no run can resume within the present epoch; None if one can. Decided once per epoch."""
        epoch, problem = self._resume_problem
        if epoch != trainer.current_epoch:
            problem = replay.resumes_within_epoch(trainer)
            self._resume_problem = (trainer.current_epoch, problem)
        return problem

    def _warn(self, trainer: pl.Trainer, problem: str, last_is_due: bool) -> None:
        """Warn once in a run that saves wait, as soon as one is due."""
        is_due = last_is_due or internals.saves_by_time(self) or internals.is_due_by_updates(self, trainer)
        if not is_due and (not self._has_validated or internals.saves_at_epoch_end(self, trainer)):
            return
        checkpoints = [callback for callback in callbacks_of(trainer) if isinstance(callback, ExactCheckpoint)]
        if not any(checkpoint._has_warned for checkpoint in checkpoints):
            warn(
                "warning: checkpoints wait for the end of the epoch, except the best weights by a score, since %s",
                problem,
            )
        self._has_warned = True

    def _save_at_interval(self, trainer: pl.Trainer) -> None:
        # Under manual optimization Lightning may save the weights from before the update, and ignores a time interval.
        automatic: Any = SimpleNamespace(automatic_optimization=True)
        super().on_train_batch_end(trainer, automatic, None, None, trainer.fit_loop.batch_idx)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not pl_module.automatic_optimization and not trainer.global_step:
            raise UserError(
                f"{type(pl_module).__name__} optimizes manually, and Lightning has counted no step of the epoch, as if"
                " its optimizers step in another hook than training_step: nothing would be saved; step in training_step"
            )
        loop = install_update_loop(trainer)
        loop.results.share()  # What the module's own hook has logged, in the same place on all ranks.
        loop.step_plateaus_of_epoch()
        if self._is_due and self.monitor is None:
            internals.save_now_unless_saved(self, trainer)
        else:
            self._save_at_interval(trainer)
        if self._has_validated:
            self._has_validated = False
            super().on_validation_end(trainer, pl_module)
        super().on_train_epoch_end(trainer, pl_module)
        if self._is_due and not internals.is_saved(self, trainer):
            internals.save_last(self, trainer)
        self._is_due = False
        loop.drop_early_stop()
        if self._last_every is not None:
            is_last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
            run_ends = is_last_epoch or trainer.should_stop or loop.max_steps_is_reached
            if self._last_is_due(trainer, epoch_ends=True) or self._last_waits or run_ends:
                self._save_last(trainer)
            self._last_waits = False

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        saved = [
            callback
            for callback in callbacks_of(trainer)
            if isinstance(callback, ExactCheckpoint)
            and (internals.is_saved(callback, trainer) or callback._last_step == trainer.global_step)
        ]
        if saved[:1] == [self] and not install_update_loop(trainer).epoch_is_over:
            problem = replay.resumes_within_epoch(trainer)
            if problem is not None:
                warn("warning: the run ends within an epoch, and no run resumes from there, since %s", problem)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"waits": internals.saves_after_validation(self)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        internals.save_after_validation(self, bool(state_dict.get("waits")))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._loaded is not None:
            # Slashes in names of metrics, and so in names of files, make subfolders.
            levels = 1 + max(name.count("/") for name in (self.filename or "", self.CHECKPOINT_NAME_LAST))
            state = replay.files_in(self.dirpath or ".", self._loaded, self.mode, levels)
            # Rank 0 alone may see the files, and ranks with different states would wait for each other.
            super().load_state_dict(trainer.strategy.broadcast(state))
            self._loaded = None

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._resumed is not None:  # `on_train_start`, which clears it, was not called: nothing was left to train.
            replay.end_finished_run(trainer)
        if self._last_every is None:
            return
        # Lightning calls no training hook if nothing is left to train.
        if 0 in (trainer.max_epochs, trainer.max_steps) and not trainer.global_step:
            internals.save_newest(self, trainer)
        elif self._resumed and trainer.ckpt_path:
            # The best had saved the last update, and the run was killed before ``last.ckpt`` was written.
            saved = trainer.strategy.load_checkpoint(trainer.ckpt_path, weights_only=True)
            trainer.strategy.save_checkpoint(saved, Path(self.dirpath or "") / "last.ckpt")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        internals.restore_modes(trainer)

    @override
    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        update, scores = self._scored
        if self.monitor in scores and update != trainer.global_step:
            internals.save_after_validation(self)
            return False
        if self.monitor is not None:
            check_decision(self.monitor, current, type(self).__name__)
        is_equal = current is not None and bool(self.best_k_models.get(self.kth_best_model_path) == current)
        return is_equal or super().check_monitor_top_k(trainer, current)


def warn_of_other_checkpoints(trainer: pl.Trainer) -> None:
    """Warn if a run is saved, and not by an `ExactCheckpoint`, which another callback may have taken out in `setup`."""
    if getattr(trainer, "fast_dev_run", False):  # A trial of a few batches, which saves nothing.
        return
    checkpoints = trainer.checkpoint_callbacks
    if checkpoints and not any(isinstance(checkpoint, ExactCheckpoint) for checkpoint in checkpoints):
        warn(
            "warning: no ExactCheckpoint saves this run, but %s, so a resumed run may end with other weights: pass"
            " ExactCheckpoint. If you did, another callback has replaced it in `setup`, as FinetuningScheduler does:"
            " leave that callback out, and use FreezeLayers",
            ", ".join(sorted({type(checkpoint).__name__ for checkpoint in checkpoints})),
        )
