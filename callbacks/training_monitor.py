"""Gradient norm, measured only at the updates that are logged.

`self.log("grad_norm", ...)` waits for the device in every batch; `TrainingMonitor` only at the logged updates.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.lightning_internals import log_after_update, log_interval
from callbacks.lib.one_lightning import OneLightningCallback
from callbacks.lib.updates import updates_made
from datamodules.lightning import pl


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements as a scalar tensor, float32 or float64.

    Example:
        >>> total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    # A sparse gradient may hold several values of one element, which `coalesce` adds.
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    if not values:
        return torch.zeros(())
    norms = torch._foreach_norm(values)
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked)
    return total


class TrainingMonitor(OneLightningCallback):
    """Logs the norm of the gradients as "monitor/gradient_norm".

    The norm is over the whole update, all micro-batches and ranks, unscaled and before clipping. Only parameters with
    a gradient count, so frozen ones do not. `TrainLoss` logs the samples per second.

    Runs on: `on_before_optimizer_step` and `on_train_batch_end`, once per ``log_every_n_steps`` updates, where it waits
    for the device once. It does not change the run.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainingMonitor()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        """Values of the last log."""
        self._norms: dict[Optimizer, tuple[Tensor, float]] = {}
        self._is_due = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._norms = {}
        self._epoch_start = updates_made(trainer)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_start = updates_made(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = log_interval(trainer)
        if not every:
            return
        updates = updates_made(trainer)
        # An epoch shorter than the interval is logged at its last update, so that each epoch has a value.
        is_short_epoch = self._epoch_start // every == updates // every
        self._is_due = (updates + 1) % every == 0 or (is_short_epoch and trainer.is_last_batch)
        if self._is_due:
            self._step_before = trainer.global_step

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self._is_due:
            return
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # A fused optimizer unscales the gradients in its step, after this hook; others have unscaled ones here.
        is_scaled = scaler is not None and hasattr(optimizer, "_step_supports_amp_scaling")
        scale = scaler.get_scale() if is_scaled and scaler else 1.0
        self._norms[optimizer] = (total_norm(gradients), scale)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_due or trainer.global_step == self._step_before:
            return
        norm = math.hypot(*(float(norm) / scale for norm, scale in self._norms.values()))
        self._norms = {}
        self.values = {"monitor/gradient_norm": norm}
        log_after_update(trainer, self.values)
