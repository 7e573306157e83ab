"""What a step of training changes besides gradients: noted before it, and put back after an attempt that failed."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from callbacks.lib.memory import release_memory

__all__ = ["Buffers", "Undo", "keep_metrics", "keep_optimizer"]

Undo = Callable[[], Any]
"""Puts back what was noted; can be called any number of times."""


def _values(metric: Metric) -> dict[str, Any]:
    """The state of a metric, in copies."""
    copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(metric).items()}
    return {name: list(value) if isinstance(value, list) else value for name, value in copied.items()}


def keep_metrics(metrics: Sequence[Metric]) -> Undo:
    """Notes what metrics have counted."""
    kept = [(metric, _values(metric) if metric.update_called else None) for metric in metrics]

    def restore() -> None:
        for metric, values in kept:
            if values is None:
                metric.reset()
            else:
                vars(metric).update(
                    {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
                )

    return restore


class Buffers:
    """The buffers of a module's layers, such as the statistics of BatchNorm, and one copy of them."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [layer._buffers for layer in module.modules() if layer._buffers]
        self._values: list[Tensor] = []
        self._copies: list[Tensor] = []

    def keep(self) -> Undo:
        """Notes them; what was noted before is forgotten."""
        names = [(owner, name) for owner in self._owners for name in owner if owner[name] is not None]
        values: Any = [owner[name] for owner, name in names]
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values, self._copies = values, [value.detach().clone() for value in values]
        elif values:
            torch._foreach_copy_(self._copies, values)

        def restore() -> None:
            with torch.no_grad():
                for (owner, name), value, copied in zip(names, values, self._copies, strict=True):
                    owner[name] = value
                    value.copy_(copied)

        return restore


def keep_optimizer(optimizer: Optimizer) -> Undo:
    """Copies an optimiser's parameters, gradients and state to the host.

    Where they are put back, gradients and state are released first, so that what the device has is in one piece.
    """

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    values: list[tuple[Tensor, Tensor | None]] = [(copied(p), copied(p.grad)) for p in parameters]
    groups = [
        {key: copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = {
        parameter: {name: (copied(value), getattr(value, "device", None)) for name, value in entries.items()}
        for parameter, entries in optimizer.state.items()
    }

    def restore() -> None:
        optimizer.state.clear()
        for parameter in parameters:
            parameter.grad = None
        for device in {parameter.device for parameter in parameters}:
            release_memory(device)
        with torch.no_grad():
            for parameter, (value, gradient) in zip(parameters, values, strict=True):
                parameter.copy_(value)
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            for name, value in entries.items():
                if isinstance(group[name], Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        for owner, entries in state.items():
            optimizer.state[owner] = {
                name: value if device is None else value.to(device, copy=True)
                for name, (value, device) in entries.items()
            }

    return restore
