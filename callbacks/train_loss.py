"""The training loss and accuracy as they should be read: over all targets since the last log, and of each epoch.

`self.log("loss", loss)` in every step costs 0.4 ms a step, and shows one batch of one rank. This one costs microseconds
and does not make the device wait.
"""

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from typing_extensions import override

from callbacks.lib.exchange import gather
from callbacks.lib.targets import count_targets, sum_over_ranks
from callbacks.lib.trainer_attributes import log_interval
from datamodules.errors import RunFailedError

__all__ = ["TrainLoss", "weighted_sum"]

_FOLD = 64

_SUMS = "train_loss"
"""The entry of a checkpoint with what was summed up since the last log, by name."""


def weighted_sum(means: list[Tensor], counts: list[int | Tensor]) -> Tensor:
    """Sum over all targets, and their number, float32 of shape (2,). A mean over no target may be NaN and counts as 0.

    Example:
        >>> weighted_sum([torch.tensor(1.0), torch.tensor(float("nan"))], [3, 0])
        tensor([3., 3.])
    """
    stacked = torch.stack(means).float()
    if any(isinstance(count, Tensor) for count in counts):
        weights = torch.stack([torch.as_tensor(count, device=stacked.device).float() for count in counts])
    else:
        weights = torch.tensor(counts, dtype=torch.float32).to(stacked.device, non_blocking=True)
    return _sum(stacked, weights)


def _right(outputs: dict[str, Any]) -> int | float | Tensor | None:
    """How many targets of a step were right; None where it returned no number and no tensor."""
    correct = outputs.get("correct")
    if isinstance(correct, Tensor):
        return correct.sum() if correct.ndim else correct
    return correct if isinstance(correct, (int, float)) else None


def _beside(name: str, other: str) -> str:
    """Another name in the same group: "train/accuracy" beside "train/loss"."""
    group, slash, _ = name.rpartition("/")
    return f"{group}{slash}{other}"


def _sum(means: Tensor, counts: Tensor) -> Tensor:
    return torch.stack((torch.where(counts > 0, means * counts, 0.0).sum(), counts.sum()))


