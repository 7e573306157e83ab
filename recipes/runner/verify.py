"""Carry out the command verify: train an interval of a run again, and compare the weights' bits."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from datamodules.errors import RunFailedError, UserError
from datamodules.lightning import DummyLogger, pl
from recipes.runner.callbacks_of_run import checkpoint_callbacks
from recipes.runner.experiment import Experiment
from recipes.runner.printing import relative_path
from recipes.runner.report import print_pairs
from recipes.runner.results import differences, environment
from recipes.runner.trainer import build_trainer
from recipes.runner.weights_record import Interval, weights_hash


class _Repeats(VerifiedCheckpointIO):
    """Checkpoint IO that hashes the weights saved after the interval's last update, and writes nothing."""

    def __init__(self, interval: Interval) -> None:
        super().__init__()
        self.interval = interval
        self.sha256: str | None = None

    @property
    def equal(self) -> bool:
        return self.sha256 in self.interval.hashes

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if checkpoint["global_step"] == self.interval.step and not self.equal:
            self.sha256 = weights_hash(checkpoint["state_dict"])

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Do nothing: no checkpoint was written."""


class StopTraining(Exception):
    """Exception that ends a training on purpose, on all ranks at once."""


class _EndOfInterval(pl.Callback):
    """Callback that saves after the interval's last update, and ends the training.

    The run may have saved right after the update, after a validation, or at the end of the epoch. Their weights may
    differ, for example with callbacks that average weights, so that each of these saves is compared.
    """

    def __init__(self, io: _Repeats) -> None:
        self.io = io
        self.environment: dict[str, Any] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.environment = environment(trainer)

    def on_update_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save, if the update is the interval's last."""
        if trainer.global_step == self.io.interval.step:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint("verify.ckpt")
        # Broadcast from rank 0, since all ranks have to stop after the same save.
        if trainer.strategy.broadcast(self.io.equal):
            raise StopTraining

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.io.interval.step:
            raise StopTraining


def _check_beginning(experiment: Experiment, interval: Interval) -> None:
    """Compare the checkpoint's weights with the hash that the run has recorded.

    Raises:
        RunFailedError: the checkpoint holds other weights.
        UserError: the run starts without a checkpoint, and the number of devices changes the update's micro-batches.
    """
    start = interval.start.environment
    if interval.checkpoint is None:
        world_size = int(start.get("devices", 1)) * int(start.get("num_nodes", 1))
        if experiment.run.global_batch_size is None and experiment.launch.world_size != world_size:
            raise UserError(
                f"the run began on {world_size} devices, and is repeated from there: pass devices={world_size}"
            )
        return
    sha256 = weights_hash(load_plain(interval.checkpoint)["state_dict"])
    if sha256 not in interval.from_hashes:
        raise RunFailedError(
            f"NOT EQUAL: the weights in {relative_path(interval.checkpoint)} are not those that the run has saved after"
            f" {interval.from_step:,} updates: their SHA-256 is {sha256}, and {_text(interval.from_hashes)} in the"
            " record"
        )


def _text(hashes: frozenset[str]) -> str:
    return " or ".join(sorted(hashes))


def verify(experiment: Experiment, interval: Interval) -> None:
    """Train an interval of a run again, and compare the weights; the run's folder is not changed.

    Raises:
        RunFailedError: the weights differ.
    """
    recipe = experiment.recipe
    _check_beginning(experiment, interval)
    io = _Repeats(interval)
    with tempfile.TemporaryDirectory() as empty:
        monitor = recipe.monitor if experiment.validates else None
        # The callbacks of the run, so that checkpoints are saved at the same moments; `io` writes none of them.
        saves = checkpoint_callbacks(Path(empty), monitor, recipe, experiment.run)
        end = _EndOfInterval(io)
        trainer = build_trainer(experiment, experiment.callbacks(saves, [end]), checkpoint_io=io)
        trainer.loggers = [DummyLogger()]  # Callbacks such as LearningRateMonitor need a logger.
        with suppress(StopTraining):
            trainer.fit(recipe, experiment.data, ckpt_path=experiment.point.checkpoint, weights_only=True)
    if not trainer.is_global_zero:
        return
    changed = differences(interval.start.environment, end.environment)
    begin = relative_path(interval.checkpoint) if interval.checkpoint else "the beginning"
    trained = f"{begin}, {interval.from_step:,} updates, to {interval.step:,} updates (epoch {interval.epoch})"
    if io.equal:
        rows = {"trained again": trained, "weights": f"equal to the bit, SHA-256 {io.sha256}"}
        if changed:
            rows["although"] = changed
        print_pairs(rows)
        return
    if io.sha256 is None:
        raise UserError(f"training again from {trained} did not come to that update: no weights to compare")
    cause = "processor, versions, threads and precision are those of the run"
    if changed:
        cause = f"here it has {changed}"
    if trainer.strategy.root_device.type == "cuda" and not experiment.run.deterministic:
        cause += "; on a GPU only a run with `deterministic` repeats its bits for sure"
    raise RunFailedError(
        f"NOT EQUAL: trained again from {trained}, the weights have SHA-256 {io.sha256}, and"
        f" {_text(interval.hashes)} in the run; {cause}"
    )
