"""Gradient accumulation whose update is the mean over all targets, however they were cut into micro-batches.

Lightning divides every loss by the full factor and gives micro-batches and ranks the same weight, so a short window is
updated too weakly (#19987) and a sentence in a short batch counts more than one in a long batch (#20350).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.accumulation import (
    AccumulationWindow,
    check_closures,
    check_schedule,
    check_single_accumulation,
    check_strategy,
    current_factor,
    describe_second_call,
    ends_window,
    move_place_in_epoch,
    samples_per_batch,
    scale_gradients,
    warn_of_separate_statistics,
    weigh_loss,
)
from callbacks.lib.global_batch import accumulation_factor, loader_batch_size
from callbacks.lib.idle_hooks import drop_idle_hooks, restore_hooks
from callbacks.lib.lightning_internals import make_no_update, skips_backward
from callbacks.lib.micro_batches import refuse_dataloader_iter
from callbacks.lib.targets import observe_counts, sum_over_ranks
from callbacks.lib.updates import AccumulationSchedule
from datamodules.errors import RunFailedError, UserError

__all__ = ["GradientAccumulation"]


class GradientAccumulation(pl.Callback):
    """Makes each update the mean over all its targets, over micro-batches, devices and nodes.

    Runs on: the loss before each backward pass.

    `training_step` returns its ordinary mean loss and may add ``count``, the number of targets behind that mean (tokens
    that are not padding, say; an int, or a tensor of no dimension, which is never read back from the device). Without
    it the batch size counts. So a smaller last batch, a window cut short by the epoch's end, ranks with unequal or
    empty batches, all give the gradient of the one large batch; what is logged stays the ordinary mean.

    The weights of micro-batches are relative to the window's first, which keeps float16 in range, and before the last
    backward pass their sum is made the mean (`callbacks.AccumulationWindow`). So gradients are right before DDP
    averages them, GradScaler unscales them and clipping reads their norm. That costs one all-reduce of one number per
    update, and none on one device.

    An optimiser that calls its closure several times per update (LBFGS, SAM) is refused on several devices or
    micro-batches: each call would compute only a part of the update. The loss that a closure returns is that of the
    rank's last micro-batch.

    BatchNorm normalises over what a layer is given at once, which no weight changes: where that is a part of an update,
    a warning says so.

    A count of 0 takes a micro-batch out, even if its loss is NaN for want of samples. Where samples hold no
    target, divide by ``count.clamp(min=1)``: a gradient that is NaN stays NaN with any weight.

    Args:
        steps: micro-batches per update, or a mapping from when to how many: ``{0: 8, "2 epochs": 4, "5000 steps": 1}``.
            The last entry whose time has come applies. A change in mid-epoch waits for a micro-batch at
            which both the old and the new windows begin.
        global_batch_size: samples per update on all devices; the number of micro-batches follows. A run resumed in
            mid-epoch on other devices keeps its place, if its loader saves how many samples were used.

    Raises:
        UserError: `global_batch_size` does not divide, both arguments are given, something else accumulates as well,
            or the strategy cannot. With one micro-batch per update such a strategy gets a warning only. LBFGS on
            several devices or micro-batches.
        RunFailedError: another optimiser calls its closure again there; or a loader has fewer batches than it says.

    Example:
        >>> trainer = pl.Trainer(callbacks=[GradientAccumulation(global_batch_size=1024)], logger=False)
    """

    def __init__(self, steps: int | dict[int | str, int] = 1, global_batch_size: int | None = None) -> None:
        super().__init__()
        if global_batch_size is not None and steps != 1:
            raise UserError(f"steps={steps!r} and global_batch_size={global_batch_size} are given: pass one of them")
        self.steps = steps
        self.global_batch_size = global_batch_size
        self._schedule = AccumulationSchedule.parse(steps)
        self._samples_per_batch: int | None = None
        self._weighs = True
        self._release_module: Callable[[], None] | None = None
        self._undo_no_update: Callable[[], None] | None = None
        self._running = False
        self._count: int | Tensor = 0
        self._window = AccumulationWindow()
        self._called = False

    def accumulation_schedule(self, trainer: pl.Trainer) -> AccumulationSchedule:
        """Micro-batches per update; known from `on_train_start` on where it follows from the global batch size."""
        if self.global_batch_size is None:
            return self._schedule
        batch_size = loader_batch_size(trainer.train_dataloader)
        return AccumulationSchedule.parse(accumulation_factor(self.global_batch_size, batch_size, trainer.world_size))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._samples_per_batch = None
        refuse_dataloader_iter(self, pl_module)
        check_single_accumulation(trainer, pl_module, (GradientAccumulation, GradientAccumulationScheduler))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._weighs = check_strategy(trainer, self.steps != 1 or self.global_batch_size is not None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._schedule = self.accumulation_schedule(trainer)
        largest = max(factor for _, factor in self._schedule.entries)
        check_schedule(trainer, largest)
        check_closures(trainer, largest)
        warn_of_separate_statistics(trainer, pl_module, largest)
        self._running = True
        old, self._samples_per_batch = self._samples_per_batch, samples_per_batch(trainer)
        if old and self._samples_per_batch:
            move_place_in_epoch(trainer, old, self._samples_per_batch)
        trainer.accumulate_grad_batches = current_factor(trainer, self._schedule)
        self._window = AccumulationWindow(trainer.accumulate_grad_batches)
        if self._weighs and (trainer.world_size > 1 or largest > 1):
            self._release_module = observe_counts(pl_module, self._set_count)
        of_windows = GradientAccumulation.on_before_backward, GradientAccumulation.on_before_optimizer_step
        drop_idle_hooks(self, of_windows if self._release_module is None else ())

    def _set_count(self, count: int | Tensor) -> None:
        self._count = count

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not skips_backward(trainer):
            trainer.accumulate_grad_batches = self._schedule.wanted(trainer.current_epoch, trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if skips_backward(trainer):
            # Lightning would step at the epoch's end, with the gradients of the last update or with none.
            self._undo_no_update = self._undo_no_update or make_no_update(trainer)
            return
        if self._release_module is None:
            return  # One device and one micro-batch, for the whole run.
        self._called = False
        factor = trainer.accumulate_grad_batches
        if batch_idx % factor == 0:
            factor = self._schedule.switch(factor, trainer.current_epoch, trainer.global_step, batch_idx)
            trainer.accumulate_grad_batches = factor
            self._window = AccumulationWindow(factor)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._release_module is None:
            return  # The mean loss has the right gradient already.
        if self._called:
            raise RunFailedError(describe_second_call(trainer.optimizers[0]))
        self._called = True
        dtype = torch.promote_types(loss.dtype, torch.float32)
        count: Any = self._count
        count = count.detach().to(loss.device, dtype, non_blocking=True) if isinstance(count, Tensor) else float(count)
        if not ends_window(trainer):
            weigh_loss(loss, self._window.weight(count))
            return
        total = partial(sum_over_ranks, device=loss.device, dtype=dtype) if trainer.world_size > 1 else None
        earlier, weight = self._window.last_weight(count, trainer.world_size, total)
        self._scale_gradients(trainer, earlier)
        weigh_loss(loss, weight)

    def _scale_gradients(self, trainer: pl.Trainer, weight: float | Tensor) -> None:
        scale_gradients((p for group in trainer.optimizers[0].param_groups for p in group["params"]), weight)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._window.is_open:
            # The window's last training_step returned None (on one device), so there was no last backward pass.
            self._scale_gradients(trainer, self._window.close())

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._window.is_open and not trainer.should_stop:
            raise RunFailedError(
                f"the training loader announced {trainer.num_training_batches} batches and gave fewer, so that the"
                " gradients of the last ones would be lost: correct the length of its data set"
            )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release(trainer)

    def _release(self, trainer: pl.Trainer) -> None:
        restore_hooks(self)
        if self._release_module is not None:
            self._release_module()
            self._release_module = None
        if self._undo_no_update is not None:
            self._undo_no_update()
            self._undo_no_update = None
        if self._running:
            trainer.accumulate_grad_batches = 1
            self._running = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples_per_batch": self._samples_per_batch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples_per_batch = state_dict["samples_per_batch"]
