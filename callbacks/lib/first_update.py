"""Warnings after the first micro-batch of a fit: properties that make bits depend on the number of devices."""

from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.lib.batch_norm import OrderedStatistics, is_synchronised, other_buffers
from callbacks.lib.updates import resumable_loaders
from datamodules.notes import warn


class FirstMicroBatch:
    """Comparison of a module's buffers before and after the first forward pass of a fit.

    Args:
        trainer: a Trainer whose updates are sums over micro-batches.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        for parameter in self.module.parameters():
            parameter.grad = None  # Gradients from before the fit would be added to the update's.
        # Copied only where the bits can differ: on several devices.
        buffers = other_buffers(self.module) if trainer.world_size > 1 else {}
        self.buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    def finish(self, statistics: OrderedStatistics) -> None:
        """Warn of repeated BatchNorm layers, changed buffers, and loaders without numbers."""
        repeated = statistics.repeated()
        if repeated:
            warn(
                f"note: {len(repeated)} {type(repeated[0]).__name__} layers are called more than once in a"
                " training_step: their running statistics follow the last call"
            )
        buffers = other_buffers(self.module)
        changed_names = [
            name for name, value in self.buffers.items() if not torch.equal(buffers.get(name, value), value)
        ]
        if changed_names:
            warn(f"note: {changed_names[0]} changes in each forward pass: the bits depend on the number of devices")
        if self.trainer.world_size > 1:
            self._warn_of_device_dependence()

    def _warn_of_device_dependence(self) -> None:
        loader = self.trainer.train_dataloader
        if not resumable_loaders(loader):
            name = type(getattr(loader, "loader", loader)).__name__
            warn(
                f"note: a {name} does not number its micro-batches: on another number of devices the run is equal"
                " within rounding only; use a DataLoader over a data set with a length and a sampler of torch, or a"
                " loader of datamodules, for equal bits"
            )
        elif any(map(is_synchronised, self.module.modules())):
            warn("note: SyncBN normalises over what the devices see in one step: the bits depend on their number")
        if is_overridden("backward", self.module):
            warn(
                f"note: {type(self.module).__name__}.backward runs for each micro-batch, and on several devices finds"
                " the mean of all after the last one: change gradients in on_after_backward, which finds it on any"
                " number of devices"
            )
