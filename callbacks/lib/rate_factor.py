"""A factor on the learning rate of any optimiser, under any schedule, as functions of a number."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Kind", "RateFactor", "Scale", "batch_size_scale", "rates_by_name", "warmup_factor"]

Kind = Literal["linear", "cosine", "exponential", "constant"]
Scale = Literal["linear", "sqrt"]


def warmup_factor(progress: float, kind: Kind = "linear", start_factor: float = 0.01) -> float:
    """What to multiply the learning rate with at a fraction of the warm-up: `start_factor` at 0, and 1 from 1 on.

    Example:
        >>> [warmup_factor(progress, "linear", start_factor=0.5) for progress in (0, 0.5, 1, 7)]
        [0.5, 0.75, 1.0, 1.0]
    """
    if progress >= 1:
        return 1.0
    if kind == "constant":
        return start_factor
    if kind == "exponential":
        return float(start_factor ** (1 - progress))
    if kind == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return start_factor + (1 - start_factor) * progress


def batch_size_scale(batch_size: int, base_batch_size: int, scale: Scale | None) -> float:
    """What a learning rate stated for `base_batch_size` is multiplied with at another global batch.

    Linear suits SGD (Goyal et al., 2017), the square root adaptive optimisers (Krizhevsky, 2014; Malladi et al., 2022).

    Example:
        >>> [batch_size_scale(1024, base_batch_size=256, scale=scale) for scale in ("linear", "sqrt", None)]
        [4.0, 2.0, 1.0]
    """
    exponent: float = {"linear": 1.0, "sqrt": 0.5, None: 0.0}[scale]
    return float((batch_size / base_batch_size) ** exponent)


def skipped_on_device(optimizer: Optimizer) -> bool:
    """Whether a fused optimiser, which float16 lets decide by itself, found an infinite gradient and did nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def rates_by_name(groups: Sequence[dict[str, Any]], rates: Sequence[float | Tensor], prefix: str) -> dict[str, float]:
    """Learning rates, one for all groups with the same, under names that stay when a group is added.

    The first is called the prefix, the others ``<prefix>/<name or number>`` after the first group that has the rate, or
    what its groups' names begin with. Groups that begin with other rates are kept apart, also where a schedule ends at
    0 for all.

    Example:
        >>> rates_by_name([{}, {"name": "head"}, {}], [0.1, 0.2, 0.3], "lr")
        {'lr': 0.1, 'lr/head': 0.2, 'lr/2': 0.3}
        >>> names = ("layer4.decay", "layer4.no_decay", "fc.decay", "fc.no_decay")
        >>> rates_by_name([{"name": name} for name in names], [0.1, 0.1, 0.5, 0.5], "lr")
        {'lr': 0.1, 'lr/fc': 0.5}
    """
    names: dict[tuple[float, float], list[str]] = {}
    for number, (group, rate) in enumerate(zip(groups, rates, strict=False)):
        key = float(group.get("initial_lr", rate)), float(rate)
        names.setdefault(key, []).append(str(group.get("name", number)))
    named: dict[str, float] = {}
    for (_, rate), (first, *others) in names.items():
        parents = {name.rpartition(".")[0] for name in (first, *others)}
        name = parents.pop() if others and len(parents) == 1 else ""
        taken = not name or f"{prefix}/{name}" in named
        named[f"{prefix}/{first if taken else name}" if named else prefix] = rate
    return named


class RateFactor:
    """Multiplies the learning rates of an optimiser while it steps; between two steps they are as before.

    So no schedule notices, whatever it reads or writes. Groups that are added later are multiplied too.

    Args:
        optimizer: any.
        factor: of the number of updates made so far.
        updates: made already.
        length: an update that float16 skips on the device is not counted before this number of updates. Looking at it
            waits for the device, so it is not done for longer.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
        >>> warmup = RateFactor(sgd, lambda updates: warmup_factor(updates / 4, start_factor=0.5))
        >>> sgd.step()
        >>> warmup.used, sgd.param_groups[0]["lr"], warmup.updates
        ([0.2], 0.4, 1)
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[float], float], updates: float = 0, length: float = 0
    ) -> None:
        self.optimizer, self.updates = optimizer, updates
        self.used: list[float | Tensor] = []
        """The rates of the last step, by group."""
        self._factor, self._length = factor, length
        self._depth = 0
        self._own: list[tuple[dict[str, Any], float | Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Leave the optimiser as it was."""
        self._restore()
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, *_: Any) -> None:
        # A step that calls its parent class's step runs the hooks once for each.
        self._depth += 1
        factor = self._factor(self.updates)
        if self._depth > 1 or factor == 1:
            return
        tensors: set[int] = set()
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if not isinstance(rate, Tensor):
                self._own.append((group, rate))
                group["lr"] = rate * factor
            elif id(rate) not in tensors:
                # A compiled or captured optimiser reads this very tensor, which groups may share.
                tensors.add(id(rate))
                self._own.append((group, rate.clone()))
                rate.mul_(factor)

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        rates = (group["lr"] for group in self.optimizer.param_groups)
        self.used = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._restore()
        self.updates += 0 if self.updates < self._length and skipped_on_device(self.optimizer) else 1

    def _restore(self) -> None:
        for group, rate in self._own:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._own = []
