"""Layers that stay as they are, for a while or for the whole run.

``requires_grad=False`` alone lets running statistics drift and dropout act, and any ``train()`` undoes an ``eval()``.
`BackboneFinetuning` trains a different model on each rank once it unfreezes (#20340), freezes again for good when a run
is resumed later (#21901), and changes the optimiser's groups in mid-run. Here groups never change: a parameter without
gradient is skipped by every optimiser, with its momentum and weight decay.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.freezing import (
    check_freezing,
    find_name,
    frozen_objects,
    keep_in_eval,
    matching_names,
    module_names,
    names_before,
    parameter_names,
)
from callbacks.lib.updates import duration_to_updates
from datamodules.errors import UserError

__all__ = ["FreezeLayers", "wrap_again"]

log = logging.getLogger("lightning_recipes")


def wrap_again(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Lets DDP reduce the gradients of those parameters that train now; it looks once, when it wraps a module.

    Every rank must call it, between updates. What DDP was told about buffers stays, and so do their values, which
    wrapping would replace with those of rank 0.
    """
    strategy: Any = trainer.strategy
    old = strategy.model
    if not isinstance(old, DistributedDataParallel):
        return
    buffers = [buffer.detach().clone() for buffer in pl_module.buffers()]
    strategy.model = pl_module
    strategy.configure_ddp()
    strategy.model.broadcast_buffers = old.broadcast_buffers
    strategy.model.parameters_to_ignore = old.parameters_to_ignore
    with torch.no_grad():
        for buffer, value in zip(pl_module.buffers(), buffers, strict=True):
            buffer.copy_(value)


class FreezeLayers(pl.Callback):
    """Keeps layers to the bit as they are, and lets them train from the moment that you name.

    Frozen means: no gradient, no momentum, no weight decay; evaluation mode through every ``train()``, so batch
    normalisation uses its running statistics and keeps them, and dropout is off. Layers before the first that trains
    cost no backward pass. The optimiser holds all parameters from the first step, frozen ones too, so schedulers,
    monitors and checkpoints never see another structure. What is frozen is a function of the epoch and the update:
    nothing is saved, and a run can be resumed anywhere. Under DDP the module is wrapped again, on all ranks, when that
    changes. Parameters that required no gradient before the fit never train.

    A name is written from its end: ``layer3`` finds ``network.layer3``. Of equal ends the one nested least is meant.

    Runs on: `on_fit_start`, `on_train_start`, `on_train_epoch_start`, `on_train_batch_start`. `teardown` and
    `on_exception` put back what each parameter and module was; tests and predictions find nothing changed.

    Args:
        until: freeze what is defined before this submodule; it trains, and what follows.
        patterns: freeze modules and parameters whose name, or an end of it, matches: ``["*.bn*"]``, ``["embedding"]``.
        unfreeze: freeze these modules or parameters until then: ``{"layer4": "1 epochs", "layer3": "500 steps"}``.
            Everything inside trains from that moment on, whatever else froze it; ``"*"`` is everything.
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
        patterns: Sequence[str] = (),
        unfreeze: Mapping[str, int | str] | None = None,
        train_bn: bool = True,
    ) -> None:
        super().__init__()
        self.until = until
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        self.unfreeze = dict(unfreeze or {})
        self.train_bn = train_bn
        if until is None and not self.patterns and not self.unfreeze and train_bn:
            raise UserError('FreezeLayers() has nothing to freeze: pass until="layer4", patterns or unfreeze')
        self._durations = {name: Duration.parse(when) for name, when in self.unfreeze.items()}
        self._starts: dict[str, Duration] = {}
        self._frozen: set[str] = set()
        self._thawed: frozenset[str] | None = None
        self._requires_grad: dict[nn.Parameter, bool] = {}
        self._training: dict[nn.Module, bool] = {}
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self._wrapped_otherwise = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After DDP and the optimisers: so layers of configure_model are there, and none is left out for being frozen.
        if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
            raise UserError(
                f"{type(trainer.strategy).__name__} splits parameters, so FreezeLayers cannot change which of them"
                ' train: pass strategy="ddp", or call requires_grad_(False) in configure_model instead'
            )
        self._release()
        modules = module_names(pl_module)
        names = [*modules, *parameter_names(pl_module)]
        self._starts = {
            "*" if name in ("*", "all") else find_name(name, names, "unfreeze"): start
            for name, start in self._durations.items()
        }
        self._frozen = matching_names(self.patterns, names) | (set(self._starts) - {"*"})
        if self.until is not None:
            self._frozen |= names_before(pl_module, find_name(self.until, modules, "until"))
        note = rank_zero_only(log.warning)
        for line in check_freezing(pl_module, self._frozen, self._starts, trainer.optimizers):
            note(line)
        _, parameters = frozen_objects(pl_module, self._frozen, ())
        if self.until is not None and not parameters:
            note("FreezeLayers(until=%r) freezes nothing: no parameter is defined before it", self.until)
        self._requires_grad = {parameter: parameter.requires_grad for parameter in pl_module.parameters()}
        self._freeze_parameters(parameters)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Whole epochs stay epochs: they mean the same where the number of updates in one is unknown, or changes.
        self._starts = {
            name: start
            if start.unit == "epochs" and start.value == int(start.value)
            else Duration(duration_to_updates(start, trainer), "steps")
            for name, start in self._starts.items()
        }
        self._training = {module: module.training for module in pl_module.modules()}
        self._enter_phase(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._enter_phase(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._enter_phase(trainer, pl_module)

    def _enter_phase(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Epoch and update change between windows only, so no phase begins while gradients are being summed.
        reached = {"epochs": trainer.current_epoch, "steps": trainer.global_step}
        thawed = frozenset(name for name, start in self._starts.items() if reached[start.unit] >= start.value)
        if thawed == self._thawed:
            return
        self._thawed = thawed
        modules, parameters = frozen_objects(pl_module, self._frozen, thawed)
        if not self.train_bn:
            modules |= {module for module in pl_module.modules() if isinstance(module, _BatchNorm)}
        self._freeze_parameters(parameters)
        self._freeze_modules(modules)
        if self._wrapped_otherwise:
            wrap_again(trainer, pl_module)
            self._wrapped_otherwise = False
        trains, total = (sum(p.numel() for p in self._requires_grad if p.requires_grad or every) for every in (0, 1))
        unfrozen = f" ({', '.join(sorted(thawed))} unfrozen)" if thawed else ""
        place = f"epoch {trainer.current_epoch + 1}, update {trainer.global_step}"
        rank_zero_only(log.info)("%s: %s of %s parameters train%s", place, f"{trains:,}", f"{total:,}", unfrozen)

    def _freeze_parameters(self, frozen: set[nn.Parameter]) -> None:
        for parameter, before in self._requires_grad.items():
            # A gradient is None from here on: Lightning has cleared all of them before it can matter.
            trains = before and parameter not in frozen
            self._wrapped_otherwise |= parameter.requires_grad != trains
            parameter.requires_grad_(trains)

    def _freeze_modules(self, frozen: set[nn.Module]) -> None:
        for module in self._handles.keys() - frozen:
            self._handles.pop(module).remove()
            module.training = self._training[module]
        for module in frozen:
            module.training = False
            if module not in self._handles:
                self._handles[module] = module.register_forward_pre_hook(keep_in_eval)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        for parameter, before in self._requires_grad.items():
            parameter.requires_grad_(before)
        self._freeze_modules(set())
        self._requires_grad, self._training = {}, {}
        self._thawed, self._wrapped_otherwise = None, False
