"""Layers that stay as they are, for a while or for the whole run.

`BackboneFinetuning` trains a different model on each rank once it unfreezes (#20340), freezes again for good when a run
is resumed later (#21901), and changes the optimiser's groups in mid-run. Here groups never change: a parameter without
gradient is skipped by every optimiser, with its momentum and weight decay.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.layers import find_name, inside, matching_names, module_names, parameter_names
from callbacks.lib.updates import duration_to_updates, updates_made
from datamodules.errors import UserError

__all__ = ["FreezeLayers", "FrozenLayers", "freeze_layers"]

log = logging.getLogger("lightning_recipes")


def names_before(module: nn.Module, until: str) -> set[str]:
    """All that is defined before the submodule `until`.

    That includes the earlier children and the own parameters of the modules around it, but not these modules.

    Example:
        >>> sorted(names_before(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), "2"))
        ['0', '0.bias', '0.weight', '1']
    """
    before: set[str] = set()
    for name, submodule in module.named_modules(remove_duplicate=False):
        if name == until:
            break
        before.update(n for n, _ in submodule.named_parameters(name, recurse=False, remove_duplicate=False))
        if name and not until.startswith(f"{name}."):
            before.add(name)
    return before


def drop_nothing(layer: nn.Module) -> None:
    """Evaluation mode for one layer; of a recurrent one no dropout, which computes the same.

    cuDNN computes no backward pass through an RNN, GRU or LSTM in evaluation mode, and a frozen one may stand between
    layers that train.
    """
    if isinstance(layer, nn.RNNBase):
        layer.dropout = 0.0
    elif layer.training:
        layer.training = False


def mode_of(layer: nn.Module) -> tuple[bool, float | None]:
    """What `drop_nothing` changes: the mode, and the dropout of a recurrent layer."""
    return layer.training, layer.dropout if isinstance(layer, nn.RNNBase) else None


def set_mode(layer: nn.Module, mode: tuple[bool, float | None]) -> None:
    """Puts back what `mode_of` returned."""
    layer.training, dropout = mode
    if dropout is not None:
        layer.dropout = dropout  # type: ignore[assignment]


def keep_in_eval(module: nn.Module, _: Any) -> None:
    """A forward pre-hook that puts the module into evaluation mode, also after ``train()``; see `drop_nothing`.

    A function of a module and no closure, so that copies and pickles of the module work.
    """
    drop_nothing(module)


def frozen_objects(
    module: nn.Module, frozen: Collection[str], thawed: Collection[str]
) -> tuple[set[nn.Module], set[Parameter]]:
    """The modules and parameters inside `frozen` names and outside `thawed` ones.

    What is shared under several names is frozen if all of them are: no owner that trains is held back.

    Example:
        >>> network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> network[1].weight = network[0].weight
        >>> [list(p.shape) for p in frozen_objects(network, {"0"}, set())[1]]  # the bias alone
        [[1]]
    """

    def select(named: Iterable[tuple[str, Any]]) -> set[Any]:
        chosen: set[Any] = set()
        others: set[Any] = set()
        for name, item in named:
            (chosen if inside(name, frozen) and not inside(name, thawed) else others).add(item)
        return chosen - others

    return (
        select((n, m) for n, m in module.named_modules(remove_duplicate=False) if n),
        select(module.named_parameters(remove_duplicate=False)),
    )


def names_to_freeze(module: nn.Module, until: str | None, patterns: str | Sequence[str]) -> set[str]:
    """The names of what `freeze_layers` freezes.

    Raises:
        UserError: a name is unknown or ambiguous.
    """
    modules = module_names(module)
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    names = matching_names(patterns, [*modules, *parameter_names(module)])
    return names if until is None else names | names_before(module, find_name(until, modules, "until"))


class FrozenLayers:
    """Layers of a module that stay as they are until `unfreeze` or `restore`; what `freeze_layers` returns.

    A context manager, which restores at its end.

    Args:
        module: it is changed in place.
        names: of the modules and parameters to freeze, in full.
        train_bn: False keeps the running statistics of all batch normalisation, unfrozen layers too.
    """

    def __init__(self, module: nn.Module, names: Collection[str], train_bn: bool = True) -> None:
        self.module, self.names, self.train_bn = module, frozenset(names), train_bn
        self._requires_grad = {parameter: parameter.requires_grad for parameter in module.parameters()}
        self._modes: dict[nn.Module, tuple[bool, float | None]] = {}
        self._handles: dict[nn.Module, RemovableHandle] = {}
        self._unfrozen: frozenset[str] = frozenset()

    def freeze(self) -> None:
        """Freeze everything of those names that is not unfrozen."""
        modules, _ = frozen_objects(self.module, self.names, self._unfrozen)
        if not self.train_bn:
            modules |= {module for module in self.module.modules() if isinstance(module, _BatchNorm)}
        self.freeze_parameters()
        self._freeze_modules(modules)

    def freeze_parameters(self) -> None:
        """Freeze parameters only; modules keep their modes, which Lightning looks at when it begins to train."""
        self._freeze_parameters(frozen_objects(self.module, self.names, self._unfrozen)[1])

    def unfreeze(self, *names: str) -> None:
        """Let modules or parameters train again, with everything inside them.

        Args:
            names: full names, or ends of them; ``"*"`` is everything that was frozen.

        Raises:
            UserError: a name is unknown or ambiguous.
        """
        known = [*module_names(self.module), *parameter_names(self.module)]
        self._unfrozen |= {name if name == "*" else find_name(name, known, "names") for name in names}
        self.freeze()

    def restore(self) -> None:
        """Give every parameter and module back what it had when it was frozen."""
        self._freeze_parameters(set())
        self._freeze_modules(set())

    def counts(self) -> tuple[int, int]:
        """The number of parameters that train, and of all."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self._requires_grad]
        return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)

    def _freeze_parameters(self, parameters: set[Parameter]) -> None:
        for parameter, before in self._requires_grad.items():
            parameter.requires_grad_(before and parameter not in parameters)

    def _freeze_modules(self, modules: set[nn.Module]) -> None:
        for module in self._handles.keys() - modules:
            self._handles.pop(module).remove()
            set_mode(module, self._modes[module])
        for module in modules:
            if module not in self._handles:
                self._modes[module] = mode_of(module)
                self._handles[module] = module.register_forward_pre_hook(keep_in_eval)
            drop_nothing(module)

    def __enter__(self) -> "FrozenLayers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def begin_momentum(optimizers: Iterable[Optimizer]) -> None:
    """Let parameters of a fused SGD begin to train beside others of their group that have a momentum.

    torch's kernel takes a first step of all of a group or of none, and raises a TypeError otherwise (2.15). A momentum
    of zero gives the same first step, unless there is dampening.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            if not group["fused"] or all(state.get("momentum_buffer") is None for state in states):
                continue
            for parameter in group["params"]:
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def freeze_layers(
    module: nn.Module, until: str | None = None, patterns: str | Sequence[str] = (), train_bn: bool = True
) -> FrozenLayers:
    """Keeps layers of a module exactly as they are, in place; what is returned unfreezes them.

    Frozen means no gradient, and evaluation mode through every ``train()``: batch normalisation uses its running
    statistics and keeps them, and dropout is off. RNN, GRU and LSTM stay in training mode without dropout, since cuDNN
    computes no backward pass through them in evaluation mode. Layers before the first that trains cost no backward
    pass. A name may be written from its end: ``layer3`` finds ``network.layer3``, and of several the one nested least.

    A parameter that has a gradient already keeps it, and an optimiser would use it: freeze after ``zero_grad()``. DDP
    only reduces the gradients of parameters that require one when it wraps a module, so wrap after a change.

    Args:
        until: freeze what is defined before this submodule; it trains, and what follows.
        patterns: freeze modules and parameters whose name, or an end of it, matches: ``["*.bn*"]``, ``["embedding"]``.
        train_bn: False keeps the running statistics of *all* batch normalisation; weights and biases train.

    Raises:
        UserError: a name is unknown or ambiguous, or there is nothing to freeze.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> frozen = freeze_layers(net, until="2")
        >>> net = net.train()
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['2.weight', '2.bias']
        >>> frozen.unfreeze("0")
        >>> frozen.counts()
        (30, 38)
        >>> frozen.restore()
        >>> frozen.counts()
        (38, 38)
    """
    if until is None and not patterns and train_bn:
        raise UserError('freeze_layers has nothing to freeze: pass until="layer4", patterns, or train_bn=False')
    frozen = FrozenLayers(module, names_to_freeze(module, until, patterns), train_bn)
    frozen.freeze()
    return frozen


def check_freezing(
    module: nn.Module, frozen: Collection[str], thawed: Collection[str], optimizers: Iterable[Optimizer]
) -> list[str]:
    """Refuses a freezing under which training cannot begin or continue as asked, and returns notes for the user.

    Args:
        frozen: names that are frozen at the start.
        thawed: names that are unfrozen at some time.

    Raises:
        UserError: nothing trains at the start, or the optimisers lack a parameter that is to train later.
    """
    at_first = frozen_objects(module, frozen, ())[1]
    later = at_first - frozen_objects(module, frozen, thawed)[1]
    if not any(p.requires_grad and p not in at_first for p in module.parameters()):
        raise UserError(
            "FreezeLayers leaves nothing to train at the start of the run: every parameter is frozen; pass a later"
            " `until` or fewer patterns, or let one layer out of `unfreeze`"
        )
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = later - held
    left_out = [name for name, p in module.named_parameters() if p in missing and p.requires_grad]
    if left_out:
        raise UserError(
            f"configure_optimizers left out {', '.join(left_out[:3])}{' ...' if left_out[3:] else ''}, which are"
            f" to be unfrozen ({len(left_out)} in all): pass self.parameters(), frozen ones too"
        )
    return [
        f"{name} trains: it is shared with a layer that is not frozen"
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter not in at_first and inside(name, frozen)
    ]


def wrap_again(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Wraps the module in DDP again, which reduces the gradients of those parameters that train when it wraps.

    Every rank must call it, between updates. DDP's settings for buffers stay, and so do the values of buffers, which
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


def in_whole_epochs_or_updates(duration: Duration, trainer: pl.Trainer) -> Duration:
    """A duration that can be compared with the epoch or with the number of updates; from `on_train_start` on.

    Whole epochs stay epochs: they mean the same where the number of updates in one is unknown, or changes.
    """
    if duration.unit == "epochs" and duration.value == int(duration.value):
        return duration
    return Duration(duration_to_updates(duration, trainer), "steps")


def trainable(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that require a gradient."""
    return {parameter for parameter in module.parameters() if parameter.requires_grad}


