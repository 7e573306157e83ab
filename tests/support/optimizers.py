"""Optimizers of a user."""

from collections.abc import Callable
from typing import Any

import torch
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


class Forgetful(Optimizer):
    """Wraps another optimizer, as published code of SAM does, and leaves the state of it out of checkpoints."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.inner = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return self.inner.step(closure)  # type: ignore[arg-type]
