"""The layers of a network, from the images to the head, by the names of its modules.

Learning rates and the default of freezing refer to them.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from callbacks.lib.layers import evaluating
from datamodules.errors import UserError

Layer = tuple[str, Sequence[nn.Module]]
"""A name, and the modules that belong to it."""

_ENOUGH = 4
"""Layers before the head, from which on a large one stays in one piece: ResNets have that many, and the stem."""


def random_images(network: nn.Module, example: Tensor) -> Tensor:
    """Images of the shape of an example, always the same, in the type and on the device of a network."""
    images = torch.rand(example.shape, generator=torch.Generator().manual_seed(1))
    return images.to(next(network.parameters(), example))


def _weighs(module: nn.Module) -> bool:
    """Whether it holds weights, not only a norm, or nothing."""
    return any(p.ndim > 1 for p in module.parameters())


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _children(outer: nn.Module, opened: Collection[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules directly inside those that are opened, and inside lists, which are never called."""
    for name, module in outer.named_children():
        if module in opened or type(module) in (nn.ModuleList, nn.ModuleDict):
            yield from _children(module, opened, f"{path}{name}.")
        else:
            yield f"{path}{name}", module


def _parts_of(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules in the order of their definition: the head is opened as far as possible, large ones where it is short."""
    opened = {network}
    while True:
        parts = list(_children(network, opened)) or [("network", network)]
        *trunk, head = [module for _, module in parts if _weighs(module)] or [network]
        large = sorted(trunk, key=_size, reverse=True) if len(trunk) < _ENOUGH else []
        closed = (module for module in (head, *large) if module not in opened)
        finer = next((module for module in closed if any(map(_weighs, module.children()))), None)
        if finer is None:
            return parts
        opened.add(finer)


def layers_of(network: nn.Module) -> list[Layer]:
    """The layers of a network, in the order of their definition; the last is the head.

    Each begins with weights, and takes along the norms, activations and pooling behind them.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> [name for name, _ in layers_of(network)]
        ['stem', '3']
    """
    parts = _parts_of(network)
    weighing = [number for number, (_, module) in enumerate(parts) if _weighs(module)]
    bounds = [0, *weighing[1:], len(parts)]
    names = [parts[number][0] for number in weighing or [0]]
    if len(names) > 1 and bounds[1] > 1:
        names[0] = "stem"
    return [(name, [module for _, module in parts[a:b]]) for name, (a, b) in zip(names, pairwise(bounds), strict=True)]


def parameters_of_layers(module: nn.Module, layers: Sequence[Layer]) -> list[tuple[str, list[nn.Parameter]]]:
    """The parameters of each layer; what several share is in the first of them, and what none has in the first of all.

    Args:
        module: holds the layers, and perhaps more.
        layers: as `layers_of` finds them.
    """
    owners = dict.fromkeys(module.parameters(), layers[0][0])
    owners |= {
        p: name for name, modules in reversed(layers) for part in modules for p in part.parameters() if p in owners
    }
    return [(name, [p for p in owners if owners[p] == name]) for name, _ in layers]


def layers_line(layers: Sequence[Layer]) -> str:
    """The layers in one line.

    >>> layers_line([(name, []) for name in ("stem", "layer1", "layer2", "fc")])
    'layers of the network: stem, layer1, layer2, fc'
    """
    names = [name for name, _ in layers]
    if len(names) > 12:
        names = [*names[:3], f"... ({len(names) - 6} more)", *names[-3:]]
    return f"layers of the network: {', '.join(names)}"


def _shapes(network: nn.Module, modules: Sequence[nn.Module], images: Tensor) -> dict[nn.Module, list[torch.Size]]:
    """The shapes that modules take and give; of those that run."""
    seen: dict[nn.Module, list[torch.Size]] = {}

    def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        firsts = (next((leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)), None) for x in (given, output))
        seen.setdefault(module, [torch.Size() if first is None else first.shape for first in firsts])

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        with torch.no_grad(), evaluating(network):
            network(images)
    except Exception as error:
        size = " x ".join(map(str, images.shape[2:]))
        reason = (str(error).strip().partition("\n")[0] or type(error).__name__)[:120]
        raise UserError(
            f"the network cannot take images of {size} pixels ({reason}); pass another `image_size`, or another"
            " architecture"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _positions(shape: torch.Size) -> int:
    return shape[2:].numel() if len(shape) > 2 else 0


def last_block_of(network: nn.Module, example: Tensor) -> str:
    """The last module with weights, before the head, whose output is not pooled to a vector.

    Args:
        example: an input of the network, of shape (1, 3, height, width); its values do not matter.

    Raises:
        UserError: the network cannot take such images.
    """
    parts = [(name, module) for name, module in _parts_of(network) if _weighs(module)] or _parts_of(network)
    trunk = parts[:-1] or parts
    shapes = _shapes(network, [module for _, module in trunk], random_images(network, example))
    found, before = trunk[0][0], 0
    for name, module in trunk:
        if module not in shapes:
            continue
        taken, given = shapes[module]
        if not _positions(given) or _positions(taken) == 1 < before:
            break
        found, before = name, _positions(given)
    return found
