"""Parameter groups, optimisers by name, and learning-rate schedules as closed forms of progress.

A schedule here is a pure function from the share of the run that is done to a factor on the learning rate. It keeps no
state, so a resumed, extended or differently split run has exactly the right rate.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from datamodules.errors import UserError

__all__ = [
    "SCHEDULES",
    "Schedule",
    "ScheduleName",
    "build_optimizer",
    "build_scheduler",
    "layer_groups",
    "learning_rate_scale",
    "optimizer_class",
    "parameter_groups",
    "schedule_curve",
]

# Adaptive optimisers divide by the size of the gradient, so noise grows only with the square root.
_LINEAR = {"sgd", "asgd"}

ScheduleName = Literal["one_cycle", "cosine", "linear", "constant"]


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


def schedule_curve(name: str) -> Callable[[float], float]:
    """A schedule by its name.

    Raises:
        UserError: there is no such schedule.
    """
    if name not in SCHEDULES:
        raise UserError(f"no schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def parameter_groups(module: nn.Module | Sequence[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Two named groups: "decay" for weights, "no_decay" for the parameters of norms and for biases.

    These are the parameters of at most one dimension. Frozen parameters are in the groups too, so that the groups stay
    the same for the whole run. A group without parameters is left out.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    parameters = list(dict.fromkeys(p for part in modules for p in part.parameters()))
    groups = [
        {"name": "decay", "params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
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


# These need a closure that is called again, sparse gradients, or matrices only.
_NEED_MORE = {"lbfgs", "sparseadam", "muon"}


def optimizer_class(name: str) -> type[Optimizer]:
    """An optimiser of ``torch.optim`` by its name, in any case.

    Raises:
        UserError: torch has none of that name, or one that needs more than gradients.
    """
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    fitting = sorted(classes.keys() - _NEED_MORE)
    if name.lower() not in fitting:
        raise UserError(f"no optimizer {name!r} that fits here; expected one of {', '.join(fitting)}")
    return classes[name.lower()]


def build_optimizer(
    name: str, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.9, fused: bool | None = None
) -> Optimizer:
    """An optimiser by name over parameter groups.

    A checkpoint restores its moments only: rates, decay and kernels are those of the arguments, so a resumed run can
    change them, or the device.

    Args:
        momentum: for those that have it (SGD then uses Nesterov's); for the others it is ignored.
        fused: one kernel for all parameters; None takes it where every parameter's device has it.
    """
    groups = list(groups)
    cls = optimizer_class(name)
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {"lr": lr}
    if "momentum" in accepted:
        options["momentum"] = momentum
        if "nesterov" in accepted and momentum > 0:
            options["nesterov"] = True
    if "fused" in accepted:
        parameters = [p for group in groups for p in group["params"]]
        possible = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters)
        options["fused"] = possible if fused is None else fused
    optimizer = cls(groups, **options)
    asked_for = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    def keep_settings(loaded: Optimizer) -> None:
        for group, settings in zip(loaded.param_groups, asked_for):
            group.update(settings)
            if "initial_lr" in group:  # A scheduler's; what it begins from is asked for here, too.
                group["initial_lr"] = settings["lr"]

    optimizer.register_load_state_dict_post_hook(keep_settings)
    return optimizer


class Schedule(LambdaLR):
    """A learning rate in closed form: a checkpoint restores the number of updates, and nothing else."""

    _stale = False

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)
        optimizer.register_step_pre_hook(self._refresh)

    @override
    def step(self, epoch: int | None = None) -> None:
        """The same as LambdaLR's, where rates are plain numbers, in a fifth of its time: it runs at every update."""
        groups = self.optimizer.param_groups
        if epoch is not None or self._step_count < 2 or any(isinstance(group["lr"], Tensor) for group in groups):
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        factor = self.lr_lambdas[0](self.last_epoch)  # All groups have the same.
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        self._last_lr = [group["lr"] for group in groups]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        # The length of the run is not known yet, so the rate has to wait for the first update.
        self._stale = True

    def _refresh(self, *_: Any) -> None:
        if self._stale:
            for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas):
                group["lr"] = base * factor(self.last_epoch)
            self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
            self._stale = False


def build_scheduler(optimizer: Optimizer, shape: str, total: Callable[[], float]) -> Schedule:
    """A schedule over the whole run, to be stepped after every update.

    Args:
        shape: a key of `SCHEDULES`.
        total: the number of updates in the run. Called from the second update on: it is not known before training.

    Raises:
        UserError: there is no such schedule.
    """
    curve = schedule_curve(shape)

    def factor(update: int) -> float:
        if update == 0:
            return curve(0.0)
        updates = total()
        # A run without an end has no progress; past the end the factor stays.
        return 1.0 if math.isinf(updates) else curve(min(1.0, update / max(1.0, updates)))

    return Schedule(optimizer, factor)


def learning_rate_scale(
    rule: Literal["auto", "none", "linear", "sqrt"], optimizer: str
) -> Literal["linear", "sqrt"] | None:
    """The rule that "auto" stands for: linear for SGD (Goyal et al., 2017), square root for adaptive optimisers."""
    if rule == "auto":
        return "linear" if optimizer.lower() in _LINEAR else "sqrt"
    return None if rule == "none" else rule
