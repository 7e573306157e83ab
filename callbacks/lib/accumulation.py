"""Weights of micro-batches that make their gradients add up to the mean over all targets of an update."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from callbacks.lib.batch_norm import processes_together
from callbacks.lib.global_batch import loader_batch_size
from callbacks.lib.trainer_attributes import callbacks_of
from callbacks.lib.updates import AccumulationSchedule
from datamodules.errors import UserError

__all__ = [
    "AccumulationWindow",
    "batches_for_samples",
    "check_closures",
    "check_schedule",
    "check_single_accumulation",
    "check_strategy",
    "current_factor",
    "describe_second_call",
    "ends_window",
    "move_place_in_epoch",
    "samples_per_batch",
    "scale_gradients",
    "warn_of_separate_statistics",
    "weigh_loss",
]


def at_least_one(count: float | Tensor) -> float | Tensor:
    """A count to divide by, where there may be no target."""
    return count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1.0)


def batches_for_samples(batches: int, old_size: int, new_size: int) -> int:
    """Whole batches of `new_size` samples in so many batches of `old_size`.

    Example:
        >>> batches_for_samples(6, old_size=8, new_size=16)
        3
    """
    return batches * old_size // new_size


def scale_gradients(parameters: Iterable[nn.Parameter], weight: float | Tensor) -> None:
    """Multiplies the gradients of parameters in place, without waiting for the device."""
    if isinstance(weight, Tensor) or weight != 1:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], weight)


def weigh_loss(loss: Tensor, weight: float | Tensor) -> None:
    """Multiplies the gradient that flows back from a loss; its value stays."""
    if isinstance(weight, Tensor):
        weight = weight.to(loss.dtype)
    elif weight == 1:
        return
    hook: Callable[[Tensor], Tensor] = lambda gradient: gradient * weight  # noqa: E731
    loss.register_hook(hook)


class AccumulationWindow:
    """The micro-batches of one update, each with the mean loss over its own number of targets.

    Multiply each loss by its weight before the backward pass. Weights are relative to the first micro-batch, which
    keeps float16 in range. Before the backward pass of the last one, scale the gradients that are there: then all add
    up to the mean over all targets, and DDP, which averages over the ranks during that pass, reduces final gradients.

    A count is a float, or a tensor of no dimension, which is not read back from the device.

    Args:
        divided_by: what each loss was divided by already; Lightning divides by the number of micro-batches.

    Example:
        >>> window = AccumulationWindow()
        >>> first = window.weight(2.0)
        >>> earlier, last = window.last_weight(6.0)
        >>> first * earlier, last
        (0.25, 0.75)
    """

    def __init__(self, divided_by: float = 1.0) -> None:
        self._divided_by = divided_by
        self._total: float | Tensor = 0.0
        self._unit: float | Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Whether gradients of earlier micro-batches wait to be scaled."""
        return self._unit is not None

    def weight(self, count: float | Tensor) -> float | Tensor:
        """The weight of a micro-batch that another one follows."""
        if self._unit is None:
            self._unit = at_least_one(count) * self._divided_by
        self._total = self._total + count
        return count * self._divided_by / self._unit

    def last_weight(
        self,
        count: float | Tensor,
        world_size: int = 1,
        sum_over_ranks: Callable[[float | Tensor], float | Tensor] | None = None,
    ) -> tuple[float | Tensor, float | Tensor]:
        """The weight of the gradients so far, and that of the last micro-batch."""
        self._total = self._total + count
        total = self._total if sum_over_ranks is None else sum_over_ranks(self._total)
        # DDP averages over the ranks, so each divides by the targets of an average rank.
        divisor = at_least_one(total) / world_size
        return self._close(divisor), count * self._divided_by / divisor

    def close(self) -> float | Tensor:
        """The weight of the gradients so far, where no micro-batch follows."""
        return self._close(at_least_one(self._total))

    def _close(self, divisor: float | Tensor) -> float | Tensor:
        earlier = 1.0 if self._unit is None else self._unit / divisor
        self._total, self._unit = 0.0, None
        return earlier


def check_closures(trainer: pl.Trainer, largest: int) -> None:
    """Refuses LBFGS where its closure would compute a part of the update.

    Args:
        largest: micro-batches of an update.

    Raises:
        UserError: there are several devices or micro-batches.
    """
    if (largest > 1 or trainer.world_size > 1) and isinstance(trainer.optimizers[0], LBFGS):
        raise UserError(describe_second_call(trainer.optimizers[0]))


def describe_second_call(optimizer: Optimizer) -> str:
    """What is wrong with an optimiser that calls its closure again on several devices or micro-batches."""
    return (
        f"{type(optimizer).__name__} calls its closure several times per update, which is exact on one device with one"
        " micro-batch per update only: pass devices=1, steps=1 and a `batch_size` that holds the whole update, or"
        " another optimiser"
    )


