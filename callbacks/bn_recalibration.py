"""Recomputation of the running statistics of BatchNorm for the final weights of a run.

The running statistics belong to the weights of training. Averaged weights have other activations (Izmailov et al.,
2018). Lightning calls `update_bn` only in its own `StochasticWeightAveraging`.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn
from typing_extensions import override

from callbacks.lib.lightning_internals import OneLightningCallback
from callbacks.lib.loaded_updates import numbered_loaders
from callbacks.lib.updates import flattened
from callbacks.update_loop import install_update_loop
from datamodules.errors import UserError
from datamodules.lightning import pl
from datamodules.notes import warn


class BNRecalibration(OneLightningCallback):
    """Callback that recomputes the running statistics of BatchNorm for the final weights, in one pass over the data.

    It calls `torch.optim.swa_utils.update_bn` when the fit ends, after `WeightAveraging` has put the average into the
    module. The statistics are equal means over the micro-batches of the first epoch. Each device reads all
    micro-batches, so the bits are the same on any number of devices. Save the result by ``trainer.save_checkpoint``;
    the checkpoints of the run are older and hold the former statistics.

    ``forward`` of the module is called with the first part of a batch, in training mode, within `torch.no_grad`.

    Runs on: `on_train_end`; if a resumed run has nothing left to train, `on_fit_end`, when Lightning has already moved
    the module to the CPU.

    Raises:
        UserError: the module has no BatchNorm, there are several training loaders, or on several devices the loader
            does not number its micro-batches.

    Example:
        >>> from callbacks import WeightAveraging
        >>> trainer = pl.Trainer(callbacks=[WeightAveraging(ema=0.999), BNRecalibration()], logger=False)
    """

    _has_ended = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            install_update_loop(trainer)
            self._has_ended = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(isinstance(layer, _BatchNorm) for layer in pl_module.modules()):
            raise UserError("BNRecalibration has nothing to compute: no layer is BatchNorm; leave it out")
        loader = trainer.train_dataloader
        if len(flattened(loader)) > 1 or (trainer.world_size > 1 and not numbered_loaders(loader)):
            raise UserError(
                "BNRecalibration reads all micro-batches of one training loader, on several devices by their numbers:"
                " use one DataLoader over a data set with a length and a sampler of torch, or one of datamodules"
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._has_ended:
            self.on_train_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_ended = True
        norms = [(name, layer) for name, layer in pl_module.named_modules() if isinstance(layer, _BatchNorm)]
        frozen = [name for name, layer in norms if pl_module.training and not layer.training]
        if frozen:
            warn(f"warning: BNRecalibration leaves the statistics as they are, since {frozen[0]} is frozen")
            return
        with trainer.precision_plugin.forward_context():
            update_bn(self._inputs(trainer, pl_module.device), pl_module)

    def _inputs(self, trainer: pl.Trainer, device: torch.device) -> Iterator[Any]:
        """Yield the batches of the first epoch as `training_step` gets them, the same on all ranks."""
        seeds = install_update_loop(trainer).step.seeds
        for number, batch in enumerate(self._micro_batches(trainer)):
            if seeds is not None:
                seeds.seed_micro_batch(trainer, number)
            yield trainer.strategy.batch_to_device(batch, device)

    def _micro_batches(self, trainer: pl.Trainer) -> Iterator[Any]:
        loader: Any = trainer.train_dataloader
        if numbered_loaders(loader):
            # As the loader of a single rank, so that each rank reads all micro-batches from the epoch's start.
            loader = copy.copy(loader)
            loader.rank = 0
            loader.world_size = 1
            loader.divide_updates(loader.items_of(1))
            loader.load_state_dict({"epoch": 0, "consumed": 0})
        for update in loader:
            yield from update.batches
