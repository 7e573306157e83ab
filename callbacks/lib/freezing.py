"""Freeze layers exactly, in any training loop.

``requires_grad=False`` alone lets running statistics drift and dropout act, and any ``train()`` undoes an ``eval()``.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from callbacks.lib.layers import find_name, inside, module_names, parameter_names
from datamodules.errors import UserError


def names_before(module: nn.Module, until: str | None) -> set[str]:
    """All that is defined before the submodule `until`, whose name may be written from its end; nothing without it.

    That includes the earlier children and the own parameters of the modules around it, but not these modules.

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
    """What `set_frozen_mode` changes: the mode, and the dropout of a recurrent layer."""
    return layer.training, layer.dropout if isinstance(layer, nn.RNNBase) else None


def set_mode(layer: nn.Module, mode: tuple[bool, float | None]) -> None:
    """Puts back what `mode_of` returned."""
    layer.training, dropout = mode
    if dropout is not None:
        layer.dropout = dropout  # type: ignore[assignment]


def set_frozen_mode(layer: nn.Module, _: Any = None) -> None:
    """Put one layer into evaluation mode; a recurrent layer stays in training mode without dropout.

    cuDNN computes no backward pass through an RNN, GRU or LSTM in evaluation mode, and a frozen one may stand between
    layers that train. As a forward pre-hook it acts after ``train()``, too; a function of a module and no closure, so
    that copies and pickles of the module work.
    """
    if isinstance(layer, nn.RNNBase):
        layer.dropout = 0.0
    elif layer.training:
        layer.training = False


def frozen_objects(
    module: nn.Module, frozen: Collection[str], unfrozen: Collection[str]
) -> tuple[set[nn.Module], set[Parameter]]:
    """The modules and parameters inside `frozen` names and outside `unfrozen` ones.

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
            (chosen if inside(name, frozen) and not inside(name, unfrozen) else others).add(item)
        return chosen - others

    return (
        select((n, m) for n, m in module.named_modules(remove_duplicate=False) if n),
        select(module.named_parameters(remove_duplicate=False)),
    )


class FrozenLayers:
    """The frozen layers of a module, until `unfreeze` or `restore`; returned by `freeze_layers`.

    Args:
        module: it is changed in place.
        names: of the modules and parameters to freeze, in full.
        train_bn: False keeps the running statistics of all batch normalisation, unfrozen layers too.
    """

    def __init__(self, module: nn.Module, names: Collection[str], train_bn: bool = True) -> None:
        self.module, self.names, self.train_bn = module, frozenset(names), train_bn
        self._requires_grad = {parameter: parameter.requires_grad for parameter in module.parameters()}
        self._kept: dict[nn.Module, tuple[RemovableHandle, tuple[bool, float | None]]] = {}
        self._unfrozen: frozenset[str] = frozenset()

    def freeze(self) -> None:
        """Freeze everything of those names that is not unfrozen."""
        modules, _ = frozen_objects(self.module, self.names, self._unfrozen)
        if not self.train_bn:
            modules |= {module for module in self.module.modules() if isinstance(module, _BatchNorm)}
        self.freeze_parameters()
        self._keep(modules)

    def freeze_parameters(self) -> None:
        """Freeze parameters only; modules keep their modes, which Lightning looks at when it begins to train."""
        frozen = frozen_objects(self.module, self.names, self._unfrozen)[1]
        for parameter, before in self._requires_grad.items():
            parameter.requires_grad_(before and parameter not in frozen)

    def unfreeze(self, *names: str) -> None:
        """Let modules or parameters train again, with everything inside them.

        Args:
            names: full names, or ends of them; ``"*"`` is everything that was frozen.

        Raises:
            UserError: a name is unknown or ambiguous.
        """
        known = [*module_names(self.module), *parameter_names(self.module)]
        self._unfrozen |= {name if name == "*" else find_name(name, known) for name in names}
        self.freeze()

    def restore(self) -> None:
        """Give every parameter and module back what it had when it was frozen."""
        for parameter, before in self._requires_grad.items():
            parameter.requires_grad_(before)
        self._keep(set())

    def counts(self) -> tuple[int, int]:
        """The number of parameters that train, and of all."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self._requires_grad]
        return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)

    def _keep(self, modules: set[nn.Module]) -> None:
        """Keep these modules, and no others, in evaluation mode."""
        for module in self._kept.keys() - modules:
            handle, mode = self._kept.pop(module)
            handle.remove()
            set_mode(module, mode)
        for module in modules:
            if module not in self._kept:
                self._kept[module] = module.register_forward_pre_hook(set_frozen_mode), mode_of(module)
            set_frozen_mode(module)


def init_momentum_buffers(optimizers: Iterable[Optimizer]) -> None:
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


def freeze_layers(module: nn.Module, until: str | None = None, train_bn: bool = True) -> FrozenLayers:
    """Freeze layers of a module in place; the returned object unfreezes them.

    A frozen layer gets no gradient, and stays in evaluation mode after every ``train()``: BatchNorm keeps its running
    statistics, and dropout is off. RNN, GRU and LSTM stay in training mode without dropout. Layers before the first
    that trains need no backward pass. Names match from the right: ``layer3`` matches ``network.layer3``; of several
    matches the least nested one counts.

    Freeze after ``zero_grad()``, because an optimizer uses existing gradients, and before DDP wraps the module, because
    DDP reduces only parameters that require a gradient then.

    Args:
        until: freeze what is defined before this submodule; it trains, and what follows.
        train_bn: False keeps the running statistics of *all* batch normalisation; weights and biases train.

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
    """Refuses a freezing under which training cannot begin or continue as asked, and returns notes for the user.

    Args:
        frozen: names that are frozen at the start.
        unfrozen: names that are unfrozen at some time.

    Raises:
        UserError: nothing trains at the start, or the optimisers lack a parameter that is to train later.
    """
    at_first = frozen_objects(module, frozen, ())[1]
    later = at_first - frozen_objects(module, frozen, unfrozen)[1]
    if not any(p.requires_grad and p not in at_first for p in module.parameters()):
        raise UserError(
            "FreezeLayers leaves nothing to train at the start of the run: every parameter is frozen; freeze fewer"
            " layers, or let one out of `unfreeze`"
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
