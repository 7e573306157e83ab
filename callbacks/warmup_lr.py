"""Warm-up and batch-size scaling of the learning rate, on top of any schedule.

The schedules of the recipes take both as factors of the rate of an update (`callbacks.lib.rates`). Other schedulers
know no warm-up: chained ones move on when float16 skipped the update (#5558), cannot wrap ReduceLROnPlateau (#10759),
and break when a parameter group is added. Their rate is multiplied only while the optimiser steps, so none notices.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.hooks import log_after_update, log_interval
from callbacks.lib.optimizers import stepping_optimizer
from callbacks.lib.rates import UpdateSchedule, schedule_of
from callbacks.lib.updates import duration_to_updates, global_batch_size, total_updates, updates_made
from datamodules.errors import UserError
from datamodules.notes import warn

Scale = Literal["linear", "sqrt"]


def warmup_factor(progress: float, start_factor: float = 0.01) -> float:
    """The factor of the learning rate at a fraction of the warm-up: `start_factor` at 0, and 1 from 1 on.

    Example:
        >>> [warmup_factor(progress, start_factor=0.5) for progress in (0, 0.5, 1, 7)]
        [0.5, 0.75, 1.0, 1.0]
    """
    return 1.0 if progress >= 1 else start_factor + (1 - start_factor) * progress


def batch_size_scale(batch_size: int, base_batch_size: int, scale: Scale | None) -> float:
    """The factor of a learning rate, stated for `base_batch_size`, at another global batch.

    Linear suits SGD (Goyal et al., 2017), the square root adaptive optimisers (Krizhevsky, 2014; Malladi et al., 2022).

    Example:
        >>> [batch_size_scale(1024, base_batch_size=256, scale=scale) for scale in ("linear", "sqrt", None)]
        [4.0, 2.0, 1.0]
    """
    exponent: float = {"linear": 1.0, "sqrt": 0.5, None: 0.0}[scale]
    return float((batch_size / base_batch_size) ** exponent)


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
    """Multiplies the learning rates of an optimizer while it steps, and restores them after the step.

    So no schedule notices, whatever it reads or writes. Groups that are added later are also multiplied.

    Args:
        optimizer: any.
        factor: of the number of updates made so far.
        updates: made already.
        length: an update that float16 skips on the device is not counted before this number of updates. Looking at it
            waits for the device, so it is not done for longer.

    Raises:
        UserError: the optimiser sets its own rate, or its step calls no hooks.

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
        optimizer = stepping_optimizer(optimizer)
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise UserError(
                f"{type(optimizer).__name__} has no rate, as where lr=None lets it set its own: pass one, or"
                " remove WarmupLR"
            )
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
        for group in self.optimizer.param_groups:
            self._own.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        rates = (group["lr"] for group in self.optimizer.param_groups)
        self.used = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._restore()
        # A fused optimiser, which float16 lets decide by itself, finds an infinite gradient and does nothing.
        found = getattr(self.optimizer, "found_inf", None) if self.updates < self._length else None
        self.updates += 0 if found is not None and bool(found) else 1

    def _restore(self) -> None:
        for group, rate in self._own:
            group["lr"] = rate
        self._own = []


@dataclass
class _Fit:
    """What `WarmupLR` keeps for one fit."""

    rates: Sequence[RateFactor | UpdateSchedule] = ()
    """What sets the rates of each optimiser while it steps."""
    logged_step: int | None = None


