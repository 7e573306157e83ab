"""Runs that have diverged, stopped before their weights reach a checkpoint.

One update with a NaN in its gradient makes every weight NaN. The loss says so only where somebody looks, and the next
checkpoint replaces the last good one.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from callbacks.lib.hooks import log_interval
from datamodules.errors import RunFailedError


def first_not_finite(module: nn.Module) -> str | None:
    """The name of the first parameter or running statistic that holds a NaN or an infinity; None where all are finite.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> first_not_finite(layer) is None
        True
        >>> layer.bias.data.fill_(float("nan"))
        tensor([nan])
        >>> first_not_finite(layer)
        'bias'
    """
    statistics = [(name, value) for name, value in module.named_buffers() if "running_" in name]
    tensors = [*module.named_parameters(), *statistics]
    named = [(name, value.detach()) for name, value in tensors if value.is_floating_point()]
    # Sums carry NaN and infinity through, so that the device is waited for once. One that overflows is looked at below.
    sums = torch.stack([value.sum(dtype=torch.float32).to(named[0][1].device) for _, value in named]) if named else None
    if sums is None or bool(sums.isfinite().all()):
        return None
    return next((name for name, value in named if not bool(value.isfinite().all())), None)


class FiniteWeights(pl.Callback):
    """Stops a run whose weights are no longer finite, and keeps them out of its checkpoints.

    A loss that is NaN once does no harm where GradScaler skips the update, so weights and running statistics decide.

    Runs on: `on_train_batch_end`, once per ``log_every_n_steps`` updates, `on_train_end`, and before each checkpoint;
    one pass over the weights.

    Raises:
        RunFailedError: a weight is NaN or infinite.

    Example:
        >>> trainer = pl.Trainer(callbacks=[FiniteWeights()], logger=False, accelerator="cpu")
    """

    _checked_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checked_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = log_interval(trainer)
        if every and trainer.global_step // every != self._checked_step // every:
            self._check(trainer, pl_module)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and trainer.global_step != self._checked_step:
            self._check(trainer, pl_module)

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        before, self._checked_step = self._checked_step, trainer.global_step
        if name := first_not_finite(pl_module):
            raise RunFailedError(
                f"the run has diverged: {name} holds NaN or infinity after update {trainer.global_step:,} (epoch"
                f" {trainer.current_epoch + 1}), and all was finite after update {before:,}; checkpoints from before"
                ' are kept. Pass a lower `lr`, gradient_clip_val=1, a longer `warmup` or precision="32-true"'
            )

    on_train_end = _check
