"""State of a module that no checkpoint holds: numbers in plain attributes, and buffers that are not persistent."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from callbacks.lib.checksums import checksum


def plain_numbers(module: nn.Module) -> dict[str, Any]:
    """Return the public plain attributes of the layers that hold a number, a tensor of one element or None, by name.

    None may stand for a number that is still to come. torchmetrics objects are left out.

    Example:
        >>> network = nn.Sequential(nn.Dropout(0.5))
        >>> network.baseline = 2.0
        >>> plain_numbers(network)
        {'baseline': 2.0, '0.p': 0.5}
    """
    numbers = {}
    for layer_name, layer in module.named_modules():
        prefix = f"{layer_name}." if layer_name else ""
        if isinstance(layer, Metric):
            continue
        for name, value in vars(layer).items():
            is_scalar = isinstance(value, Tensor) and value.numel() == 1
            if (is_scalar or value is None or type(value) in (int, float)) and not name.startswith("_"):
                numbers[prefix + name] = value
    return numbers


def unsaved_state(module: nn.Module) -> dict[str, float]:
    """Return what a module may compute with and no checkpoint holds, by name, with a checksum of each buffer."""
    state = {name: float(value) for name, value in plain_numbers(module).items() if value is not None}
    for layer_name, layer in module.named_modules():
        for name in sorted(layer._non_persistent_buffers_set):
            buffer = layer._buffers.get(name)
            if buffer is not None:
                state[f"{layer_name}.{name}".lstrip(".")] = float(checksum(buffer))
    return state
