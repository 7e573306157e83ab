"""The training loss as it should be read: the mean over all targets since the last log.

`self.log("loss", loss)` in every step costs 0.4 ms a step, and shows one batch of one rank. This one costs microseconds
and does not make the device wait.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from callbacks.lib.targets import count_targets, sum_over_ranks
from callbacks.lib.trainer_attributes import log_interval
from datamodules.errors import RunFailedError

__all__ = ["TrainLoss", "weighted_sum"]

_FOLD = 64

_SUMS = "train_loss_sums"
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


def _sum(means: Tensor, counts: Tensor) -> Tensor:
    return torch.stack((torch.where(counts > 0, means * counts, 0.0).sum(), counts.sum()))


class TrainLoss(pl.Callback):
    """Logs the mean loss over the targets of all ranks, once per ``log_every_n_steps`` updates.

    An epoch with fewer updates logs once, at its end.

    Runs on: every training batch, where it keeps a reference to the loss; `training_step` returns it, and may add the
    ``count`` of targets behind it. Logging costs one reduction of two numbers. Checkpoints hold the sums since the
    last log, so that a resumed run logs the same.

    Args:
        name: under which it is logged.

    Raises:
        RunFailedError: an epoch had no target, on any rank.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainLoss("loss")], logger=False, accelerator="cpu")
    """

    def __init__(self, name: str = "train/loss") -> None:
        self.name = name
        self._saved: dict[str, Any] | None = None
        self._start(0)

    def _start(self, update: int) -> None:
        self._update = update
        self._means: list[Tensor] = []
        self._counts: list[int | Tensor] = []
        self._folded: Tensor | float = 0.0
        self._logged = False

    def _fold(self) -> None:
        if self._means:
            self._folded = self._folded + weighted_sum(self._means, self._counts)
            self._means, self._counts = [], []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.global_step)

        if self._saved is not None:
            self._load(trainer, self._saved["sums"].to(pl_module.device))
            self._update, self._logged = self._saved["update"], self._saved["logged"]
            self._saved = None

    def _load(self, trainer: pl.Trainer, by_rank: Tensor) -> None:
        """Take this rank's sums of (ranks, 2, 1 + micro-batches), or all of them on rank 0 if their number differs."""
        if len(by_rank) == trainer.world_size:
            mine = by_rank[trainer.global_rank]
            self._means, self._counts = list(mine[0, 1:]), list(mine[1, 1:])
            self._folded = mine[:, 0] if bool(mine[1, 0]) else 0.0
        elif trainer.global_rank == 0:
            self._folded = by_rank[:, :, 0].sum(0) + _sum(*by_rank[:, :, 1:].unbind(1))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit" or trainer.interrupted:
            return  # After an exception the other ranks may be gone.
        means = [mean.float().to(pl_module.device) for mean in self._means]
        counts = [torch.as_tensor(count, device=pl_module.device).float() for count in self._counts]
        folded = torch.as_tensor(self._folded, device=pl_module.device).float().expand(2)
        sums = torch.stack([torch.stack([folded[0], *means]), torch.stack([folded[1], *counts])])
        by_rank = trainer.strategy.all_gather(sums).reshape(trainer.world_size, *sums.shape)
        checkpoint.setdefault(_SUMS, {})[self.name] = {"sums": by_rank, "update": self._update, "logged": self._logged}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get(_SUMS, {}).get(self.name) if trainer.state.fn == "fit" else None

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = False

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = log_interval(trainer)
        if not every:
            return
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            # Lightning hands out the loss divided by the accumulation factor.
            factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._means.append(outputs["loss"] if factor == 1 else outputs["loss"] * factor)
            self._counts.append(count_targets(outputs, batch))
            if len(self._means) == _FOLD:
                self._fold()
        interval_ends = trainer.global_step // every > self._update // every
        if interval_ends or (trainer.is_last_batch and not self._logged):
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        self._fold()
        logged = self._logged
        if isinstance(total := self._folded, Tensor):
            if trainer.world_size > 1:
                total = sum_over_ranks(total, total.device, total.dtype)
            if total[1]:
                mean = total[0] / total[1]
                # Past `pl_module.log`, which would show nothing in an epoch that is shorter than the interval.
                trainer.callback_metrics[self.name] = mean
                for logger in trainer.loggers:
                    logger.log_metrics({self.name: float(mean)}, step=trainer.global_step - 1)
                logged = True
            elif trainer.is_last_batch and not logged:
                raise RunFailedError(
                    f"epoch {trainer.current_epoch} had no target: every `count` was 0, as where all labels are -100;"
                    " correct the labels"
                )
        self._start(trainer.global_step)
        self._logged = logged
