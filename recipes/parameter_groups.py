"""The parameters of a network in groups for an optimiser: by weight decay, and by layer."""

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["layer_groups", "parameter_groups"]


def parameter_groups(module: nn.Module | Sequence[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Two named groups: "decay" for weights, "no_decay" for the parameters of norms and for biases.

    Norms and biases are the parameters of at most one dimension. Frozen parameters are in the groups as well, so that
    the groups stay the same for the whole run. A group without parameters is left out.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    parameters = list(dict.fromkeys(p for part in modules for p in part.parameters()))
    decayed = [p for p in parameters if p.ndim > 1]
    exempt = [p for p in parameters if p.ndim <= 1]
    groups = [
        {"name": "decay", "params": decayed, "weight_decay": weight_decay},
        {"name": "no_decay", "params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def layer_groups(
    layers: Sequence[tuple[str, Sequence[nn.Module]]],
    weight_decay: float,
    lr: float,
    layer_lr_decay: float = 1.0,
    head_lr_factor: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups per layer with learning rates of their own (Howard and Ruder, 2018), named "layer4.decay" and so on.

    Args:
        layers: name and modules, from the input to the head, which is the last.
        lr: of the layer below the head; that below it has `layer_lr_decay` times as much, and so on down.
        head_lr_factor: how much faster the head learns.

    Example:
        >>> layers = [(name, [nn.Linear(2, 2, bias=False)]) for name in ("layer3", "layer4", "fc")]
        >>> [(g["name"], g["lr"]) for g in layer_groups(layers, 0.01, lr=1.0, layer_lr_decay=0.5, head_lr_factor=10)]
        [('layer3.decay', 0.5), ('layer4.decay', 1.0), ('fc.decay', 10.0)]
    """
    layers = [(name, modules) for name, modules in layers if any(list(m.parameters()) for m in modules)]
    groups = []
    for depth, (name, modules) in enumerate(reversed(layers)):
        rate = lr * head_lr_factor if depth == 0 else lr * layer_lr_decay ** (depth - 1)
        part = parameter_groups(modules, weight_decay)
        groups.append([group | {"name": f"{name}.{group['name']}", "lr": rate} for group in part])
    return [group for part in reversed(groups) for group in part]