class WarmupLR(pl.Callback):
    """Warms the learning rate up, on top of any schedule of the module, or of none.

    Runs on: each optimizer step that is not skipped, through the optimizer's own hooks.

    The n-th update uses the schedule's rate times ``warmup_factor(n / length)``. The rates used are logged as ``lr``
    (further groups as ``lr/<name or number>``) every `log_every_n_steps` updates; they are also in
    `trainer.callback_metrics`, without a logger.

    A recipe's schedule takes the factor, at the Trainer's number of the update, so that a resumed run has the rates of
    one run of its present length. The rate of any other scheduler, or of none, is multiplied while the optimiser steps,
    in every parameter group, whenever it was added; the optimiser and its checkpoint keep the scheduler's own rate. An
    update that float16 skipped is not counted then, and where a module optimises by hand, those of each optimiser are.

    Args:
        duration: ``"500 steps"``, ``"2 epochs"`` or ``"5%"`` of the run. When a resumed run has other epochs or another
            end, because devices, accumulation or `max_epochs` changed, a warm-up in epochs or per cent on top of
            another scheduler than a recipe's continues at the fraction it had reached.
        scale: how the rate follows the global batch: loader's batch size x devices x accumulated micro-batches.
        base_batch_size: the global batch that the rate is stated for; needed with `scale`.

    Raises:
        UserError: a setting is out of its range, or the duration has no length in this run; it is not in steps, and
            the module optimises by hand.

    Example:
        >>> warmup = WarmupLR("5%", scale="linear", base_batch_size=256)
        >>> trainer = pl.Trainer(callbacks=[warmup], logger=False)
    """

    def __init__(
        self, duration: int | str = "5%", scale: Scale | None = None, base_batch_size: int | None = None
    ) -> None:
        super().__init__()
        if scale not in ("linear", "sqrt", None):
            raise UserError(f'unknown scale {scale!r}: expected "linear", "sqrt" or None')
        if (scale is None) != (base_batch_size is None) or (base_batch_size is not None and base_batch_size < 1):
            raise UserError(
                f'scale={scale!r} with base_batch_size={base_batch_size}: pass both, such as scale="linear",'
                " base_batch_size=256, or neither"
            )
        self.duration = Duration.parse(duration, "the warm-up")
        self.scale: Scale | None = scale
        self.base_batch_size = base_batch_size
        self.length = 0
        self._updates: list[float] = []
        self._fit = _Fit()

    @property
    def updates(self) -> list[float]:
        """Updates made so far, by optimiser."""
        return [rate.updates for rate in self._fit.rates] or self._updates

    def warmup(self, updates: float) -> float:
        """The factor of the warm-up at the update that follows `updates` others."""
        return warmup_factor(updates / self.length) if updates < self.length else 1.0

    def batch_scale(self, trainer: pl.Trainer) -> float:
        """The factor of the global batch size."""
        if self.base_batch_size is None:
            return 1.0
        return batch_size_scale(global_batch_size(trainer), self.base_batch_size, self.scale)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self._updates, self._fit, self.length = [], _Fit(), 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.duration.unit != "steps" and self.duration.value and not pl_module.automatic_optimization:
            raise UserError(
                f'WarmupLR("{self.duration}") needs the length of the run in steps, and {type(pl_module).__name__}'
                ' optimises manually: write the warm-up in steps of each optimiser, such as "500 steps"'
            )
        length = duration_to_updates(self.duration, trainer)
        updates = self.updates
        count = len(trainer.optimizers)
        if self.scale is not None:
            global_batch_size(trainer)  # A loader without batch size is refused here, not by the first step.
        if self.duration.unit != "steps" and self.length not in (0, length):
            updates = [done * length / self.length for done in updates]
        if len(updates) != count:
            # A run that began without this callback is as far as its updates.
            updates = [trainer.global_step // count] * count
        self.length = length
        end = math.inf
        with suppress(UserError):  # Lightning's scheduler of accumulation changes it.
            end = total_updates(trainer)
        if pl_module.automatic_optimization and length > end:
            warn(
                f'warning: WarmupLR("{self.duration}") takes {length:,} updates, and the run ends after {end:,}: the'
                f" learning rate reaches {warmup_factor(end / length):.1%} of its schedule's; pass a shorter warm-up or"
                " more epochs"
            )
        pairs = zip(trainer.optimizers, updates, strict=True)
        self._fit = _Fit([self._rate_of(optimizer, done, trainer) for optimizer, done in pairs])

    def _rate_of(self, optimizer: Optimizer, updates: float, trainer: pl.Trainer) -> RateFactor | UpdateSchedule:
        """Hand the factors to a recipe's schedule, or multiply the rate of another one."""
        schedule = schedule_of(optimizer, trainer)
        if schedule is not None:
            schedule.warm_up(self.warmup, partial(self.batch_scale, trainer))
            return schedule

        def factor(update: float) -> float:
            return self.warmup(update) * self.batch_scale(trainer)

        return RateFactor(optimizer, factor, updates, self.length)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fit, interval = self._fit, log_interval(trainer)
        ends_interval = interval and updates_made(trainer) % interval == 0
        if not (ends_interval or trainer.is_last_batch or fit.logged_step is None):
            return
        step = trainer.global_step
        if step == fit.logged_step or not any(rate.used for rate in fit.rates):
            return
        fit.logged_step = step
        rates: dict[str, float] = {}
        for index, rate in enumerate(fit.rates):
            rates |= rates_by_name(rate.optimizer.param_groups, rate.used, f"lr{index or ''}")
        trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in rates.items()})
        log_after_update(trainer, rates)

    def _release(self, *args: Any, **kwargs: Any) -> None:
        self._updates = self.updates
        for rate in self._fit.rates:
            rate.remove()
        self._fit = _Fit()

    on_exception = teardown = _release

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": list(self.updates), "length": self.length}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates, self.length = [*map(float, state_dict["updates"])], state_dict["length"]
        self._fit = _Fit()
