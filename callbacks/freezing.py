"""Exact freezing of layers for all or part of a run.

Lightning's `BackboneFinetuning` trains a different model on each rank once it unfreezes (#20340), and if a run resumes
after that, its layers stay frozen (#21901).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.lib.lightning_internals import OneLightningCallback
from callbacks.lib.updates import Duration, duration_to_updates
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import inform, warn
from datamodules.ranges import check_types


def module_names(module: nn.Module) -> list[str]:
    """Return the names of all submodules in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name]


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of all parameters in the order of their definition; a shared one has several."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def find_name(name: str, names: Collection[str]) -> str:
    """Return the full name that ends in `name`; of several the least nested one.

    Raises:
        UserError: no name ends so, or several at the same depth do.

    Example:
        >>> find_name("conv1", ["net", "net.conv1", "net.layer1", "net.layer1.conv1"])
        'net.conv1'
    """
    matches = sorted({n for n in names if n == name or n.endswith(f".{name}")}, key=lambda n: (n.count("."), n))
    if not matches:
        ends = {".".join(n.split(".")[-length:]): n for n in names for length in range(1, n.count(".") + 2)}
        close = list(dict.fromkeys(ends[end] for end in get_close_matches(name, ends, n=5)))
        instead = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first names are {list(names)[:5]}"
        )
        raise UserError(f"there is no {name!r} in the module; {instead}")
    if len(matches) > 1 and matches[0].count(".") == matches[1].count("."):
        raise UserError(f"{name!r} could be {' or '.join(map(repr, matches))}: write one of them in full")
    return matches[0]


