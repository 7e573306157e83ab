"""Checkpoints at the moments from which Lightning resumes exactly.

Lightning's `ModelCheckpoint(every_n_train_steps=...)` saves at two others, too. After a resume it forgets which update
it has saved and saves again after the next micro-batch, in mid-window, and no checkpoint holds half-summed gradients.
And it saves on an epoch's last batch before the epoch has ended: the run resumed from there does not count the epoch
that it begins, and a second such resume trains one epoch too many. The same holds after a validation in mid-epoch.
Nor does a run resume exactly that ``max_steps`` has ended: the epoch that it cut counts as done.
A folder of checkpoints that was moved is not recognised: a worse model then takes the best one's place.

What Lightning leaves out where it resumes is done in `callbacks.checkpointing.replay`.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.replay import pass_over_trained_batches, resume_order, resume_schedule_of_averaging
from callbacks.checkpointing.stopping_points import uncount_cut_epoch, update_is_whole
from callbacks.lib.lightning_internals import resume_max_steps_at_epoch_end, saves_within_epochs
from callbacks.lib.trainer_attributes import callbacks_of
from datamodules.errors import UserError

__all__ = ["ExactCheckpoint"]


class ExactCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which saves after complete updates, and after an epoch's last when it has ended.

    Of equal scores the later is the best: it has learnt for longer, and small validation sets often give equal ones.

    A run resumes within an epoch with any training loader: one without ``state_dict`` and ``load_state_dict``, such as
    a `DataLoader`, repeats the order of the epoch and passes over the batches that were trained, which takes the time
    to read them. If it shuffles, `SeedControl` has to be there.

    Runs on: `on_train_batch_end`, `on_validation_end` and `on_train_epoch_end`, as the stock one; takes the same
    arguments. `on_train_start` and `on_train_epoch_start` of a resumed run.

    Raises:
        UserError: a validation in mid-epoch would always fall into an accumulation window, where nothing can be saved,
            or the order of a loader without position cannot be repeated, or not on another number of devices.

    Example:
        >>> checkpoint = ExactCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)
    """

    _validated_at_epoch_end = False
    _loaded: dict[str, Any] | None = None
    _world_size = 1
    _saved_world_size: int | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._world_size = trainer.world_size
        resume_max_steps_at_epoch_end(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        uncount_cut_epoch(checkpoint["loops"]["fit_loop"])

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._take_loaded(trainer)  # Some strategies restore after `on_fit_start`.
        if self._places_loaders(trainer) and trainer.fit_loop.restarted_mid_epoch:
            resume_schedule_of_averaging(trainer)
            pass_over_trained_batches(trainer, self._saved_world_size or trainer.world_size)
            self._saved_world_size = None
        every, factor = trainer.val_check_batch, trainer.accumulate_grad_batches
        if self.monitor is None or not isinstance(every, int) or every >= trainer.num_training_batches:
            return
        if every % factor:
            near = sorted({max(1, every // factor) * factor, (every // factor + 1) * factor})
            raise UserError(
                f"a validation after every {every} batches falls within updates of {factor} micro-batches,"
                f" where no checkpoint can be saved: pass {' or '.join(f'val_check_interval={n}' for n in near)}"
            )

    def _places_loaders(self, trainer: pl.Trainer) -> bool:
        """Whether the run is resumed, and this is the first of its callbacks that does it."""
        first = next(callback for callback in callbacks_of(trainer) if isinstance(callback, ExactCheckpoint))
        return first is self and self._saved_world_size is not None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._places_loaders(trainer) and trainer.current_epoch > 0:
            resume_order(trainer)
        self._saved_world_size = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not saves_within_epochs(self):
            return  # The parent comes to the same, at every step, by asking for much more.
        if update_is_whole(trainer) and not trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if trainer.is_last_batch:
            self._validated_at_epoch_end = True
        elif update_is_whole(trainer):
            super().on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_batch_end(trainer, pl_module, None, None, trainer.fit_loop.batch_idx)
        if self._validated_at_epoch_end:
            self._validated_at_epoch_end = False
            super().on_validation_end(trainer, pl_module)
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"world_size": self._world_size}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
        self._saved_world_size = state_dict.get("world_size", self._world_size)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_loaded(trainer)

    def _take_loaded(self, trainer: pl.Trainer) -> None:
        if self._loaded is not None:
            # Rank 0 alone may see the files, and ranks that remember different ones would wait for each other.
            super().load_state_dict(trainer.strategy.broadcast(_found_here(self._loaded, self.dirpath)))
            self._loaded = None

    @override
    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        equal = current is not None and bool(self.best_k_models.get(self.kth_best_model_path) == current)
        # The score is the same on every rank, so all of them decide alike.
        return equal or super().check_monitor_top_k(trainer, current)


def _found_here(state: dict[str, Any], folder: Any) -> dict[str, Any]:
    """The state of a callback with the files that exist, in the folder where they are now."""
    if folder is None:
        return state

    def here(path: str) -> str:
        old = state["dirpath"] or "."
        moved = Path(folder, Path(path).relative_to(old)) if path and Path(path).is_relative_to(old) else Path(path)
        return str(moved) if moved.is_file() else ""

    best = {here(path): score for path, score in state["best_k_models"].items() if here(path)}
    paths = {name: here(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    found = state | paths | {"dirpath": folder, "best_k_models": best}
    if not paths["best_model_path"]:
        found["best_model_score"] = None
    return found
