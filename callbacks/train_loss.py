"""Training loss and accuracy over all targets, since the last log and per epoch.

`self.log("loss", loss)` in every step costs 0.4 ms a step, and shows one batch of one rank. `TrainLoss` costs
microseconds, and does not stall the device.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from callbacks.lib.exact_sums import DIGITS, from_whole_numbers, to_whole_numbers
from callbacks.lib.lightning_internals import log_after_update, log_interval
from callbacks.lib.one_lightning import OneLightningCallback
from callbacks.lib.targets import micro_batch_outputs
from callbacks.update_loop import install_update_loop
from datamodules.errors import RunFailedError
from datamodules.lightning import pl

_FOLD = 64  # Batches that are summed at once, since a sum takes several kernels, whatever their number.

_SUMS = "train_loss"
"""Checkpoint entry of the sums since the last log and of the epoch."""


def sums_over_targets(
    means: list[Tensor], counts: list[int | Tensor], correct: list[int | float | Tensor | None]
) -> Tensor:
    """Return the sum of the losses of all targets, and the numbers of targets and of correct ones, as whole numbers.

    A mean over no target may be NaN and counts as 0.

    Args:
        means: the mean loss of each batch; `counts` and `correct` are its numbers of targets and of correct ones.

    Returns:
        int64 of shape (3, 17), see `callbacks.lib.exact_sums`.

    Example:
        >>> sums = sums_over_targets([torch.tensor(1.5), torch.tensor(float("nan"))], [3, 0], [2, None])
        >>> [from_whole_numbers(row) for row in sums.tolist()]
        [4.5, 3.0, 2.0]
    """
    losses = torch.stack(means).float()
    weights = _column(counts, losses.device)
    num_correct = _column([0 if number is None else number for number in correct], losses.device)
    losses = torch.where(weights > 0, losses * weights, 0.0)
    return to_whole_numbers(torch.stack((losses, weights, num_correct))).sum(1)


def _column(numbers: list[Any], device: torch.device) -> Tensor:
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, device=device).float() for number in numbers])
    return torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)


def _num_correct(outputs: dict[str, Any]) -> int | float | Tensor | None:
    """Return the number of correct targets of a step; None if it returned no number or tensor."""
    correct = outputs.get("correct")
    if isinstance(correct, Tensor):
        return correct.sum() if correct.ndim else correct
    return correct if isinstance(correct, (int, float)) else None


@dataclass
class _Interval:
    """Interval since the last log."""

    update: int
    logged: bool = False
    """Whether something was logged in this epoch."""
    has_losses: bool = False
    since: float = field(default_factory=time.monotonic)


class TrainLoss(OneLightningCallback):
    """Logs the mean loss over the targets of all ranks, once per ``log_every_n_steps`` updates and once per epoch.

    It also logs the accuracy, if `training_step` returns the number of correct targets, and the targets per second of
    training. The means of an epoch are logged at its end with ``_epoch`` after their names, such as "train/loss_epoch".

    Runs on: `setup`, where it installs `UpdateLoop`; every training batch, where it keeps references to the loss and
    the number of correct targets. `training_step` returns them as ``loss`` and ``correct``, and may add the
    ``count`` of targets behind them. Sums
    are exact, so equal batches log equal bits on any number of ranks. Logging waits for the device once. Checkpoints
    hold the sums, so a run resumed on any number of ranks logs the same.

    Args:
        targets: plural name of a target, for "train/samples_per_second".

    Raises:
        RunFailedError: an epoch had no target, on any rank.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainLoss()], logger=False, accelerator="cpu")
    """

    def __init__(self, targets: str = "samples") -> None:
        self.targets = targets
        self._sums = torch.zeros(2, 3, DIGITS, dtype=torch.int64)
        """Sums of this rank since the last log, and of this epoch."""
        self._batches: list[tuple[Tensor, int | Tensor, int | float | Tensor | None]] = []
        """Mean loss, count and number of correct targets of each batch that is not summed yet."""
        self._interval = _Interval(0)
        self._saved: dict[str, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            # The loop counts the samples that the loaders deal.
            install_update_loop(trainer).step.counts_targets = True

    def _fold(self) -> None:
        if self._batches:
            self._sums += sums_over_targets(*map(list, zip(*self._batches, strict=True)))
            self._batches = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interval = _Interval(trainer.global_step)
        self._batches = []
        self._sums = torch.zeros(2, 3, DIGITS, dtype=torch.int64, device=trainer.strategy.root_device)
        if self._saved is not None:
            if trainer.global_rank == 0:  # The saved sums are those of all ranks.
                self._sums += self._saved["sums"].to(self._sums.device)
            self._interval = _Interval(self._saved["update"], self._saved["logged"])
            self._saved = None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit" or trainer.interrupted:
            return  # After an exception the other ranks may be gone, and the sums need an all-reduce.
        saved = {"sums": self._totals(trainer).cpu(), "update": self._interval.update, "logged": self._interval.logged}
        checkpoint[_SUMS] = saved

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get(_SUMS) if trainer.state.fn == "fit" else None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interval.logged = False

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interval.since -= time.monotonic()  # With the next hook: the interval leaves out the validation's time.

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interval.since += time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = log_interval(trainer)
        if not every:
            return
        for output in micro_batch_outputs(outputs):
            loss = output.get("loss")
            if loss is None:
                continue
            self._batches.append((loss, output["count"], _num_correct(output)))
            self._interval.has_losses = True
        if len(self._batches) >= _FOLD:
            self._fold()
        interval_ends = trainer.global_step // every > self._interval.update // every
        is_last = trainer.is_last_batch
        if not interval_ends and not is_last:
            return
        has_accuracy = isinstance(outputs, dict) and _num_correct(outputs) is not None
        if interval_ends or not self._interval.logged:
            self._log_interval(trainer, has_accuracy)
        if is_last:
            self._log_epoch(trainer, has_accuracy)

    def running(self) -> tuple[float, float]:
        """Return this rank's mean loss of the epoch so far, NaN without targets, and their number; waits for a GPU."""
        self._fold()
        loss, targets, _ = (from_whole_numbers(row) for row in self._sums[1].tolist())
        return (loss / targets if targets else math.nan), targets

    def _totals(self, trainer: pl.Trainer) -> Tensor:
        """Return the sums of all ranks, without waiting for the device."""
        self._fold()
        totals = self._sums.to(trainer.strategy.root_device, copy=True)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(totals)  # `Strategy.reduce` would add a barrier.
        return totals

    def _values(self, trainer: pl.Trainer, part: int) -> list[float]:
        return [from_whole_numbers(row) for row in self._totals(trainer)[part].tolist()]

    def _log(
        self, trainer: pl.Trainer, total: list[float], has_accuracy: bool, suffix: str = "", rate: float | None = None
    ) -> None:
        loss, targets, correct = total
        names = ["train/loss", *(["train/accuracy"] if has_accuracy else [])]
        means = {f"{name}{suffix}": torch.tensor(value / targets) for name, value in zip(names, (loss, correct))}
        # Not by `pl_module.log`, which logs nothing in an epoch that is shorter than the interval.
        trainer.callback_metrics.update(means)
        row = {name: float(mean) for name, mean in means.items()}
        if rate is not None:
            row[f"train/{self.targets}_per_second"] = rate
        log_after_update(trainer, row)

    def _log_interval(self, trainer: pl.Trainer, has_accuracy: bool) -> None:
        interval = self._interval
        total = self._values(trainer, 0)
        if total[1]:
            self._log(trainer, total, has_accuracy, rate=total[1] / max(1e-9, time.monotonic() - interval.since))
            interval.logged = True
        elif trainer.is_last_batch and not interval.logged and interval.has_losses:
            raise RunFailedError(
                f"epoch {trainer.current_epoch + 1} had no target: every `count` was 0, as where all labels are -100;"
                " correct the labels"
            )
        self._sums[0] = 0
        self._interval = _Interval(trainer.global_step, interval.logged)

    def _log_epoch(self, trainer: pl.Trainer, has_accuracy: bool) -> None:
        """Log the means of the epoch, and reset its sums; those of the interval continue into the next epoch."""
        total = self._values(trainer, 1)
        if total[1]:
            self._log(trainer, total, has_accuracy, "_epoch")
        self._sums[1] = 0
