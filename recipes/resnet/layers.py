"""Layers of a network, from the images to the head, by the names of its modules.

Learning rates per layer, and the default of `freeze_until`, use these names.

Tested in `tests/recipes/resnet/test_network.py`.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from callbacks.freezing import evaluating
from datamodules.errors import UserError, spelled

Layer = tuple[str, Sequence[nn.Module]]
"""The name of a layer, and its modules."""

_MIN_LAYERS = 4
"""Minimum number of layers before the head: large modules are split up to it. ResNets have four, and the stem."""


def random_images(network: nn.Module, example: Tensor) -> Tensor:
    """Return constant pseudorandom images of an example's shape, in the network's type and on its device."""
    # A separate generator, so that the random state of the run does not change.
    images = torch.rand(example.shape, generator=torch.Generator().manual_seed(1))
    return images.to(next(network.parameters(), example))


def _weighs(module: nn.Module) -> bool:
    """Return whether a module has weights other than the parameters of a norm."""
    return any(p.ndim > 1 for p in module.parameters())


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _children(outer: nn.Module, opened: Collection[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the direct children of opened modules and of lists; a list of modules is never called."""
    for name, module in outer.named_children():
        if module in opened or type(module) in (nn.ModuleList, nn.ModuleDict):
            yield from _children(module, opened, f"{path}{name}.")
        else:
            yield f"{path}{name}", module


def _parts_of(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Split a network into modules in the order of their definition; the head is split as far as possible."""
    opened = {network}
    while True:
        modules = list(_children(network, opened)) or [("network", network)]
        *trunk, head = [module for _, module in modules if _weighs(module)] or [network]
        large = sorted(trunk, key=_size, reverse=True) if len(trunk) < _MIN_LAYERS else []
        closed = (module for module in (head, *large) if module not in opened)
        next_to_open = next((module for module in closed if any(map(_weighs, module.children()))), None)
        if next_to_open is None:
            return modules
        opened.add(next_to_open)


def layers_of(network: nn.Module) -> list[Layer]:
    """Return the layers of a network, in the order of their definition; the last layer is the head.

    Each layer begins with weights, and includes the norms, activations and pooling after them.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
        >>> [name for name, _ in layers_of(network)]
        ['stem', '3']
    """
    modules = _parts_of(network)
    starts = [number for number, (_, module) in enumerate(modules) if _weighs(module)]
    bounds = [0, *starts[1:], len(modules)]
    names = [modules[number][0] for number in starts or [0]]
    if len(names) > 1 and bounds[1] > 1:
        names[0] = "stem"
    layers: list[Layer] = []
    for name, (start, stop) in zip(names, pairwise(bounds), strict=True):
        layers.append((name, [module for _, module in modules[start:stop]]))
    return layers


def parameters_of_layers(module: nn.Module, layers: Sequence[Layer]) -> list[tuple[str, list[nn.Parameter]]]:
    """Return the parameters of each layer; a shared parameter belongs to the first of its layers.

    Args:
        module: the module with the layers; its parameters outside of all layers belong to the first layer.
        layers: the layers that `layers_of` returns.
    """
    owners = dict.fromkeys(module.parameters(), layers[0][0])
    # Reversed, so that the first of several layers with a shared parameter is assigned last.
    for name, modules in reversed(layers):
        for layer_module in modules:
            for parameter in layer_module.parameters():
                if parameter in owners:
                    owners[parameter] = name
    return [(name, [p for p in owners if owners[p] == name]) for name, _ in layers]


def layers_line(layers: Sequence[Layer]) -> str:
    """Return the layers in one line.

    >>> layers_line([(name, []) for name in ("stem", "layer1", "layer2", "fc")])
    'layers of the network: stem, layer1, layer2, fc'
    """
    names = [name for name, _ in layers]
    if len(names) > 12:
        names = [*names[:3], f"... ({len(names) - 6} more)", *names[-3:]]
    return f"layers of the network: {', '.join(names)}"


def _first_shape(values: Any) -> torch.Size:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            return leaf.shape
    return torch.Size()


def _shapes(network: nn.Module, modules: Sequence[nn.Module], images: Tensor) -> dict[nn.Module, list[torch.Size]]:
    """Return the input and output shapes of the modules that run."""
    shapes: dict[nn.Module, list[torch.Size]] = {}

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        shapes.setdefault(module, [_first_shape(inputs), _first_shape(output)])

    handles = [module.register_forward_hook(record) for module in modules]
    try:
        with torch.no_grad(), evaluating(network):
            network(images)
    except Exception as error:
        size = " x ".join(map(str, images.shape[2:]))
        reason = (str(error).strip().partition("\n")[0] or type(error).__name__)[:120]
        raise UserError(
            f"the network cannot take images of {size} pixels ({reason}); pass another {spelled('image_size')}, or"
            " another architecture"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def _positions(shape: torch.Size) -> int:
    return shape[2:].numel() if len(shape) > 2 else 0


def last_block_of(network: nn.Module, example: Tensor) -> str:
    """Return the name of the last block before global pooling, such as "layer4".

    Args:
        network: the network.
        example: an input of the network, of shape (1, 3, height, width); its values are not used.

    Raises:
        UserError: the network cannot take such images.
    """
    modules = _parts_of(network)
    weighted_modules = [(name, module) for name, module in modules if _weighs(module)] or modules
    trunk = weighted_modules[:-1] or weighted_modules
    shapes = _shapes(network, [module for _, module in trunk], random_images(network, example))
    last_name = trunk[0][0]
    positions_before = 0
    for name, module in trunk:
        if module not in shapes:
            continue
        input_shape, output_shape = shapes[module]
        if not _positions(output_shape) or _positions(input_shape) == 1 < positions_before:
            break
        last_name = name
        positions_before = _positions(output_shape)
    return last_name
