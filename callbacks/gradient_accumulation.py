"""Gradient accumulation whose update is the mean over all targets, however they were cut into micro-batches.

Lightning divides every loss by the full factor and lets micro-batches and ranks weigh the same, so a short window is
updated too weakly (#19987) and a sentence in a short batch counts more than one in a long batch (#20350).
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.consensus import Answers
from callbacks.lib.global_batch import accumulation_factor, loader_batch_size
from callbacks.lib.targets import observe_counts, sum_over_ranks
from callbacks.lib.trainer_attributes import callbacks_of
from callbacks.lib.updates import AccumulationSchedule
from datamodules.errors import UserError

__all__ = ["GradientAccumulation"]


def at_least_one(count: float | Tensor) -> float | Tensor:
    """A count to divide by, where there may be no target."""
    return count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1.0)


class GradientAccumulation(pl.Callback):
    """Makes each update the mean over all its targets, over micro-batches, devices and nodes.

    Runs on: the loss before each backward pass.

    `training_step` returns its ordinary mean loss and may add ``count``, the number of targets behind that mean (tokens
    that are not padding, say; an int, or a tensor of no dimension, which is never read back from the device). Without
    it the batch size counts. So a smaller last batch, a window cut short by the epoch's end, ranks with unequal or
    empty batches, all give the gradient of the one large batch; what is logged stays the ordinary mean.

    Micro-batches weigh relative to the window's first, which keeps float16 in range, and before the last backward pass
    their sum is made the mean. So gradients are right before DDP averages them, GradScaler unscales them and clipping
    reads their norm. That costs one all-reduce of one number per update, and none on one device.

    A count of 0 takes a micro-batch out, even if its loss is NaN for want of samples. Where samples hold no
    target, divide by ``count.clamp(min=1)``: no weight can mend a gradient that is NaN already.

    Args:
        steps: micro-batches per update, or a mapping from when to how many: ``{0: 8, "2 epochs": 4, "5000 steps": 1}``.
            Of the entries whose time has come the last one counts. A change in mid-epoch waits for a micro-batch at
            which both the old and the new windows begin.
        global_batch_size: samples per update on all devices; the number of micro-batches follows. A run resumed in
            mid-epoch on other devices keeps its place, if its loader remembers how many samples were used.

    Raises:
        UserError: `global_batch_size` does not divide, both arguments are given, something else accumulates as well,
            or the strategy cannot. With one micro-batch per update such a strategy gets a warning only.

    Example:
        >>> trainer = pl.Trainer(callbacks=[GradientAccumulation(global_batch_size=1024)], logger=False)
    """

    def __init__(self, steps: int | dict[int | str, int] = 1, global_batch_size: int | None = None) -> None:
        super().__init__()
        if global_batch_size is not None and steps != 1:
            raise UserError(
                f"both steps={steps!r} and global_batch_size={global_batch_size} are given: pass one of them"
            )
        self.steps = steps
        self.global_batch_size = global_batch_size
        self._schedule = AccumulationSchedule.parse(steps)
        self._count: int | Tensor = 0
        self._restore: Callable[[], None] | None = None
        self._running, self._weighs = False, True
        # What another callback wants to know of any rank: it travels with the counts, in a sum that is made anyway.
        self.question: Callable[[], bool] | None = None
        self._answers, self._sums = Answers(), False
        self._samples_per_batch: int | None = None
        self._begin_window()

    def accumulation_schedule(self, trainer: pl.Trainer) -> AccumulationSchedule:
        """Micro-batches per update; known from `on_train_start` on where it follows from the global batch size."""
        if self.global_batch_size is None:
            return self._schedule
        batch_size = loader_batch_size(trainer.train_dataloader)
        return AccumulationSchedule.parse(accumulation_factor(self.global_batch_size, batch_size, trainer.world_size))

    @property
    def sums_over_ranks(self) -> bool:
        """Whether each update sums over the ranks, so that a `question` travels; known from `on_train_start` on."""
        return self._sums

    def _begin_window(self) -> None:
        self._total: float | Tensor = 0.0
        self._unit: float | Tensor = 1.0
        self._open = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._samples_per_batch = None
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimises manually, so only its training_step can accumulate: remove"
                " GradientAccumulation, or set automatic_optimization = True"
            )
        others = (GradientAccumulation, GradientAccumulationScheduler)
        rivals = [type(callback).__name__ for callback in callbacks_of(trainer) if isinstance(callback, others)]
        if trainer.accumulate_grad_batches != 1:
            rivals.append(f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})")
        if len(rivals) > 1:
            raise UserError(f"{' and '.join(rivals)} would both accumulate: keep one GradientAccumulation")

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        distributed = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._weighs = not trainer.strategy.handles_gradient_accumulation and (distributed or trainer.world_size == 1)
        if self._weighs:
            return
        name = type(trainer.strategy).__name__
        if self.steps != 1 or self.global_batch_size is not None:
            raise UserError(
                f"{name} reduces gradients in its own way, which GradientAccumulation cannot"
                ' weigh: pass strategy="ddp", or remove the callback'
            )
        rank_zero_warn(
            f"GradientAccumulation weighs nothing: {name} reduces gradients in its own way, so every device counts the"
            ' same, however many targets it holds; pass strategy="ddp" for the mean over all targets'
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._schedule = self.accumulation_schedule(trainer)
        largest = max(factor for _, factor in self._schedule.entries)
        if largest > trainer.num_training_batches:
            rank_zero_warn(
                f"accumulating over {largest} micro-batches, but an epoch has {trainer.num_training_batches}: an epoch"
                " makes a single update; pass a smaller factor, or a smaller batch size"
            )
        model = trainer.strategy.model
        if largest > 1 and isinstance(model, DistributedDataParallel) and model.static_graph:
            raise UserError(
                "torch's DDP cannot accumulate with static_graph=True (pytorch#143580): remove static_graph from the"
                " strategy, or accumulate over one micro-batch"
            )
        self._running = True
        self._answers = Answers()
        self._resume(trainer)
        self._begin_window()
        self._sums = self._weighs and trainer.world_size > 1
        if self._weighs and (trainer.world_size > 1 or largest > 1):
            self._restore = observe_counts(pl_module, self._set_count)

    def _resume(self, trainer: pl.Trainer) -> None:
        """Find the place in the epoch, and the factor there, before the first batch; Lightning saves no factor."""
        loop = trainer.fit_loop.epoch_loop
        progress: Any = loop.batch_progress.current
        try:
            samples = loader_batch_size(trainer.train_dataloader) * trainer.world_size
        except ValueError:
            samples = None
        if samples and self._samples_per_batch and progress.processed:
            # On other devices the same samples are another number of batches.
            done = min(progress.processed * self._samples_per_batch // samples, trainer.num_training_batches)
            moved = int(done) - progress.processed
            for counter in ("ready", "started", "processed", "completed"):
                setattr(progress, counter, getattr(progress, counter) + moved)
        self._samples_per_batch = samples
        updates = loop.automatic_optimization.optim_progress.optimizer.step.current.completed
        epoch, began = trainer.current_epoch, trainer.global_step - updates
        trainer.accumulate_grad_batches = self._schedule.walk(epoch, began, progress.processed)[1]

    def _set_count(self, count: int | Tensor) -> None:
        self._count = count

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.accumulate_grad_batches = self._schedule.wanted(trainer.current_epoch, trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._restore is None:
            return  # One device and one micro-batch, for the whole run.
        factor = trainer.accumulate_grad_batches
        if batch_idx % factor == 0:
            epoch, step = trainer.current_epoch, trainer.global_step
            trainer.accumulate_grad_batches = self._schedule.switch(factor, epoch, step, batch_idx)
            self._begin_window()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._restore is None:
            return  # The mean loss has the right gradient already.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        count = self._count.detach().to(loss.device, dtype) if isinstance(self._count, Tensor) else float(self._count)
        factor, batches = trainer.accumulate_grad_batches, trainer.fit_loop.batch_idx + 1
        if not self._open:
            self._unit = at_least_one(count) * factor
        self._total = self._total + count
        divisor = self._unit
        if batches % factor == 0 or batches == trainer.num_training_batches or trainer.is_last_batch:
            if trainer.world_size > 1:
                self._total = self._sum_over_ranks(loss.device, dtype)
            # DDP averages over the ranks, so each divides by the targets of an average rank.
            divisor = at_least_one(self._total) / trainer.world_size
            if self._open:
                self._finish_window(trainer, self._unit / divisor)
        else:
            self._open = True
        # Lightning has divided the loss by the factor. Equal counts in a full window need no other weight.
        weight = count * factor / divisor
        if isinstance(weight, Tensor):
            weight = weight.to(loss.dtype)
        if isinstance(weight, Tensor) or weight != 1:
            loss.register_hook(lambda gradient: gradient * weight)

    def _sum_over_ranks(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if self.question is None:
            return sum_over_ranks(self._total, device, dtype)
        total = torch.as_tensor(self._total, device=device, dtype=dtype)
        both = torch.stack([total, torch.full_like(total, self.question())])
        total, answer = sum_over_ranks(both, device, dtype).unbind()
        self._answers.put(answer)
        return total

    def anyone(self) -> bool:
        """Whether any rank answered the `question` with yes, to be called once an update.

        On a CPU in the update just made, on a GPU in the one before: to hear the last would be to wait for it.
        """
        return self._answers.take()

    def _finish_window(self, trainer: pl.Trainer, weight: float | Tensor) -> None:
        """Make the gradients of the window's earlier micro-batches their part of the mean."""
        if isinstance(weight, Tensor) or weight != 1:
            groups = trainer.optimizers[0].param_groups
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, weight)
        self._open = False

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._open:
            # The window's last training_step returned None (on one device), so there was no last backward pass.
            self._finish_window(trainer, self._unit / at_least_one(self._total))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples_per_batch": self._samples_per_batch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples_per_batch = state_dict["samples_per_batch"]

    def _release(self, trainer: pl.Trainer) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._running:
            trainer.accumulate_grad_batches = 1
            self._running = False
