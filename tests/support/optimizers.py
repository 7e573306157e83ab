"""Optimizers of a user."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Counting(Optimizer):
    """Steps with the gradient's sign, ever smaller; it keeps the number of its updates in its groups, as some do."""

    def __init__(self, params: Any, lr: float = 1.0, scale: float = 1.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale, "weight_decay": weight_decay})
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * group["scale"] / group["k"])
        return loss


class WithoutRate(Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class TwoModes(torch.optim.SGD):
    """Trains other weights than those that it shows after `eval`."""

    def train(self) -> None: ...
    def eval(self) -> None: ...


class Wrapper(Optimizer):
    """Steps towards slow weights every second step, as timm's `Lookahead`: it has the groups of another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        # As there, without super().__init__(): its step calls no hooks.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = self.inner.step(closure)  # type: ignore[arg-type]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                state = self.inner.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                if group["steps"] % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Forgetful(Optimizer):
    """Wraps another optimizer, as published code of SAM does, and leaves the state of it out of checkpoints."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.inner = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return self.inner.step(closure)  # type: ignore[arg-type]


class Packed(Tensor):
    """A tensor of a class of its own, as the states of 8-bit optimizers are."""


class PackedStates(torch.optim.SGD):
    """Keeps its momentum in such a tensor."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)  # type: ignore[arg-type]
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].as_subclass(Packed)
        return loss
