"""Warm-up and batch-size scaling of the learning rate, on top of any schedule.

Chained schedulers count what Lightning calls, not what happened: they move on when float16 skipped the update (#5558),
cannot wrap ReduceLROnPlateau (#10759), break when a parameter group is added, and end elsewhere when the number of
updates changes. Here the rate is multiplied only while the optimiser steps, so no schedule notices.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from callbacks.lib.durations import Duration
from callbacks.lib.global_batch import global_batch_size
from callbacks.lib.idle_hooks import drop_idle_hooks, restore_hooks
from callbacks.lib.rate_factor import Kind, RateFactor, Scale, batch_size_scale, rates_by_name, warmup_factor
from callbacks.lib.trainer_attributes import log_interval
from callbacks.lib.updates import duration_to_updates, updates_made
from datamodules.errors import UserError

__all__ = ["WarmupLR"]


class WarmupLR(pl.Callback):
    """Raises the learning rate to that of the module's own schedule, whichever it has, or none.

    Runs on: each optimiser step that really happens, through the optimiser's own hooks.

    The n-th update uses the schedule's rate times ``warmup_factor(n / length)``, in every parameter group, whenever it
    was added. An update that float16 skipped is not counted. Where a module optimises by hand, a warm-up in updates
    counts those of each optimiser, and one in epochs or per cent the batches. The rates used are logged as ``lr``
    (further groups as ``lr/<name or number>``) at the first update, every `log_every_n_steps` updates and at an epoch's
    end; they are in `trainer.callback_metrics` without a logger too. The optimiser and its checkpoint keep the
    schedule's own rate.

    Args:
        duration: ``"500 steps"``, ``"2 epochs"`` or ``"5%"`` of the run. When a resumed run has other epochs or another
            end, because devices, accumulation or `max_epochs` changed, a warm-up in epochs or per cent continues at the
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
        try:
            self.duration = Duration.parse(duration)
        except UserError as error:
            raise UserError(f"`duration`: {error}") from error
        self.kind: Kind = kind
        self.start_factor = start_factor
        self.scale: Scale | None = scale
        self.base_batch_size = base_batch_size
        self.length = 0
        self._updates: list[float] = []
        self._factors: list[RateFactor] = []
        self._logged_step: int | None = None
        self._batches: float | None = None
        """Those trained, where they are what the warm-up counts."""

    @property
    def updates(self) -> list[float]:
        """Updates made so far, by optimiser."""
        return [factor.updates for factor in self._factors] or self._updates

    def factor(self, trainer: pl.Trainer, updates: float) -> float:
        """What the schedule's rate is multiplied with at the update that follows `updates` others."""
        warmup = warmup_factor(updates / self.length, self.kind, self.start_factor) if updates < self.length else 1.0
        if self.base_batch_size is None:
            return warmup
        return warmup * batch_size_scale(global_batch_size(trainer), self.base_batch_size, self.scale)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self._updates, self._factors, self.length = [], [], 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        length, updates, count = duration_to_updates(self.duration, trainer), self.updates, len(trainer.optimizers)
        if self.scale is not None:
            global_batch_size(trainer)  # A loader without batch size is refused here, not by the first step.
        if self.duration.unit != "steps" and self.length not in (0, length):
            updates = [done * length / self.length for done in updates]
        if len(updates) != count:
            # A run that began without this callback is as far as its updates.
            updates = [trainer.global_step // count if self.duration.unit == "steps" else updates_made(trainer)] * count
        self.length, self._logged_step = length, None
        counts_batches = self.duration.unit != "steps" and not pl_module.automatic_optimization
        self._batches = updates[0] if counts_batches else None
        drop_idle_hooks(self)
        self._factors = [
            RateFactor(optimizer, lambda updates: self.factor(trainer, updates), done, length)
            for optimizer, done in zip(trainer.optimizers, updates, strict=True)
        ]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, interval, made = trainer.global_step, log_interval(trainer), updates_made(trainer)
        if self._batches is not None:
            updates_made(trainer, self.duration)  # Refuses what is no number of batches.
            self._batches += 1
            for factor in self._factors:
                factor.updates = self._batches
        if step == self._logged_step or not any(factor.used for factor in self._factors):
            return
        if self._logged_step is None or trainer.is_last_batch or (interval and made % interval == 0):
            self._logged_step = step
            rates: dict[str, float] = {}
            for index, factor in enumerate(self._factors):
                rates |= rates_by_name(factor.optimizer.param_groups, factor.used, f"lr{index or ''}")
            trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in rates.items()})
            for logger in trainer.loggers:
                logger.log_metrics({**rates, "epoch": trainer.current_epoch}, step=step - 1)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        restore_hooks(self)
        self._updates = self.updates
        for factor in self._factors:
            factor.remove()
        self._factors = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": list(self.updates), "length": self.length}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates, self._factors, self.length = [*map(int, state_dict["updates"])], [], state_dict["length"]
