"""Optimizers, also inside wrappers such as timm's `Lookahead`, and the learning rate of an update.

The rate is a pure function of the update's number, which `UpdateSchedule` sets:
lr(update) = base x batch scale x warm-up(update) x curve(update). A scheduler that counts its own steps, or multiplies
the previous rate, is wrong after a resume, a skipped step or a change of the run's length.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from callbacks.lib.lightning_internals import attached_trainer
from callbacks.lib.updates import updates_made
from datamodules.errors import UserError
from datamodules.lightning import pl


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer is one of torch's, which draw no random numbers."""
    return type(optimizer).__module__.startswith("torch.optim.")


def calls_closure_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to call its closure once per step."""
    return is_torchs(optimizer) and not isinstance(optimizer, LBFGS)


def optimizer_layers(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return an optimizer, the one that it wraps, and so on; each has the same parameter groups."""
    groups = optimizer.param_groups
    members: list[Any] = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    inner = [member for member in members if member.param_groups is groups]
    return [optimizer, *optimizer_layers(inner[0])] if inner else [optimizer]


def _calls_hooks(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer calls registered hooks."""
    return getattr(type(optimizer).step, "hooked", False)  # torch marks such a step by this attribute.


def has_plain_zeroing(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `zero_grad` is torch's own, and does no more than setting gradients to None."""
    is_stock = getattr(type(optimizer), "zero_grad", None) is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
    # If a constructor leaves out torch's, it is the first `zero_grad` that makes the step call hooks.
    return is_stock and _calls_hooks(optimizer)


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer, whose step calls registered hooks; the step of a wrapper may not.

    Raises:
        UserError: the step calls no hooks.
    """
    innermost = optimizer_layers(optimizer)[-1]
    if not _calls_hooks(innermost):
        raise UserError(
            f"{type(innermost).__name__}.step() calls no hooks, as where its constructor leaves out"
            " super().__init__(): call it there, or pass another optimizer"
        )
    return innermost


def skip_step_on_device(optimizer: Optimizer, flag: Tensor | None) -> None:
    """Let a fused optimizer of torch make no step where the device finds a flag of 1; None ends that.

    Others have no such switch, and make the step with gradients of zero.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    untyped: Any = optimizer
    untyped.grad_scale = None
    untyped.found_inf = flag


Rate: TypeAlias = float | Tensor


def learning_rate(base: Rate, batch_scale: float, warmup: float, curve: float) -> Rate:
    """Return the learning rate of an update.

    Args:
        base: peak rate of the parameter group, at the base batch size.
        batch_scale: how much the rate grows with the global batch.
        warmup: factor of the warm-up at the update.
        curve: factor of the schedule at the update.

    Example:
        >>> learning_rate(0.1, batch_scale=2.0, warmup=0.5, curve=0.75)
        0.07500000000000001
    """
    # The order of the products decides the last bit.
    return (base * curve) * (warmup * batch_scale)


def warmup_factor(progress: float, start_factor: float = 0.01) -> float:
    """Return the factor of the learning rate at a fraction of the warm-up: `start_factor` at 0, and 1 from 1 on.

    Example:
        >>> [warmup_factor(progress, start_factor=0.5) for progress in (0, 0.5, 1, 7)]
        [0.5, 0.75, 1.0, 1.0]
    """
    return 1.0 if progress >= 1 else start_factor + (1 - start_factor) * progress


def warmup_after(updates: float, length: float) -> float:
    """Return the factor of a warm-up of `length` updates after a number of updates; 1 without a warm-up."""
    return warmup_factor(updates / length) if updates < length else 1.0


class UpdateSchedule(LRScheduler):
    """Scheduler that sets the learning rates of an optimizer from the Trainer's number of the update.

    It sets the rates as the optimizer steps, so they are right after a resume, another length of the run, or another
    rate in the checkpoint. `step` sets them for the next update, for callbacks and loggers that read them in between.
    `UpdateLoop` begins each epoch with `begin_epoch`; in Lightning's own loop each step reads the length of the run.
    It has no state.

    Args:
        optimizer: any optimizer; the rates of its groups are the peaks.
        module: the module that trains with the optimizer.
        plan: returns, for a Trainer that trains, the function from the number of an update to a factor of the rates.
        first: the factor of the first update, which does not depend on the length of the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: pl.LightningModule,
        plan: Callable[[pl.Trainer], Callable[[int], float]],
        first: float,
    ) -> None:
        self.used: list[Rate] = []
        """The rates of the last step, by group."""
        self._module = module
        self._plan = plan
        self._curve: Callable[[int], float] = lambda _: first
        self._trainer: pl.Trainer | None = None
        """The Trainer of an `UpdateLoop` within an epoch of this schedule."""
        self.remove()
        super().__init__(optimizer)
        stepping_optimizer(optimizer).register_step_pre_hook(self._before_step)

    @property
    def updates(self) -> int:
        """Number of updates made before the one whose rates are set."""
        return self.last_epoch

    def warm_up(self, length: int, batch_scale: float) -> None:
        """Set two more factors: a warm-up of `length` updates, and how much the rates grow with the global batch."""
        self._warmup_length = length
        self._batch_scale = batch_scale

    def remove(self) -> None:
        """Remove the factors of `warm_up`."""
        self.warm_up(0, 1.0)

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Keep the length of the run for an epoch, between two of which it may change."""
        self._trainer = trainer
        self.read_length(trainer)

    def end_epoch(self) -> None:
        """End the epoch of `begin_epoch`."""
        self._trainer = None

    def read_length(self, trainer: pl.Trainer) -> None:
        """Read the length of the run, and set the rates of its next update."""
        self._curve = self._plan(trainer)
        self.set_rates(updates_made(trainer))

    def set_rates(self, update: int) -> None:
        """Set the rates of the update with this number, counted from 0."""
        self.last_epoch = update
        curve = self._curve(update)
        warmup = warmup_after(update, self._warmup_length)
        groups = self.optimizer.param_groups
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = learning_rate(base, self._batch_scale, warmup, curve)
        self._last_lr = [group["lr"] for group in groups]

    def _before_step(self, *_: Any) -> None:
        if self._trainer is None:
            trainer = attached_trainer(self._module)
            # Lightning's Tuner replaces this scheduler with its own, while this hook stays registered.
            if trainer is None or all(config.scheduler is not self for config in trainer.lr_scheduler_configs):
                return
            self.read_length(trainer)
        else:
            updates = updates_made(self._trainer)
            # `step` has set them after the last update, unless other code has changed them since.
            rates = [group["lr"] for group in self.optimizer.param_groups]
            if updates != self.last_epoch or not all(map(operator.is_, rates, self._last_lr)):
                self.set_rates(updates)
        self.used = self._last_lr

    @override
    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next update."""
        self._step_count += 1
        self.set_rates(self.last_epoch + 1)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the Trainer saves the number of updates."""
        return {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the length of the run is not known yet, and the first update sets its rates."""


def schedule_of(optimizer: Optimizer, trainer: pl.Trainer) -> UpdateSchedule | None:
    """Return the `UpdateSchedule` of an optimizer; None if it has another scheduler or none."""
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, UpdateSchedule) and config.scheduler.optimizer is optimizer:
            return config.scheduler
    return None