def check_single_accumulation(trainer: pl.Trainer, pl_module: pl.LightningModule, kinds: tuple[type, ...]) -> None:
    """Refuses a run in which something else accumulates as well.

    Args:
        kinds: the classes of callbacks that accumulate.

    Raises:
        UserError: there are several, or the module optimises manually.
    """
    if not pl_module.automatic_optimization:
        raise UserError(
            f"{type(pl_module).__name__} optimises manually, so only its training_step can accumulate: remove"
            " GradientAccumulation, or set automatic_optimization = True"
        )
    found = [type(callback).__name__ for callback in callbacks_of(trainer) if isinstance(callback, kinds)]
    if trainer.accumulate_grad_batches != 1:
        found.append(f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})")
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)} would both accumulate: keep one GradientAccumulation")


def check_strategy(trainer: pl.Trainer, accumulates: bool) -> bool:
    """Whether counts weigh: the strategy averages gradients over the ranks as DDP does, or there is one rank.

    Raises:
        UserError: they do not, and the run is to accumulate.
    """
    strategy = trainer.strategy
    averages = isinstance(strategy.model, DistributedDataParallel) or trainer.world_size == 1
    if averages and not strategy.handles_gradient_accumulation:
        return True
    name = type(strategy).__name__
    if accumulates:
        raise UserError(
            f"{name} reduces gradients in its own way, which GradientAccumulation cannot"
            ' weigh: pass strategy="ddp", or remove the callback'
        )
    rank_zero_warn(
        f"GradientAccumulation weighs nothing: {name} reduces gradients in its own way, so every device counts the"
        ' same, however many targets it holds; pass strategy="ddp" for the mean over all targets'
    )
    return False


def check_schedule(trainer: pl.Trainer, largest: int) -> None:
    """Warns of windows that are longer than an epoch.

    Raises:
        UserError: DDP has a static graph.
    """
    if largest > trainer.num_training_batches:
        rank_zero_warn(
            f"accumulating over {largest} micro-batches, but an epoch has {trainer.num_training_batches}: an epoch"
            " makes a single update; pass smaller `steps`, or a smaller `batch_size`"
        )
    model = trainer.strategy.model
    if largest > 1 and isinstance(model, DistributedDataParallel) and model.static_graph:
        raise UserError(
            "torch's DDP cannot accumulate with static_graph=True (pytorch#143580): remove static_graph from the"
            " strategy, or accumulate over one micro-batch"
        )


def samples_per_batch(trainer: pl.Trainer) -> int | None:
    """Samples that all devices process at once, of several loaders together; None where one does not say."""
    try:
        return sum(map(loader_batch_size, CombinedLoader(trainer.train_dataloader).flattened)) * trainer.world_size
    except UserError:
        return None


def warn_of_separate_statistics(trainer: pl.Trainer, pl_module: pl.LightningModule, micro_batches: int) -> None:
    """Warns of BatchNorm over a part of each update, which is another model for each way to split the update."""
    together = processes_together(pl_module, trainer.world_size)
    if together is None or trainer.world_size * micro_batches == together:
        return
    apart = trainer.world_size // together
    at_once = samples_per_batch(trainer)
    part = f"{at_once // apart} of the {at_once * micro_batches}" if at_once else "a part of the"
    split, advice = "on other devices", "add SyncBN (--sync-bn) to normalise over all devices"
    if apart == 1:
        split, advice = "with other micro-batches", "use as few micro-batches as memory allows"
    rank_zero_warn(
        f"BatchNorm normalises over {part} samples of an update, so a run {split} learns something else; {advice}"
    )


def move_place_in_epoch(trainer: pl.Trainer, old_size: int, new_size: int) -> None:
    """Makes the batches processed in this epoch those that hold as many samples on other devices."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    batches = min(batches_for_samples(progress.processed, old_size, new_size), trainer.num_training_batches)
    moved = int(batches) - progress.processed
    for counter in ("ready", "started", "processed", "completed"):
        setattr(progress, counter, getattr(progress, counter) + moved)


def current_factor(trainer: pl.Trainer, schedule: AccumulationSchedule) -> int:
    """Micro-batches per update at the run's place in its epoch, which a checkpoint does not hold."""
    loop = trainer.fit_loop.epoch_loop
    updates = loop.automatic_optimization.optim_progress.optimizer.step.current.completed
    progress: Any = loop.batch_progress.current
    return schedule.walk(trainer.current_epoch, trainer.global_step - updates, progress.processed)[1]


def ends_window(trainer: pl.Trainer) -> bool:
    """Whether the present micro-batch is the last of its update; for `on_before_backward`."""
    done = trainer.fit_loop.batch_idx + 1
    ends_epoch = done == trainer.num_training_batches or trainer.is_last_batch
    return ends_epoch or done % trainer.accumulate_grad_batches == 0
