"""Checks that a run's checkpoints are written, and are the same for all ranks."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.lib.durations import Duration
from callbacks.lib.exchange import broadcast
from callbacks.lib.lightning_internals import save_now_unless_saved, save_untrained, training_is_done
from datamodules.errors import RunFailedError, UserError

__all__ = ["CheckpointGuard", "LastCheckpoint", "save_interval"]


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


class CheckpointGuard(pl.Callback):
    """Refuses ranks that resume from different checkpoints, and ends a run whose last save failed with an error.

    Runs on: `setup`, where all ranks must have found the same checkpoint; `on_train_end`. Each checkpoint gets the
    number of devices it was trained with, under ``"devices"``.

    Args:
        resumed: the checkpoint that this rank resumes from.

    Raises:
        UserError: the ranks differ.
        RunFailedError: the last checkpoint could not be written.
    """

    def __init__(self, resumed: str | None = None) -> None:
        self.resumed = resumed

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.world_size == 1:
            return
        wanted = broadcast(trainer.strategy, self.resumed)
        if not trainer.strategy.reduce_boolean_decision(wanted == self.resumed):
            raise UserError(
                f"rank 0 resumes from {wanted or 'nothing'}, rank {trainer.global_rank} found"
                f" {self.resumed or 'nothing'}: pass a `run_dir` that all nodes share, or a file to `resume`"
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        io, problem = trainer.strategy.checkpoint_io, None
        if isinstance(io, VerifiedCheckpointIO) and io.failures:
            files = "; ".join(f"{path}: {reason}" for path, reason in io.failures.items())
            problem = (
                f"the training is done, and its checkpoints could not be saved ({files}); make room, and repeat from"
                " the last one that was saved with `resume`"
            )
        # On all ranks: one rank that ends alone leaves the others waiting.
        if problem := broadcast(trainer.strategy, problem):
            raise RunFailedError(problem)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["devices"] = trainer.world_size
