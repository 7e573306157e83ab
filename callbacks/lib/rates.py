"""Learning rate of an update: a pure function of its number, and the scheduler that sets it.

lr(update) = base x batch scale x warm-up(update) x curve(update). A scheduler that counts its own steps, or multiplies
the previous rate, is wrong after a resume, a skipped step or a change of the run's length.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from callbacks.lib.lightning_internals import attached_trainer
from callbacks.lib.optimizers import stepping_optimizer
from callbacks.lib.updates import updates_made
from datamodules.lightning import pl

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


def _no_warmup(update: int) -> float:
    return 1.0


def _no_scale() -> float:
    return 1.0


class UpdateSchedule(LRScheduler):
    """Scheduler that sets the learning rates of an optimizer from the Trainer's number of the update.

    It sets the rates as the optimizer steps, so they are right after a resume, another length of the run, or another
    rate in the checkpoint. `step` sets them for the next update, for callbacks and loggers that read them in between.
    It has no state.

    Args:
        optimizer: any optimizer; the rates of its groups are the peaks.
        module: the module that trains with the optimizer.
        curve: function from the number of an update to a factor of the rates; at 0 it must not need a Trainer.
    """

    def __init__(self, optimizer: Optimizer, module: pl.LightningModule, curve: Callable[[int], float]) -> None:
        self.used: list[Rate] = []
        """The rates of the last step, by group."""
        self._module = module
        self._curve = curve
        self.remove()
        super().__init__(optimizer)
        stepping_optimizer(optimizer).register_step_pre_hook(self._before_step)

    @property
    def updates(self) -> int:
        """Number of updates made before the one whose rates are set."""
        return self.last_epoch

    def warm_up(self, warmup: Callable[[int], float], batch_scale: Callable[[], float]) -> None:
        """Set two more factors: a function of the number of the update, and one of the global batch size."""
        self._warmup = warmup
        self._batch_scale = batch_scale

    def remove(self) -> None:
        """Remove the factors of `warm_up`."""
        self.warm_up(_no_warmup, _no_scale)

    def set_rates(self, update: int) -> None:
        """Set the rates of the update with this number, counted from 0."""
        self.last_epoch = update
        curve = self._curve(update)
        warmup = self._warmup(update)
        batch_scale = self._batch_scale()
        groups = self.optimizer.param_groups
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = learning_rate(base, batch_scale, warmup, curve)
        self._last_lr = [group["lr"] for group in groups]

    def _before_step(self, *_: Any) -> None:
        trainer = attached_trainer(self._module)
        # Lightning's Tuner replaces this scheduler with its own, while this hook stays registered.
        if trainer is None or all(config.scheduler is not self for config in trainer.lr_scheduler_configs):
            return
        updates = updates_made(trainer)
        # `step` has set them after the last update of the epoch, unless other code has changed them since. The length
        # of the run may change between two epochs.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        is_set = updates == self.last_epoch and all(map(operator.is_, rates, self._last_lr))
        if not is_set or trainer.fit_loop.batch_idx <= 0:
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