class TrainLoss(pl.Callback):
    """Logs the mean loss over the targets of all ranks, once per ``log_every_n_steps`` updates and once per epoch.

    With it go the accuracy, where `training_step` returns how many targets were right, and the targets per second of
    training. An epoch with fewer updates logs once, at its end. The means of an epoch are logged at its end with
    ``_epoch`` after their names, such as "train/loss_epoch".

    Runs on: every training batch, where it keeps references to the loss and the number of right targets;
    `training_step` returns them, as ``loss`` and ``correct``, and may add the ``count`` of targets behind them. Logging
    costs one reduction of three numbers, and waits for the device once. Checkpoints hold the sums since the last log
    and of the epoch, so that a resumed run logs the same.

    Args:
        name: under which the loss is logged; the accuracy is beside it, as "train/accuracy".
        targets: what a target is, for "train/samples_per_second".

    Raises:
        RunFailedError: an epoch had no target, on any rank.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainLoss("loss")], logger=False, accelerator="cpu")
    """

    def __init__(self, name: str = "train/loss", targets: str = "samples") -> None:
        self.name, self.targets = name, targets
        self._saved: dict[str, Any] | None = None
        self._start(0)
        self._epoch = [0.0, 0.0, 0.0]

    def _start(self, update: int) -> None:
        self._update = update
        self._means: list[Tensor] = []
        self._counts: list[int | Tensor] = []
        self._correct: list[int | float | Tensor | None] = []
        self._folded: Tensor | float = 0.0
        self._earlier: Tensor | float = 0.0
        self._logged = False
        self._since = time.monotonic()

    def _fold(self) -> None:
        if self._means:
            sums, tensors = weighted_sum(self._means, self._counts), [c for c in self._correct if isinstance(c, Tensor)]
            hits = torch.stack(tensors).sum().float() if tensors else sums.new_zeros(())
            hits = hits + sum(c for c in self._correct if isinstance(c, (int, float)))
            self._folded = self._folded + torch.cat((sums, hits[None]))
            self._means, self._counts, self._correct = [], [], []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.global_step)
        self._epoch = [0.0, 0.0, 0.0]
        if self._saved is not None:
            self._load(trainer, self._saved["ranks"])
            self._update, self._logged, self._epoch = (self._saved[name] for name in ("update", "logged", "epoch"))
            self._saved = None

    def _load(self, trainer: pl.Trainer, ranks: list[Any]) -> None:
        """Take this rank's sums and micro-batches, or those of all on rank 0 if the number of ranks differs."""
        if len(ranks) == trainer.world_size:
            ranks = [ranks[trainer.global_rank]]
        elif trainer.global_rank > 0:
            return
        for earlier, folded, *rows in move_data_to_device(ranks, trainer.strategy.root_device):
            self._earlier, self._folded = self._earlier + earlier, self._folded + folded
            for kept, row in zip((self._means, self._counts, self._correct), rows, strict=True):
                kept += row

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit" or trainer.interrupted:
            return  # After an exception the other ranks may be gone.
        mine = [self._earlier, self._folded, list(self._means), list(self._counts), list(self._correct)]
        ranks = gather(trainer.strategy, mine)
        saved = {"ranks": ranks, "update": self._update, "logged": self._logged, "epoch": list(self._epoch)}
        checkpoint.setdefault(_SUMS, {})[self.name] = saved

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get(_SUMS, {}).get(self.name) if trainer.state.fn == "fit" else None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = False

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since -= time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = log_interval(trainer)
        if not every:
            return
        correct = _right(outputs) if isinstance(outputs, dict) else None
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            # Lightning hands out the loss divided by the accumulation factor.
            factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._means.append(outputs["loss"] if factor == 1 else outputs["loss"] * factor)
            self._counts.append(count_targets(outputs, batch))
            self._correct.append(correct)
            if len(self._means) == _FOLD:
                self._fold()
        interval_ends = trainer.global_step // every > self._update // every
        if interval_ends or (trainer.is_last_batch and not self._logged):
            self._log_interval(trainer, correct is not None)
        if trainer.is_last_batch:
            self._log_epoch(trainer, correct is not None)

    def _totals(self, trainer: pl.Trainer) -> list[list[float]] | None:
        """Loss, targets and right ones since the last log, of earlier epochs and of this one, summed over all ranks.

        None without batches.
        """
        self._fold()
        parts = (self._earlier, self._folded)
        like = next((part for part in parts if isinstance(part, Tensor)), None)
        if like is None:
            return None
        totals = torch.stack([part if isinstance(part, Tensor) else torch.zeros_like(like) for part in parts])
        if trainer.world_size > 1:
            totals = sum_over_ranks(totals, totals.device, totals.dtype)
        sums: list[list[float]] = totals.tolist()
        return sums

    def _log(
        self, trainer: pl.Trainer, total: list[float], has_accuracy: bool, suffix: str = "", rate: float | None = None
    ) -> None:
        loss, targets, correct = total
        names = [self.name, *([_beside(self.name, "accuracy")] if has_accuracy else [])]
        means = {f"{name}{suffix}": torch.tensor(value / targets) for name, value in zip(names, (loss, correct))}
        # Past `pl_module.log`, which would show nothing in an epoch that is shorter than the interval.
        trainer.callback_metrics.update(means)
        row = {name: float(mean) for name, mean in means.items()}
        if rate is not None:
            row[_beside(self.name, f"{self.targets}_per_second")] = rate
        for logger in trainer.loggers:
            logger.log_metrics({**row, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)

    def _log_interval(self, trainer: pl.Trainer, has_accuracy: bool) -> None:
        logged = self._logged
        if (totals := self._totals(trainer)) is not None:
            total = [sum(parts) for parts in zip(*totals, strict=True)]
            if total[1]:
                self._log(trainer, total, has_accuracy, rate=total[1] / max(1e-9, time.monotonic() - self._since))
                logged = True
            elif trainer.is_last_batch and not logged:
                raise RunFailedError(
                    f"epoch {trainer.current_epoch} had no target: every `count` was 0, as where all labels are -100;"
                    " correct the labels"
                )
            self._epoch = [sum(parts) for parts in zip(self._epoch, totals[1], strict=True)]
        self._start(trainer.global_step)
        self._logged = logged

    def _log_epoch(self, trainer: pl.Trainer, has_accuracy: bool) -> None:
        """Log the means of the epoch; what the next interval logs of it does not count for the next epoch."""
        totals = self._totals(trainer) or [[0.0, 0.0, 0.0]] * 2
        total = [sum(parts) for parts in zip(self._epoch, totals[1], strict=True)]
        if total[1]:
            self._log(trainer, total, has_accuracy, "_epoch")
        self._epoch = [0.0, 0.0, 0.0]
        self._earlier, self._folded = self._earlier + self._folded, 0.0