def matching_names(patterns: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the names that match one of the patterns, in full or from a dot on.

    Raises:
        UserError: a pattern matches nothing.

    Example:
        >>> sorted(matching_names(["bn*"], ["net.conv1", "net.bn1", "net.bn1.weight"]))
        ['net.bn1', 'net.bn1.weight']
    """
    all_matches: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matches:
            raise UserError(f"{pattern!r} matches no module or parameter; the first names are {list(names)[:5]}")
        all_matches |= matches
    return all_matches


def inside(name: str, outers: Collection[str]) -> bool:
    """Whether a name or one of its parents is among `outers`; everything is inside ``"*"``.

    Example:
        >>> inside("net.layer1.bn", {"net.layer1"}), inside("net.layer10", {"net.layer1"})
        (True, False)
    """
    ends = [i for i, letter in enumerate(name) if letter == "."]
    return "*" in outers or name in outers or any(name[:end] in outers for end in ends)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within the context, and restore the mode of each layer afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training  # Not by `train()`, which a layer may override.


def names_before(module: nn.Module, until: str | None) -> set[str]:
    """Return the names of modules and parameters defined before the submodule `until`; none if it is None.

    They include the earlier children and the direct parameters of the modules around `until`, but not these modules.

    Raises:
        UserError: the name is unknown or ambiguous.

    Example:
        >>> sorted(names_before(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), "2"))
        ['0', '0.bias', '0.weight', '1']
    """
    before: set[str] = set()
    if until is None:
        return before
    until = find_name(until, module_names(module))
    for name, submodule in module.named_modules(remove_duplicate=False):
        if name == until:
            break
        before.update(n for n, _ in submodule.named_parameters(name, recurse=False, remove_duplicate=False))
        if name and not until.startswith(f"{name}."):
            before.add(name)
    return before


def mode_of(layer: nn.Module) -> tuple[bool, float | None]:
    """Return the settings that `set_frozen_mode` changes: the mode, and the dropout of a recurrent layer."""
    return layer.training, layer.dropout if isinstance(layer, nn.RNNBase) else None


def set_mode(layer: nn.Module, mode: tuple[bool, float | None]) -> None:
    """Restore the settings that `mode_of` returned."""
    layer.training, dropout = mode
    if dropout is not None:
        layer.dropout = dropout  # type: ignore[assignment]


def set_frozen_mode(layer: nn.Module, _: Any = None) -> None:
    """Put one layer into evaluation mode; a recurrent layer stays in training mode without dropout.

    As a forward pre-hook it also acts after ``train()``. It is a function of the module file and not a closure, so that
    copies and pickles of the layer work.
    """
    if isinstance(layer, nn.RNNBase):
        # cuDNN has no backward pass through an RNN, GRU or LSTM in evaluation mode, which a layer before it may need.
        layer.dropout = 0.0
    elif layer.training:
        layer.training = False


def frozen_objects(
    module: nn.Module, frozen: Collection[str], unfrozen: Collection[str]
) -> tuple[set[nn.Module], set[Parameter]]:
    """Return the modules and parameters inside `frozen` names and outside `unfrozen` ones.

    One that is shared under several names is frozen only if all of them are, so that no owner that trains loses it.

    Example:
        >>> network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> network[1].weight = network[0].weight
        >>> [list(p.shape) for p in frozen_objects(network, {"0"}, set())[1]]  # the bias alone
        [[1]]
    """

    def select(named: Iterable[tuple[str, Any]]) -> set[Any]:
        frozen_items: set[Any] = set()
        training_items: set[Any] = set()
        for name, item in named:
            if inside(name, frozen) and not inside(name, unfrozen):
                frozen_items.add(item)
            else:
                training_items.add(item)
        return frozen_items - training_items

    return (
        select((n, m) for n, m in module.named_modules(remove_duplicate=False) if n),
        select(module.named_parameters(remove_duplicate=False)),
    )


class FrozenLayers:
    """Frozen layers of a module, until `unfreeze` or `restore`; returned by `freeze_layers`.

    Args:
        module: the module; it is changed in place.
        names: full names of the modules and parameters to freeze.
        train_bn: False keeps the running statistics of all batch normalization, including unfrozen layers.
    """

    def __init__(self, module: nn.Module, names: Collection[str], train_bn: bool = True) -> None:
        self.module = module
        self.names = frozenset(names)
        self.train_bn = train_bn
        self._requires_grad = {parameter: parameter.requires_grad for parameter in module.parameters()}
        self._frozen_modes: dict[nn.Module, tuple[RemovableHandle, tuple[bool, float | None]]] = {}
        self._unfrozen: frozenset[str] = frozenset()

    def freeze(self) -> None:
        """Freeze the modules and parameters of `names`, except unfrozen ones."""
        modules, _ = frozen_objects(self.module, self.names, self._unfrozen)
        if not self.train_bn:
            modules |= {module for module in self.module.modules() if isinstance(module, _BatchNorm)}
        self.freeze_parameters()
        self._set_frozen_modules(modules)

    def freeze_parameters(self) -> None:
        """Freeze parameters only; modules keep their modes, which Lightning checks when training starts."""
        _, frozen_parameters = frozen_objects(self.module, self.names, self._unfrozen)
        for parameter, required_grad in self._requires_grad.items():
            # A parameter that the user has frozen stays frozen.
            parameter.requires_grad_(required_grad and parameter not in frozen_parameters)

    def unfreeze(self, *names: str) -> None:
        """Unfreeze modules or parameters, with everything inside them.

        Args:
            names: full names, or ends of them; ``"*"`` is everything that was frozen.

        Raises:
            UserError: a name is unknown or ambiguous.
        """
        known = [*module_names(self.module), *parameter_names(self.module)]
        self._unfrozen |= {name if name == "*" else find_name(name, known) for name in names}
        self.freeze()

    def restore(self) -> None:
        """Restore every parameter and module as it was before it was frozen."""
        for parameter, required_grad in self._requires_grad.items():
            parameter.requires_grad_(required_grad)
        self._set_frozen_modules(set())

    def counts(self) -> tuple[int, int]:
        """Return the number of parameters that train, and of all parameters."""
        training = sum(parameter.numel() for parameter in self._requires_grad if parameter.requires_grad)
        return training, sum(parameter.numel() for parameter in self._requires_grad)

    def _set_frozen_modules(self, modules: set[nn.Module]) -> None:
        """Keep these modules, and no others, in evaluation mode."""
        for module in self._frozen_modes.keys() - modules:
            handle, mode = self._frozen_modes.pop(module)
            handle.remove()
            set_mode(module, mode)
        for module in modules:
            if module not in self._frozen_modes:
                handle = module.register_forward_pre_hook(set_frozen_mode)
                self._frozen_modes[module] = (handle, mode_of(module))
            set_frozen_mode(module)


def init_momentum_buffers(optimizers: Iterable[Optimizer]) -> None:
    """Give newly trained parameters of a fused SGD a momentum of zero, if others of their group have a momentum.

    The fused kernel of torch 2.15 raises a TypeError if only some parameters of a group have one. A momentum of zero
    gives the same first step as none, except with dampening.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            if not group["fused"] or all(state.get("momentum_buffer") is None for state in states):
                continue
            for parameter in group["params"]:
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def freeze_layers(module: nn.Module, until: str | None = None, train_bn: bool = True) -> FrozenLayers:
    """Freeze layers of a module in place; the returned object unfreezes them.

    A frozen layer gets no gradient, and stays in evaluation mode after every ``train()``: BatchNorm keeps its running
    statistics, and dropout is off. RNN, GRU and LSTM stay in training mode without dropout. Layers before the first
    trained one need no backward pass. Names match from the right: ``layer3`` matches ``network.layer3``; of several
    matches the least nested one counts.

    Freeze after ``zero_grad()``, because an optimizer uses existing gradients, and before DDP wraps the module, because
    DDP reduces only parameters that require a gradient then.

    Args:
        until: freeze all layers defined before this submodule; it and the following ones train.
        train_bn: False keeps the running statistics of *all* batch normalization; weights and biases train.

    Raises:
        UserError: a name is unknown or ambiguous.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> frozen = freeze_layers(net, until="2")
        >>> net = net.train()
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['2.weight', '2.bias']
        >>> frozen.restore()
        >>> frozen.counts()
        (38, 38)
    """
    frozen = FrozenLayers(module, names_before(module, until), train_bn)
    frozen.freeze()
    return frozen


