"""Warm-up and batch-size scaling of the learning rate, laid over any schedule.

Chained schedulers count what Lightning calls, not what happened: they move on when float16 skipped the update (#5558),
cannot wrap ReduceLROnPlateau (#10759), break when a parameter group is added, and end elsewhere when the number of
updates changes. Here the rate is multiplied only while the optimiser steps, so no schedule notices.
"""

import math
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.global_batch import global_batch_size
from callbacks.lib.trainer_attributes import log_interval
from callbacks.lib.updates import duration_to_updates
from datamodules.errors import UserError

__all__ = ["WarmupLR", "batch_size_scale", "warmup_factor"]

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
        return start_factor ** (1 - progress)
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
    return (batch_size / base_batch_size) ** {"linear": 1.0, "sqrt": 0.5, None: 0.0}[scale]


def skipped_on_device(optimizer: Optimizer) -> bool:
    """Whether a fused optimiser, which float16 lets decide by itself, found an infinite gradient and did nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def rates_by_name(optimizers: list[Optimizer], rates: dict[int, list[float | Tensor]]) -> dict[str, float]:
    """Learning rates under names that stay when a group is added: ``lr``, then ``lr/<the group's name, or number>``."""
    named = {}
    for index, of_groups in rates.items():
        for number, (group, rate) in enumerate(zip(optimizers[index].param_groups, of_groups, strict=False)):
            name = f"lr{index or ''}" + (f"/{group.get('name', number)}" if number else "")
            named[name] = float(rate)
    return named


class WarmupLR(pl.Callback):
    """Raises the learning rate to that of the module's own schedule, whichever it has, or none.

    Runs on: each optimiser step that really happens, through the optimiser's own hooks.

    The n-th update uses the schedule's rate times ``warmup_factor(n / length)``, in every parameter group, whenever it
    was added. An update that float16 skipped is not counted. The rates used are logged as ``lr`` (further groups as
    ``lr/<name or number>``) at the first update, every `log_every_n_steps` updates and at an epoch's end; they are in
    `trainer.callback_metrics` without a logger too. The optimiser and its checkpoint keep the schedule's own rate.

    Args:
        duration: ``"500 steps"``, ``"2 epochs"`` or ``"5%"`` of the run. When a resumed run has other epochs or another
            end, because devices, accumulation or `max_epochs` changed, a warm-up in epochs or per cent goes on from the
            fraction it had reached.
        kind: the curve; ``"constant"`` stays at `start_factor` until the end.
        start_factor: the first update's fraction of the rate.
        scale: how the rate follows the global batch: loader's batch size x devices x accumulated micro-batches.
        base_batch_size: the global batch that the rate is stated for; needed with `scale`.

    Raises:
        UserError: a setting is out of its range, or the duration has no length in this run.

    Example:
        >>> warmup = WarmupLR("5%", kind="cosine", scale="linear", base_batch_size=256)
        >>> trainer = pl.Trainer(callbacks=[warmup], logger=False)
    """

    def __init__(
        self,
        duration: int | str = "5%",
        kind: Kind = "linear",
        start_factor: float = 0.01,
        scale: Scale | None = None,
        base_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("linear", "cosine", "exponential", "constant"):
            raise UserError(f'unknown kind {kind!r}: expected "linear", "cosine", "exponential" or "constant"')
        if scale not in ("linear", "sqrt", None):
            raise UserError(f'unknown scale {scale!r}: expected "linear", "sqrt" or None')
        if not 0 <= start_factor <= 1 or (kind == "exponential" and not start_factor):
            raise UserError(f"start_factor={start_factor} with kind={kind!r}: expected 0 to 1, exponential above 0")
        if (scale is None) != (base_batch_size is None) or (base_batch_size is not None and base_batch_size < 1):
            raise UserError(
                f'scale={scale!r} with base_batch_size={base_batch_size}: pass both, such as scale="linear",'
                " base_batch_size=256, or neither"
            )
        self.duration = Duration.parse(duration)
        self.kind: Kind = kind
        self.start_factor = start_factor
        self.scale: Scale | None = scale
        self.base_batch_size = base_batch_size
        self.updates: list[float] = []
        self.length = 0
        self._used: dict[int, list[float | Tensor]] = {}
        self._depths: list[int] = []
        self._logged_step: int | None = None
        self._own_rates: list[tuple[dict[str, Any], float | Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def factor(self, trainer: pl.Trainer, updates: float) -> float:
        """What the schedule's rate is multiplied with at the update that follows `updates` others."""
        warmup = warmup_factor(updates / self.length, self.kind, self.start_factor) if updates < self.length else 1.0
        if self.base_batch_size is None:
            return warmup
        return warmup * batch_size_scale(global_batch_size(trainer), self.base_batch_size, self.scale)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self.updates, self.length = [], 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        length = duration_to_updates(self.duration, trainer)
        if self.scale is not None:
            global_batch_size(trainer)  # A loader that does not know is refused here, not by the first step.
        if self.duration.unit != "steps" and self.length not in (0, length):
            self.updates = [updates * length / self.length for updates in self.updates]
        self.length = length
        if len(self.updates) != len(trainer.optimizers):
            # A run that began without this callback is as far as its updates.
            self.updates = [trainer.global_step // len(trainer.optimizers)] * len(trainer.optimizers)
        self._used, self._logged_step, self._depths = {}, None, [0] * len(trainer.optimizers)
        for index, optimizer in enumerate(trainer.optimizers):
            before, after = partial(self._before_step, trainer, index), partial(self._after_step, index)
            self._handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def _before_step(self, trainer: pl.Trainer, index: int, optimizer: Optimizer, *_: Any) -> None:
        # A step that calls its parent class's step runs the hooks once for each.
        self._depths[index] += 1
        factor = self.factor(trainer, self.updates[index])
        if self._depths[index] > 1 or factor == 1:
            return
        tensors: set[int] = set()
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                # A compiled or captured optimiser reads this very tensor, which groups may share.
                if id(rate) not in tensors:
                    self._own_rates.append((group, rate.clone()))
                    tensors.add(id(rate))
                    rate.mul_(factor)
            else:
                self._own_rates.append((group, rate))
                group["lr"] = rate * factor

    def _after_step(self, index: int, optimizer: Optimizer, *_: Any) -> None:
        self._depths[index] -= 1
        if self._depths[index]:
            return
        rates = (group["lr"] for group in optimizer.param_groups)
        self._used[index] = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._restore_rates()
        warming_up = self.updates[index] < self.length
        self.updates[index] += 0 if warming_up and skipped_on_device(optimizer) else 1

    def _restore_rates(self) -> None:
        for group, rate in self._own_rates:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._own_rates = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, interval = trainer.global_step, log_interval(trainer)
        if step == self._logged_step or not self._used:
            return
        if self._logged_step is None or trainer.is_last_batch or (interval and step % interval == 0):
            self._logged_step = step
            rates = rates_by_name(trainer.optimizers, self._used)
            trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in rates.items()})
            for logger in trainer.loggers:
                logger.log_metrics(rates, step=step - 1)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        self._restore_rates()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": list(self.updates), "length": self.length}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates, self.length = list(state_dict["updates"]), state_dict["length"]
