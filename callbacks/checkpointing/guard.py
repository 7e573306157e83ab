"""Checks that a run's checkpoints fit on the disk, are written, and are the same for all ranks."""

import re
import shutil
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.lib.durations import Duration
from callbacks.lib.exchange import broadcast
from callbacks.lib.global_batch import global_batch_size
from callbacks.lib.lightning_internals import save_now_unless_saved, save_untrained, training_is_done
from callbacks.lib.trainer_attributes import callbacks_of
from datamodules.errors import RunFailedError, UserError

__all__ = ["CheckpointGuard", "LastCheckpoint", "check_space", "estimate_checkpoint_bytes", "save_interval"]

# Tensors of a parameter's size that an optimiser keeps for it; 2 for those that are not named here.
_STATE_PER_PARAMETER = {"SGD": 1, "Adagrad": 1, "RMSprop": 3, "Rprop": 2, "Adafactor": 0, "LBFGS": 100}


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


def estimate_checkpoint_bytes(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], copies: int = 1) -> int:
    """The size of a checkpoint, before the optimisers have any state; `copies` is how often it holds the weights."""
    total: int = copies * sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    for optimizer in optimizers:
        states = _STATE_PER_PARAMETER.get(type(optimizer).__name__, 2)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        total += states * sum(p.numel() * p.element_size() for p in parameters)
    return total


def _amount(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def check_space(folder: Path, checkpoint_bytes: int, files: int) -> None:
    """Refuse a run whose checkpoints would not fit on the disk.

    Args:
        files: how many are kept. One more is written before an old one goes; those that are there count as kept.

    Raises:
        UserError: there is not enough space.
    """
    there = sum(file.stat().st_size for file in folder.glob("*.ckpt"))
    needed = checkpoint_bytes * (files + 1) - there
    home = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(home).free
    if free < needed:
        raise UserError(
            f"the checkpoints in {folder} will take {_amount(needed)} ({files} of {_amount(checkpoint_bytes)} and one"
            f" that is being written), and {_amount(free)} are free: free some, or pass a `run_dir` on another disk, or"
            " a smaller `save_top_k`"
        )


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
    """Refuses a run whose checkpoints cannot be kept, and ends one whose last save failed with an error.

    Runs on: `setup`, where all ranks must have found the same checkpoint; `on_train_start`, where the space on the disk
    is compared with what the checkpoints will need; `on_train_end`. Each checkpoint gets the number of devices and the
    global batch it was trained with, under ``"split"``.

    Args:
        resumed: the checkpoint that this rank resumes from.

    Raises:
        UserError: the ranks differ, or the disk is too small.
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
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        problem = None
        if trainer.is_global_zero:
            copies = sum(getattr(callback, "copies", 0) for callback in callbacks_of(trainer))  # Of averages.
            size = estimate_checkpoint_bytes(pl_module, trainer.optimizers, 1 + copies)
            by_folder: dict[Path, int] = {}
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath):
                    folder = Path(callback.dirpath)
                    files = max(1, callback.save_top_k) + bool(callback.save_last)
                    by_folder[folder] = by_folder.get(folder, 0) + files
            try:
                for folder, files in by_folder.items():
                    check_space(folder, size, files)
            except UserError as error:
                problem = str(error)
        self._raise_everywhere(trainer, UserError, problem)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        io, problem = trainer.strategy.checkpoint_io, None
        if isinstance(io, VerifiedCheckpointIO) and io.failures:
            files = "; ".join(f"{path}: {reason}" for path, reason in io.failures.items())
            problem = (
                f"the training is done, and its checkpoints could not be saved ({files}); make room, and repeat from"
                " the last one that was saved with `resume`"
            )
        self._raise_everywhere(trainer, RunFailedError, problem)

    def _raise_everywhere(self, trainer: pl.Trainer, error: type[UserError], problem: str | None) -> None:
        """Raise rank 0's problem on all ranks: one rank that ends alone leaves the others waiting."""
        if problem := broadcast(trainer.strategy, problem):
            raise error(problem)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        try:
            size = global_batch_size(trainer)
        except UserError:  # The loader does not say.
            size = None
        checkpoint["split"] = {"devices": trainer.world_size, "global_batch_size": size}
