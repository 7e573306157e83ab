"""Warm-up and batch-size scaling of the learning rate, on top of any schedule.

The schedules of the recipes take both as factors of the rate of an update (`callbacks.lib.optimizers`). Chained
schedulers of torch advance when float16 skipped the update (#5558), cannot wrap ReduceLROnPlateau (#10759), and break
when a parameter group is added. So the rate of any other scheduler is multiplied only while the optimizer steps.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.lightning_internals import OneLightningCallback, callbacks_of, set_callbacks
from callbacks.lib.loaded_updates import global_batch_size
from callbacks.lib.optimizers import UpdateSchedule, schedule_of, stepping_optimizer, warmup_after, warmup_factor
from callbacks.lib.updates import Duration, duration_to_updates, total_updates
from callbacks.step_metrics import StepMetrics
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.notes import warn
from datamodules.ranges import COUNT, check_ranges

Scale = Literal["linear", "sqrt"]


def batch_size_scale(batch_size: int, base_batch_size: int, scale: Scale | None) -> float:
    """Return the factor by which a learning rate for `base_batch_size` changes at another global batch size.

    Linear suits SGD (Goyal et al., 2017), the square root adaptive optimizers (Krizhevsky, 2014; Malladi et al., 2022).

    Example:
        >>> [batch_size_scale(1024, base_batch_size=256, scale=scale) for scale in ("linear", "sqrt", None)]
        [4.0, 2.0, 1.0]
    """
    exponent: float = {"linear": 1.0, "sqrt": 0.5, None: 0.0}[scale]
    return float((batch_size / base_batch_size) ** exponent)


class RateFactor:
    """Factor on the learning rates of an optimizer while it steps; the rates are restored after the step.

    A schedule never reads or writes a multiplied rate. Groups that are added later are also multiplied.

    Args:
        optimizer: any optimizer.
        factor: function from the number of updates so far to the factor.
        updates: number of updates already made.
        length: before this number of updates, an update that float16 skips on the device is not counted. The check
            waits for the device, so later updates are not checked.

    Raises:
        UserError: the optimizer sets its own rate, or its step calls no hooks.

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
                f"{type(optimizer).__name__} has no rate, as where {spelled('lr', None)} lets it set its own: pass one,"
                " or remove WarmupLR"
            )
        self.optimizer = optimizer
        self.updates = updates
        self.used: list[float | Tensor] = []
        """The rates of the last step, by group."""
        self._factor = factor
        self._length = length
        self._depth = 0
        self._unscaled_rates: list[tuple[dict[str, Any], float | Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Remove the hooks, and restore the optimizer's rates."""
        self._restore()
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, *_: Any) -> None:
        # A `step` that calls the `step` of its parent class runs the hooks once for each of them.
        self._depth += 1
        factor = self._factor(self.updates)
        if self._depth > 1 or factor == 1:
            return
        for group in self.optimizer.param_groups:
            self._unscaled_rates.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        rates = (group["lr"] for group in self.optimizer.param_groups)
        self.used = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self._restore()
        # With float16 a fused optimizer itself skips an update with an infinite gradient, on the device.
        found_inf = None
        if self.updates < self._length and getattr(self.optimizer, "grad_scale", None) is not None:
            found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self.updates += 1

    def end_step(self) -> None:
        """Restore the rates after a step that was begun and not made, as of an update without targets."""
        if self._depth:
            self._depth = 0
            self._restore()

    def _restore(self) -> None:
        for group, rate in self._unscaled_rates:
            group["lr"] = rate
        self._unscaled_rates = []


class WarmupLR(OneLightningCallback):
    """Callback that warms up the learning rate, on top of any schedule of the module or none.

    Runs on: each optimizer step that is not skipped, through the optimizer's own hooks.

    The n-th update uses the schedule's rate times ``warmup_factor(n / length)``. The rates used are logged as ``lr``
    (further groups as ``lr/<name or number>``) every `log_every_n_steps` updates, by the run's `StepMetrics` or one of
    its own; they are also in `trainer.callback_metrics`, without a logger.

    A recipe's schedule takes the factor at the Trainer's number of the update, so a resumed run has the rates of an
    uninterrupted run of its present length. Any other rate is multiplied while the optimizer steps, in every parameter
    group, even one that was added later. The optimizer and its checkpoint keep the scheduler's own rate. An update that
    float16 skipped is then not counted, and under manual optimization the steps of each optimizer are counted.

    Args:
        duration: ``"500 steps"``, ``"2 epochs"`` or ``"5%"`` of the run. If devices, accumulation or `max_epochs`
            change at a resume, the length in updates may change. On top of a scheduler that is not a recipe's, the
            warm-up then continues at the fraction it had reached.
        scale: how the rate follows the global batch size: loader's batch size x devices x accumulated micro-batches.
        base_batch_size: the global batch size for which the rate is stated; needed with `scale`.

    Raises:
        UserError: a setting is out of range, or the duration has no length in this run; or it is not in steps, and the
            module optimizes manually.

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
        check_ranges(base_batch_size=(base_batch_size, COUNT))
        if (scale is None) != (base_batch_size is None):
            raise UserError(
                f'scale={scale!r} with base_batch_size={base_batch_size}: pass both, such as scale="linear",'
                " base_batch_size=256, or neither"
            )
        self.duration = Duration.parse(duration, "the warm-up")
        self.scale: Scale | None = scale
        self.base_batch_size = base_batch_size
        self.length = 0
        self._updates: list[float] = []
        self._rates: Sequence[RateFactor | UpdateSchedule] = ()
        """The object that sets the rates of each optimizer while it steps."""
        self._batch_scale = 1.0
        """`batch_scale` of the running epoch."""
        self._metrics: StepMetrics | None = None
        """Logs the rates; added to a Trainer without one."""

    @property
    def updates(self) -> list[float]:
        """Updates made so far, by optimizer."""
        return [rate.updates for rate in self._rates] or self._updates

    def warmup(self, updates: float) -> float:
        """Return the factor of the warm-up after a number of updates."""
        return warmup_after(updates, self.length)

    def batch_scale(self, trainer: pl.Trainer) -> float:
        """Return the factor of the global batch size."""
        if self.base_batch_size is None:
            return 1.0
        return batch_size_scale(global_batch_size(trainer), self.base_batch_size, self.scale)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        callbacks = callbacks_of(trainer)
        if not any(isinstance(callback, StepMetrics) for callback in callbacks):
            self._metrics = StepMetrics(None, norm=False, finite=False)
            set_callbacks(trainer, [*callbacks, self._metrics])
        if trainer.global_step == 0:
            self._updates = []
            self._rates = ()
            self.length = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.duration.unit != "steps" and self.duration.value and not pl_module.automatic_optimization:
            raise UserError(
                f'WarmupLR("{self.duration}") needs the length of the run in steps, and {type(pl_module).__name__}'
                ' optimizes manually: write the warm-up in steps of each optimizer, such as "500 steps"'
            )
        length = duration_to_updates(self.duration, trainer)
        updates = self.updates
        count = len(trainer.optimizers)
        self._batch_scale = self.batch_scale(trainer)
        if self.duration.unit != "steps" and self.length not in (0, length):
            updates = [done * length / self.length for done in updates]
        if len(updates) != count:
            # The run began without this callback, whose checkpoint has no counts: they follow from the updates made.
            updates = [trainer.global_step // count] * count
        self.length = length
        end = math.inf
        with suppress(UserError):  # Under `GradientAccumulationScheduler` the number is unknown.
            end = total_updates(trainer)
        if pl_module.automatic_optimization and length > end:
            warn(
                f'warning: WarmupLR("{self.duration}") takes {length:,} updates, and the run ends after {end:,}: the'
                f" learning rate reaches {warmup_factor(end / length):.1%} of its schedule's; pass a shorter warm-up or"
                " more epochs"
            )
        pairs = zip(trainer.optimizers, updates, strict=True)
        self._rates = [self._rate_of(optimizer, done, trainer) for optimizer, done in pairs]
        next(callback for callback in callbacks_of(trainer) if isinstance(callback, StepMetrics)).rates = self._rates

    def _rate_of(self, optimizer: Optimizer, updates: float, trainer: pl.Trainer) -> RateFactor | UpdateSchedule:
        """Pass the factors to a recipe's schedule, or multiply the rate of another scheduler."""
        schedule = schedule_of(optimizer, trainer)
        if schedule is not None:
            schedule.warm_up(self.length, self._batch_scale)
            return schedule

        def factor(update: float) -> float:
            return self.warmup(update) * self._batch_scale

        return RateFactor(optimizer, factor, updates, self.length)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batch_scale = self.batch_scale(trainer)  # An epoch may have new loaders.
        for rate in self._rates:
            if isinstance(rate, UpdateSchedule):
                rate.warm_up(self.length, self._batch_scale)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for rate in self._rates:
            if isinstance(rate, RateFactor):
                rate.end_step()

    def _release(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._updates = self.updates
        for rate in self._rates:
            rate.remove()
        self._rates = ()
        callbacks = callbacks_of(trainer)
        for callback in callbacks:
            if isinstance(callback, StepMetrics):
                callback.rates = ()
        if self._metrics is not None:
            set_callbacks(trainer, [callback for callback in callbacks if callback is not self._metrics])
            self._metrics = None

    on_exception = teardown = _release

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": list(self.updates), "length": self.length}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = [*map(float, state_dict["updates"])]
        self.length = state_dict["length"]
        self._rates = ()