def check_freezing(
    module: nn.Module, frozen: Collection[str], unfrozen: Collection[str], optimizers: Iterable[Optimizer]
) -> list[str]:
    """Check that a run can start and unfreeze with these names, and return notes for the user.

    Args:
        frozen: names that are frozen at the start.
        unfrozen: names that are unfrozen during the run.

    Raises:
        UserError: nothing trains at the start, or the optimizers lack a parameter that is unfrozen later.
    """
    _, frozen_at_start = frozen_objects(module, frozen, ())
    _, frozen_at_end = frozen_objects(module, frozen, unfrozen)
    unfrozen_later = frozen_at_start - frozen_at_end
    if not any(p.requires_grad and p not in frozen_at_start for p in module.parameters()):
        raise UserError(
            "FreezeLayers leaves nothing to train at the start of the run: every parameter is frozen; freeze fewer"
            f" layers, or let one out of {spelled('unfreeze')}"
        )
    optimized = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = unfrozen_later - optimized
    left_out = [name for name, p in module.named_parameters() if p in missing and p.requires_grad]
    if left_out:
        raise UserError(
            f"configure_optimizers left out {', '.join(left_out[:3])}{' ...' if left_out[3:] else ''}, which are"
            f" to be unfrozen ({len(left_out)} in all): pass self.parameters(), frozen ones too"
        )
    return [
        f"{name} trains: it is shared with a layer that is not frozen"
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter not in frozen_at_start and inside(name, frozen)
    ]


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
    # Wrapping replaces all buffers with the values of rank 0, and each rank may have its own running statistics.
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
            f'unfreezing at "{start}" counts updates, and {type(trainer.lightning_module).__name__} optimizes manually:'
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
    """Callback that keeps layers bit-identical, for the whole run or until a given epoch or update.

    `freeze_layers` freezes the layers. They get no momentum and no weight decay. The optimizer holds all
    parameters from the first step. The epoch and the update decide what is frozen: nothing is saved, and a run
    resumes anywhere. Under DDP all ranks wrap the module again when that changes. Parameters that
    required no gradient before the fit never train.

    Runs on: `on_fit_start`, `on_train_start`, `on_train_epoch_start`, `on_train_batch_start`. `teardown` and
    `on_exception` restore each parameter and module, so tests and predictions find nothing changed.

    Args:
        until: freeze what is defined before this submodule. This one and the following ones train.
        unfreeze: freeze these modules or parameters until then: ``{"layer4": "1 epochs", "layer3": "500 steps"}``.
            From then on everything inside trains, whatever else froze it; ``"*"`` matches everything.
        train_bn: False keeps the running statistics of *all* batch normalization; weights and biases train.

    Raises:
        UserError: a name is unknown or ambiguous, nothing would train, the optimizer lacks what is to train later, or
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
        check_types(
            until=(until, until is None or isinstance(until, str), "the name of a layer"),
            unfreeze=(unfreeze, unfreeze is None or isinstance(unfreeze, Mapping), 'a dict, as {"layer3": "2 epochs"}'),
            train_bn=(train_bn, isinstance(train_bn, bool), "True or False"),
        )
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
