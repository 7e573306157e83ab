"""Weights of micro-batches that make their gradients add up to the mean over all targets of an update."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
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
    "MeanLoss",
    "batches_for_samples",
    "check_schedule",
    "check_single_accumulation",
    "check_strategy",
    "current_factor",
    "describe_second_call",
    "ends_window",
    "is_replicated",
    "move_place_in_epoch",
    "samples_per_batch",
    "scale_gradients",
    "uses_loss",
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
        divisor = self._divisor(world_size, sum_over_ranks)
        return self._close(divisor), count * self._divided_by / divisor

    def close(
        self, world_size: int = 1, sum_over_ranks: Callable[[float | Tensor], float | Tensor] | None = None
    ) -> float | Tensor:
        """The weight of the gradients so far, where no micro-batch follows."""
        return self._close(self._divisor(world_size, sum_over_ranks))

    def _divisor(
        self, world_size: int, sum_over_ranks: Callable[[float | Tensor], float | Tensor] | None
    ) -> float | Tensor:
        total = self._total if sum_over_ranks is None else sum_over_ranks(self._total)
        # DDP averages over the ranks, so each divides by the targets of an average rank.
        return at_least_one(total) / world_size

    def _close(self, divisor: float | Tensor) -> float | Tensor:
        earlier = 1.0 if self._unit is None else self._unit / divisor
        self._total, self._unit = 0.0, None
        return earlier


def uses_loss(optimizer: Optimizer) -> bool:
    """Whether a step may depend on the loss that its closure returns: of torch's own optimisers only LBFGS's does."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


class MeanLoss:
    """The mean loss over all targets of an update, which the optimiser gets from its closure.

    Line searches decide by that loss how far to go and when to end. By the loss of its own batch each rank would decide
    for itself, and wait in collective calls that the others do not make.

    Args:
        optimizer: its closures return this mean, until `remove`.

    Example:
        >>> optimizer = LBFGS([torch.zeros(1, requires_grad=True)])
        >>> loss = MeanLoss(optimizer)
        >>> loss.add(torch.tensor(5.0), 1)
        >>> loss.add(torch.tensor(1.0), 3)
        >>> loss.close(loss.total, 4)
        >>> optimizer.step(closure=lambda: torch.tensor(1.0))
        tensor(2.)
        >>> loss.remove()
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.total: float | Tensor = 0.0
        """The sum of the losses over the targets since the last `close`."""
        self._mean: float | Tensor = 0.0
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def add(self, loss: Tensor, count: float | Tensor) -> None:
        """Add a mean loss over so many targets; a mean over none may be NaN."""
        if isinstance(count, Tensor):
            self.total = self.total + torch.where(count > 0, loss.detach() * count, 0.0)
        elif count:
            self.total = self.total + loss.detach() * count

    def close(self, total: float | Tensor, count: float | Tensor) -> None:
        """Set the mean, from the sum of the losses and the number of targets, over all ranks."""
        self._mean, self.total = total / at_least_one(count), 0.0

    def remove(self) -> None:
        """Leave the optimiser as it was."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure")
        if closure is None:
            return None  # A step that calls its parent class's step runs this once for each.

        def with_mean() -> Any:
            loss = closure()
            return loss if loss is None else torch.as_tensor(self._mean, dtype=loss.dtype, device=loss.device)

        return args, kwargs | {"closure": with_mean}


def describe_second_call(optimizer: Optimizer, steps: int) -> str:
    """What is wrong with an optimiser that calls its closure again, where an update has several micro-batches."""
    name = type(optimizer).__name__
    return (
        f"{name} calls its closure several times per update, but of the {steps} micro-batches of an update only the"
        " last can be computed again: pass steps=1 and a `batch_size` that holds the whole update, or another optimiser"
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


def is_replicated(strategy: Strategy) -> bool:
    """Whether each rank holds the whole model, and no forward pass waits for another rank's: one device, or DDP."""
    # DeepSpeed's strategy is derived from Lightning's DDP.
    return isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and not strategy.handles_gradient_accumulation


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