class FreezeLayers(pl.Callback):
    """Keeps layers exactly as they are, for the whole run or until a given epoch or update.

    Frozen means: no gradient, no momentum, no weight decay; evaluation mode through every ``train()``, so batch
    normalisation uses its running statistics and keeps them, and dropout is off (recurrent layers stay in training mode
    without dropout, see `freeze_layers`). Layers before the first that trains cost no backward pass. The optimiser
    holds all parameters from the first step, frozen ones too, so schedulers, monitors and checkpoints never see another
    structure. What is frozen is a function of the epoch and the update:
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
        self._written: dict[str, Duration] = {}
        self._frozen: FrozenLayers | None = None
        self._unfrozen: set[str] | None = None
        self._wrapped: set[nn.Parameter] = set()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After DDP and the optimisers: so layers of configure_model are there, and none is left out for being frozen.
        if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
            raise UserError(
                f"{type(trainer.strategy).__name__} splits parameters, so FreezeLayers cannot change which of them"
                ' train: pass strategy="ddp", or call requires_grad_(False) in configure_model instead'
            )
        self._release()
        known = [*module_names(pl_module), *parameter_names(pl_module)]
        self._starts = {
            "*" if name in ("*", "all") else find_name(name, known, "unfreeze"): start
            for name, start in self._durations.items()
        }
        names = names_to_freeze(pl_module, self.until, self.patterns)
        names |= self._starts.keys() - {"*"}
        warn = rank_zero_only(log.warning)
        for line in check_freezing(pl_module, names, self._starts, trainer.optimizers):
            warn(line)
        if self.until is not None and not frozen_objects(pl_module, names, ())[1]:
            warn("FreezeLayers(until=%r) freezes nothing: no parameter is defined before it", self.until)
        self._wrapped = trainable(pl_module)
        self._frozen = FrozenLayers(pl_module, names, self.train_bn)
        self._frozen.freeze_parameters()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._written = self._starts
        self._starts = {name: in_whole_epochs_or_updates(start, trainer) for name, start in self._written.items()}
        self._unfreeze(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._unfreeze(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._unfreeze(trainer, pl_module)

    def _unfreeze(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Epoch and update change between windows only, so nothing unfreezes while gradients are being summed.
        unfrozen = {name for name, start in self._starts.items() if self._is_reached(name, start, trainer)}
        if unfrozen == self._unfrozen or self._frozen is None:
            return
        self._unfrozen = unfrozen
        self._frozen.unfreeze(*unfrozen)
        begin_momentum(trainer.optimizers)
        if trainable(pl_module) != self._wrapped:
            wrap_again(trainer, pl_module)
            self._wrapped = trainable(pl_module)
        trains, total = self._frozen.counts()
        names = f" ({', '.join(sorted(unfrozen))} unfrozen)" if unfrozen else ""
        place = f"epoch {trainer.current_epoch + 1}, update {trainer.global_step}"
        rank_zero_only(log.info)("%s: %s of %s parameters train%s", place, f"{trains:,}", f"{total:,}", names)

    def _is_reached(self, name: str, start: Duration, trainer: pl.Trainer) -> bool:
        if start.unit == "epochs":
            return trainer.current_epoch >= start.value
        return updates_made(trainer, self._written[name]) >= start.value

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        if self._frozen is not None:
            self._frozen.restore()
        self._frozen, self._unfrozen, self._wrapped = None, None, set()
