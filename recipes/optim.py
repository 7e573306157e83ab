"""Parameter groups, optimisers by name, and learning-rate schedules as closed forms of progress.

A schedule here is a pure function from the share of the run that is done to a factor on the learning rate. It keeps no
state, so a resumed, extended or differently split run is exactly where it should be.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from datamodules.errors import UserError

__all__ = [
    "SCHEDULES",
    "ScheduleName",
    "build_optimizer",
    "build_scheduler",
    "optimizer_class",
    "parameter_groups",
]

ScheduleName = Literal["one_cycle", "cosine", "linear", "constant"]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def one_cycle(progress: float, rise: float = 0.25, start: float = 0.04) -> float:
    """Linear rise from `start` to 1 over the share `rise` of the run, then linear to 0 (Smith and Topin, 2018)."""
    if progress < rise:
        return start + (1 - start) * progress / rise
    return (1 - progress) / (1 - rise)


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017)."""
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    """A straight line from 1 to 0."""
    return 1 - progress


def constant(progress: float) -> float:
    """Always 1."""
    return 1.0


SCHEDULES: dict[str, Callable[[float], float]] = {
    "one_cycle": one_cycle,
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
}


def _undecayed(module: nn.Module) -> Iterator[nn.Parameter]:
    for child in module.modules():
        if isinstance(child, _NORMS):
            yield from child.parameters(recurse=False)
        else:
            yield from (
                p
                for name, p in child.named_parameters(recurse=False)
                if name.startswith("bias") or name.endswith("bias")
            )


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two named groups: "decay" for weights, "no_decay" for the parameters of norms and for biases.

    Frozen parameters are in them too, so that the groups stay the same for the whole run. A group without parameters
    is left out.
    """
    exempt = {id(p) for p in _undecayed(module)}
    parameters = list(module.parameters())
    groups = [
        {"name": "decay", "params": [p for p in parameters if id(p) not in exempt], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in parameters if id(p) in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def optimizer_class(name: str) -> type[Optimizer]:
    """An optimiser of ``torch.optim`` by its name, in any case.

    Raises:
        UserError: torch has none of that name.
    """
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in classes:
        raise UserError(f"no optimizer {name!r} in torch.optim; expected one of {', '.join(sorted(classes))}")
    return classes[name.lower()]


def build_optimizer(
    name: str, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.9, fused: bool | None = None
) -> Optimizer:
    """An optimiser by name over parameter groups.

    Args:
        momentum: for those that have it (SGD then uses Nesterov's); for the others it is ignored.
        fused: one kernel for all parameters; None takes it where every parameter's device has it.
    """
    groups = list(groups)
    cls = optimizer_class(name)
    accepted = cls.__init__.__code__.co_varnames
    options: dict[str, Any] = {"lr": lr}
    if "momentum" in accepted:
        options["momentum"] = momentum
        if "nesterov" in accepted and momentum > 0:
            options["nesterov"] = True
    if "fused" in accepted:
        parameters = [p for group in groups for p in group["params"]]
        possible = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters)
        options["fused"] = possible if fused is None else fused
    return cls(groups, **options)


def build_scheduler(optimizer: Optimizer, shape: str, total: Callable[[], float]) -> LambdaLR:
    """A schedule over the whole run, to be stepped after every update.

    Args:
        shape: a key of `SCHEDULES`.
        total: the number of updates in the run. Called from the second update on: before training nobody knows it.

    Raises:
        UserError: there is no such schedule.
    """
    if shape not in SCHEDULES:
        raise UserError(f"no schedule {shape!r}; expected one of {', '.join(SCHEDULES)}")
    curve = SCHEDULES[shape]

    def factor(update: int) -> float:
        if update == 0:
            return curve(0.0)
        updates = total()
        # A run without an end stays where it starts; past the end it stays where it ended.
        return curve(0.0 if math.isinf(updates) else min(1.0, update / max(1.0, updates)))

    return LambdaLR(optimizer, factor)
