"""Exact freezing of layers for all or part of a run.

Lightning's `BackboneFinetuning` trains a different model on each rank once it unfreezes (#20340), and if a run resumes
after that, its layers stay frozen (#21901).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.freezing import (
    FrozenLayers,
    check_freezing,
    find_name,
    frozen_objects,
    init_momentum_buffers,
    module_names,
    names_before,
    parameter_names,
)
from callbacks.lib.one_lightning import OneLightningCallback
from callbacks.lib.updates import duration_to_updates
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import inform, warn


def rewrap_ddp(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Wrap the module in DDP again if other parameters train than those that DDP reduces; a collective call.

    All ranks must call it between updates. DDP's settings for buffers and the values of buffers are kept.
    """
    strategy: Any = trainer.strategy
    old_ddp = strategy.model
    if not isinstance(old_ddp, DistributedDataParallel):
        return
    # DDP reduces the parameters that required a gradient when it wrapped the module.
    num_reduced = old_ddp._get_ddp_logging_data()["num_parameter_tensors"]
    if num_reduced == sum(p.requires_grad for p in pl_module.parameters()):
        return
    # Wrapping replaces buffers with those of rank 0, and each rank may have its own running statistics.
    buffers = [buffer.detach().clone() for buffer in pl_module.buffers()]
    strategy.model = pl_module
    strategy.configure_ddp()
    strategy.model.broadcast_buffers = old_ddp.broadcast_buffers
    strategy.model.parameters_to_ignore = old_ddp.parameters_to_ignore
    with torch.no_grad():
        for buffer, value in zip(pl_module.buffers(), buffers, strict=True):
            buffer.copy_(value)


def is_reached(start: Duration, trainer: pl.Trainer) -> bool:
    """Whether a run has reached a duration from its start; works from `on_train_start` on.

    Raises:
        UserError: the duration is not in whole epochs, and the module optimizes manually.
    """
    # Not converted to updates, whose number in an epoch may be unknown or change at a resume.
    if start.unit == "epochs" and start.value == int(start.value):
        return trainer.current_epoch >= start.value
    if not trainer.lightning_module.automatic_optimization:
        raise UserError(
            f'unfreezing at "{start}" counts updates, and {type(trainer.lightning_module).__name__} optimises manually:'
            ' write whole epochs, such as "2 epochs"'
        )
    return trainer.global_step >= duration_to_updates(start, trainer)


@dataclass
class _Fit:
    """State of `FreezeLayers` in one fit."""

    layers: FrozenLayers
    starts: dict[str, Duration]
    """When names are unfrozen."""
    unfrozen: set[str] | None = None


class FreezeLayers(OneLightningCallback):
    """Keeps layers bit-identical, for the whole run or until a given epoch or update.

    Frozen layers are those of `freeze_layers`, and get no momentum and no weight decay. The optimiser holds all
    parameters from the first step. The epoch and the update decide what is frozen: nothing is saved, and a run
    resumes anywhere. Under DDP all ranks wrap the module again when that changes. Parameters that
    required no gradient before the fit never train.

    Runs on: `on_fit_start`, `on_train_start`, `on_train_epoch_start`, `on_train_batch_start`. `teardown` and
    `on_exception` restore each parameter and module, so tests and predictions find nothing changed.

    Args:
        until: freeze what is defined before this submodule. This one and the following ones train.
        unfreeze: freeze these modules or parameters until then: ``{"layer4": "1 epochs", "layer3": "500 steps"}``.
            From then on everything inside trains, whatever else froze it; ``"*"`` matches everything.
        train_bn: False keeps the running statistics of *all* batch normalisation; weights and biases train.

    Raises:
        UserError: a name is unknown or ambiguous, nothing would train, the optimiser lacks what is to train later, or
            the strategy is not DDP or a single device.

    Example:
        >>> freeze = FreezeLayers(until="layer4", unfreeze={"layer3": "1 epochs", "*": "50%"})
        >>> trainer = pl.Trainer(callbacks=[freeze], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        until: str | None = None,
        unfreeze: Mapping[str, int | str] | None = None,
        train_bn: bool = True,
    ) -> None:
        super().__init__()
        self.until = until
        self.unfreeze = dict(unfreeze or {})
        self.train_bn = train_bn
        if until is None and not self.unfreeze and train_bn:
            raise UserError('FreezeLayers() has nothing to freeze: pass until="layer4" or unfreeze')
        self._starts = {name: Duration.parse(at, f"unfreezing {name!r} at") for name, at in self.unfreeze.items()}
        self._fit: _Fit | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After DDP and the optimizers were made: layers of `configure_model` exist, and `configure_optimizers` has seen
        # all parameters as trainable, so that none is left out of the optimizer for being frozen.
        if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
            raise UserError(
                f"{type(trainer.strategy).__name__} splits parameters, so FreezeLayers cannot change which of them"
                f" train: pass {spelled('strategy', 'ddp')}, or call requires_grad_(False) in configure_model instead"
            )
        self._release()
        unbuilt = [name for name, parameter in pl_module.named_parameters() if is_lazy(parameter)]
        if unbuilt:
            raise UserError(
                f"{unbuilt[0]} is built with the first batch, and FreezeLayers has to know its parameters before: call"
                " the network once with an input of the right shape in the module's constructor"
            )
        known = [*module_names(pl_module), *parameter_names(pl_module)]
        starts = {name if name == "*" else find_name(name, known): start for name, start in self._starts.items()}
        names = names_before(pl_module, self.until) | (starts.keys() - {"*"})
        for line in check_freezing(pl_module, names, starts, trainer.optimizers):
            warn(line)
        if self.until is not None and not frozen_objects(pl_module, names, ())[1]:
            warn("nothing is frozen: no parameter is defined before %r", self.until)
        self._fit = _Fit(FrozenLayers(pl_module, names, self.train_bn), starts)
        self._fit.layers.freeze_parameters()

    def _unfreeze(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        fit = self._fit
        if fit is None:
            return
        # Epoch and update change only between updates, so nothing unfreezes while gradients are summed.
        unfrozen = {name for name, start in fit.starts.items() if is_reached(start, trainer)}
        if unfrozen == fit.unfrozen:
            return
        fit.unfrozen = unfrozen
        fit.layers.unfreeze(*unfrozen)
        init_momentum_buffers(trainer.optimizers)
        rewrap_ddp(trainer, pl_module)
        num_training, num_total = fit.layers.counts()
        names = f" ({', '.join(sorted(unfrozen))} unfrozen)" if unfrozen else ""
        position = f"epoch {trainer.current_epoch + 1}, update {trainer.global_step}"
        inform("%s: %s of %s parameters train%s", position, f"{num_training:,}", f"{num_total:,}", names)

    on_train_start = on_train_epoch_start = on_train_batch_start = _unfreeze

    def _release(self, *args: Any, **kwargs: Any) -> None:
        if self._fit is not None:
            self._fit.layers.restore()
        self._fit = None

    on_exception = teardown = _release
