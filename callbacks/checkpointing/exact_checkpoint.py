"""Checkpoints at the moments from which Lightning resumes exactly.

Lightning's `ModelCheckpoint(every_n_train_steps=...)` saves at two others, too. After a resume it forgets which update
it has saved and saves again after the next micro-batch, in mid-window, and no checkpoint holds half-summed gradients.
And it saves on an epoch's last batch before the epoch has ended: the run resumed from there does not count the epoch
that it begins, and a second such resume trains one epoch too many. The same holds after a validation in mid-epoch.
Nor does a run resume exactly that ``max_steps`` has ended: the epoch that it cut counts as done. A run that is told to
stop (`max_time`, `EarlyStopping` within an epoch, `should_stop`) ends in mid-window, and its micro-batches are lost.
Scores and the sums behind the means of an epoch are in no checkpoint, so that what monitors them decides otherwise.
ReduceLROnPlateau steps after the checkpoint was saved, and not at all in the epoch that a run resumes in. With
``precision="64-true"`` a resume rounds the weights to float32.
A folder of checkpoints that was moved is not recognised: a worse model then takes the best one's place.

What Lightning leaves out where it resumes is done in `callbacks.checkpointing.replay`.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.replay import (
    files_in,
    raw_weights,
    refuse_torchmetrics,
    replay_epoch,
    was_stopped_early,
)
from callbacks.checkpointing.stopping_points import (
    hold_validations_and_stops,
    uncount_cut_epoch,
    update_is_whole,
    validation_is_next,
)
from callbacks.lib.durations import Duration
from callbacks.lib.exchange import broadcast, gather
from callbacks.lib.hooks import callbacks_of, refuse_dataloader_iter, set_callbacks
from callbacks.lib.lightning_internals import (
    PlateauSteps,
    continue_epoch_sums,
    drop_early_stop,
    epoch_sums,
    means_of_trained_epoch,
    resume_max_steps_at_epoch_end,
    save_after_validation,
    save_now_unless_saved,
    save_untrained,
    saves_after_validation,
    saves_within_epochs,
    training_is_done,
    validation_scores,
)
from datamodules.errors import UserError

__all__ = ["ExactCheckpoint", "LastCheckpoint", "save_interval"]

_METRICS = "monitored_metrics"
"""The entry of a checkpoint with all scores, which callbacks and ReduceLROnPlateau read again later."""

_SCORED = "scored"
"""The entry with the update after which was validated last, and the names of the scores of that validation."""

_SUMS = "epoch_sums"
"""The entry with the sums behind the means of the present epoch, by rank."""


def save_best_first(trainer: pl.Trainer) -> None:
    """Call those that monitor a score before the others, whose checkpoints then hold the best score of that moment."""
    callbacks = callbacks_of(trainer)
    ours = (callback for callback in callbacks if isinstance(callback, ExactCheckpoint))
    ordered = iter(sorted(ours, key=lambda callback: callback.monitor is None))
    set_callbacks(trainer, [next(ordered) if isinstance(each, ExactCheckpoint) else each for each in callbacks])


def save_interval(text: str) -> dict[str, Any]:
    """The arguments of `ModelCheckpoint` for how often to save: by updates, epochs or time.

    Raises:
        UserError: it is none of these.

    Example:
        >>> save_interval("500 steps"), save_interval("10 minutes")
        ({'every_n_train_steps': 500}, {'train_time_interval': datetime.timedelta(seconds=600)})
    """
    wanted = f'interval={text!r} is no interval; write "500 steps", "2 epochs" or "10 minutes"'
    if time := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(second|minute|hour)s?", text.strip().lower()):
        if not float(time[1]):
            raise UserError(wanted)
        return {"train_time_interval": timedelta(**{f"{time[2]}s": float(time[1])})}
    try:
        duration = Duration.parse(text)
    except UserError as error:
        raise UserError(wanted) from error
    if duration.unit == "%" or duration.value != int(duration.value) or not duration.value:
        raise UserError(wanted)
    return {"every_n_train_steps" if duration.unit == "steps" else "every_n_epochs": int(duration.value)}


class ExactCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which saves after complete updates, and after an epoch's last when it has ended.

    Of equal scores the later is the best: it has learnt for longer, and small validation sets often give equal ones.
    A save by the score of a validation that was made with other weights waits for the next validation; the last
    checkpoint does not.

    A run resumes within an epoch with a training loader that has ``state_dict`` and ``load_state_dict``, and with one
    `DataLoader` over a data set with a length and a sampler of torch: it repeats the epoch's order, by `SeedControl` if
    it shuffles, and reads over the batches that were trained. With any other it resumes at an epoch's end.

    A run validates and stops after complete updates: a validation that is due within one comes after it, and so does a
    stop, by whatever sets `trainer.should_stop`. A stop that comes before ``min_epochs`` or ``min_steps`` is dropped;
    `EarlyStopping` asks again. ReduceLROnPlateau makes its step before the checkpoint is saved. A resumed run knows the
    scores, and the sums behind the means of its epoch.

    Runs on: `on_train_batch_end`, `on_validation_end` and `on_train_epoch_end`, as the stock one; takes the same
    arguments. `on_train_start` of a resumed run. An update that a validation follows is
    saved after it.

    Raises:
        UserError: `save_on_exception`, which saves wherever the exception was raised; or what an order or a decision of
            the run depends on is in no checkpoint.

    Example:
        >>> checkpoint = ExactCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)
    """

    _validated_at_epoch_end = False
    _loaded: dict[str, Any] | None = None
    _world_size = 1
    _saved_world_size: int | None = None
    _scored: tuple[int, list[str]] = (0, [])
    _metrics: dict[str, Tensor] | None = None
    _sums: list[dict[str, list[Tensor]]] | None = None
    _raw: dict[str, Any] | None = None
    _plateaus: PlateauSteps | None = None
    _undo: Sequence[Callable[[], None]] = ()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.save_on_exception:
            raise UserError(
                "save_on_exception=True saves in the midst of a batch, from where nothing resumes exactly: pass"
                " save_on_exception=False, and add Preemption(), which saves after the update in which Ctrl-C came"
            )
        if stage == "fit":
            refuse_dataloader_iter(self, pl_module)
            # What a test or validation between two fits has loaded.
            self._loaded = self._metrics = self._sums = self._raw = self._saved_world_size = None
            save_best_first(trainer)
            if isinstance(trainer.precision_plugin, DoublePrecision):
                # Lightning converts the module after it has loaded the weights, which float32 would have rounded.
                trainer.precision_plugin.convert_module(pl_module)
        super().setup(trainer, pl_module, stage)
        self._world_size = trainer.world_size
        resume_max_steps_at_epoch_end(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        uncount_cut_epoch(checkpoint["loops"]["fit_loop"])
        if trainer.interrupted or _SUMS in checkpoint:
            return  # The other ranks may be gone, or another callback of this class has added it.
        metrics = trainer.callback_metrics | means_of_trained_epoch(trainer)
        checkpoint[_METRICS] = {name: torch.as_tensor(value).detach().clone() for name, value in metrics.items()}
        checkpoint[_SCORED] = self._scored
        checkpoint[_SUMS] = gather(trainer.strategy, epoch_sums(trainer))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._metrics, self._sums = checkpoint.get(_METRICS), checkpoint.get(_SUMS)
        self._scored = checkpoint.get(_SCORED, self._scored)
        self._raw = raw_weights(trainer, checkpoint) if trainer.state.fn == "fit" else None
        # `load_state_dict` is not called where this run saves at another interval or by another score.
        numbers = (state.get("world_size") for state in checkpoint["callbacks"].values() if isinstance(state, dict))
        self._saved_world_size = next((n for n in numbers if isinstance(n, int) and n > 0), trainer.world_size)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._take_loaded(trainer)  # Some strategies restore after `on_fit_start`.
        if self._raw is not None:
            pl_module.load_state_dict(self._raw, strict=pl_module.strict_loading)
            self._raw = None
        if self._saved_world_size is not None and self._is_first(trainer):
            replay_epoch(trainer, self._saved_world_size)
            trainer.should_stop = trainer.should_stop or was_stopped_early(trainer)
            drop_early_stop(trainer)
        self._saved_world_size = None
        self._release()
        undo = [hold_validations_and_stops(trainer)]
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            self._plateaus = PlateauSteps(trainer)
        if self._sums and trainer.fit_loop.restarted_mid_epoch and self._is_first(trainer):
            refuse_torchmetrics(trainer, self._sums)
            undo.append(continue_epoch_sums(trainer, self._sums))
        self._undo = undo
        metrics, self._metrics, self._sums = self._metrics or {}, None, None
        trainer.callback_metrics.update({n: value.to(trainer.strategy.root_device) for n, value in metrics.items()})

    def _is_first(self, trainer: pl.Trainer) -> bool:
        """Whether this is the first of the run's callbacks of this class; one is to put its loaders back."""
        return next(callback for callback in callbacks_of(trainer) if isinstance(callback, ExactCheckpoint)) is self

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._plateaus is None and not saves_within_epochs(self):
            return  # The parent comes to the same, at every step, by asking for much more.
        if not update_is_whole(trainer) or validation_is_next(trainer):
            return
        if self._plateaus is not None:
            self._plateaus.make("step")
        if saves_within_epochs(self) and not trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._scored = trainer.global_step, validation_scores(trainer)
        if trainer.is_last_batch or (trainer.should_stop and not validation_is_next(trainer)):
            self._validated_at_epoch_end = True
            return
        if saves_within_epochs(self):
            super().on_train_batch_end(trainer, pl_module, None, None, trainer.fit_loop.batch_idx)
        super().on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plateaus is not None:
            self._plateaus.make("epoch")
        super().on_train_batch_end(trainer, pl_module, None, None, trainer.fit_loop.batch_idx)
        if self._validated_at_epoch_end:
            self._validated_at_epoch_end = False
            super().on_validation_end(trainer, pl_module)
        super().on_train_epoch_end(trainer, pl_module)
        drop_early_stop(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"world_size": self._world_size, "waits": saves_after_validation(self)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        save_after_validation(self, bool(state_dict.get("waits")))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_loaded(trainer)

    def _take_loaded(self, trainer: pl.Trainer) -> None:
        if self._loaded is not None:
            # Rank 0 alone may see the files, and ranks that remember different ones would wait for each other.
            # Names of metrics, and so of files, may hold slashes.
            levels = 1 + max(name.count("/") for name in (self.filename or "", self.CHECKPOINT_NAME_LAST))
            found = files_in(self.dirpath or ".", self._loaded, self.mode, levels)
            super().load_state_dict(broadcast(trainer.strategy, found))
            self._loaded = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._release()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._release()

    def _release(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = ()
        if self._plateaus is not None:
            self._plateaus.remove()
            self._plateaus = None

    @override
    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        step, names = self._scored
        if self.monitor in names and step != trainer.global_step:
            save_after_validation(self)
            return False
        # The score is the same on every rank, so all of them decide alike.
        equal = current is not None and bool(self.best_k_models.get(self.kth_best_model_path) == current)
        return equal or super().check_monitor_top_k(trainer, current)


class LastCheckpoint(ExactCheckpoint):
    """Keeps the newest checkpoint in ``last.ckpt``, saved at an interval and when the run ends.

    A run of no epochs or steps saves the initial weights.

    Args:
        folder: where it is written.
        interval: as in "500 steps", "2 epochs" or "10 minutes". All ranks follow rank 0's clock.

    Raises:
        UserError: `interval` is none.

    Example:
        >>> LastCheckpoint("checkpoints", "500 steps").filename
        'last'
    """

    def __init__(self, folder: str | Path, interval: str) -> None:
        super().__init__(
            folder,
            filename="last",
            enable_version_counter=False,
            save_on_train_epoch_end=True,
            **save_interval(interval),
        )

    @property
    @override
    def state_key(self) -> str:
        # Of the other callback's, which has no monitor either where nothing is validated, and of any interval.
        return "LastCheckpoint"

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        done = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        if done or trainer.should_stop or training_is_done(trainer):
            save_now_unless_saved(self, trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning calls no hook of training then.
        if 0 in (trainer.max_epochs, trainer.max_steps) and not trainer.global_step:
            save_untrained(self, trainer)
