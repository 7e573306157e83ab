"""Gradient accumulation whose update is the mean over all targets, to the bit on any number of devices.

Lightning divides every loss by the full factor and gives micro-batches and ranks the same weight, so a short window is
updated too weakly (#19987) and a sentence in a short batch counts more than one in a long batch (#20350).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from callbacks.freezing import wrap_again
from callbacks.lib.batch_norm import OrderedStatistics, exempt_from_broadcast, is_synchronised, other_buffers
from callbacks.lib.gradient_sum import GradientSum
from callbacks.lib.hooks import callbacks_of, refuse_dataloader_iter
from callbacks.lib.lightning_internals import make_no_update, skips_backward, when_training_loader_is_made
from callbacks.lib.targets import count_targets, is_empty, observe_steps, warn_of_ignored_targets
from callbacks.lib.updates import loader_batch_size, resumable_loaders
from datamodules.errors import RunFailedError, UserError
from datamodules.loading.resumable import ResumableLoader
from datamodules.notes import warn


def describe_second_call(optimizer: Optimizer) -> str:
    """What is wrong with an optimiser that calls its closure again on several devices or micro-batches."""
    return (
        f"{type(optimizer).__name__} calls its closure several times per update, which is exact on one device with one"
        " micro-batch per update only: pass devices=1, no accumulation and a `batch_size` that holds the whole"
        " update, or another optimiser"
    )


def move_place_in_epoch(trainer: pl.Trainer, loader: ResumableLoader[Any]) -> None:
    """Makes the steps done in this epoch those that lie before the place from which a loader goes on.

    On other devices the same updates take other numbers of steps; and an update that was begun is made again.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    progress = batches.current
    steps = trainer.num_training_batches if batches.is_last_batch else loader.steps_done
    moved = int(steps) - progress.processed
    for counter in ("ready", "started", "processed", "completed"):
        setattr(progress, counter, getattr(progress, counter) + moved)


def steps_for_samples(samples: int, at_once: int, found: str) -> int:
    """The steps of each device in an update of so many samples.

    Args:
        at_once: samples that all devices process in a step.
        found: what asks for the samples, for the error.

    Raises:
        UserError: they do not divide.

    Example:
        >>> steps_for_samples(1024, at_once=256, found="global_batch_size=1024")
        4
    """
    steps, rest = divmod(samples, at_once)
    if steps and not rest:
        return steps
    sizes = " or ".join(f"{size}" for size in (steps * at_once, (steps + 1) * at_once) if size)
    raise UserError(
        f"{found}: {samples} samples of an update are no multiple of the {at_once} that all devices process at once;"
        f" expected {sizes}, or another `batch_size` of the loader"
    )


class _UpdateSums:
    """The gradients and running statistics of each update of a fit, from its training steps and backward passes."""

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        loader = trainer.train_dataloader
        self._loader: ResumableLoader[Any] | None = loader if isinstance(loader, ResumableLoader) else None
        self.statistics = OrderedStatistics(pl_module, trainer.world_size)
        self.gradients = self._attached()
        self.called, self._first = False, True
        self._before: dict[str, Tensor] = {}
        if trainer.world_size > 1 and self._loader is None:
            warn(
                f"note: a {type(loader).__name__} does not deal micro-batches by their numbers: on another number of"
                " devices the run is equal within rounding only; use a loader of datamodules for equal bits"
            )
        elif trainer.world_size > 1 and any(map(is_synchronised, pl_module.modules())):
            warn("note: SyncBN normalises over what the devices see in one step: the bits depend on their number")

    def _attached(self) -> GradientSum:
        """A sum in the place of DDP's reduction; DDP is another one where layers were unfrozen."""
        model = self._trainer.strategy.model
        assert model is not None
        try:
            nominal = loader_batch_size(self._trainer.train_dataloader)
        except UserError:
            nominal = 1
        gradients = GradientSum(model, nominal)
        if isinstance(model, DistributedDataParallel):
            exempt_from_broadcast(model)
        return gradients

    def _micro_batches(self, batch_idx: int) -> int | None:
        """Those of the update that begins, on all ranks; None where they have no numbers."""
        if self._loader is None:
            return None
        count = self._loader.step(batch_idx).in_update
        # A limit may cut the epoch within an update.
        left = self._trainer.num_training_batches - batch_idx
        return count if -(-count // self._trainer.world_size) <= left else None

    def begin_step(self) -> None:
        """Before the forward pass of a micro-batch."""
        trainer = self._trainer
        if skips_backward(trainer):
            return
        if self.called:
            raise RunFailedError(describe_second_call(trainer.optimizers[0]))
        self.called = True
        batch_idx = trainer.fit_loop.batch_idx
        if batch_idx % trainer.accumulate_grad_batches == 0:
            # Here every hook has been called in which layers are frozen, or unfrozen under another DDP.
            if trainer.strategy.model is not self.gradients.model:
                self.gradients = self._attached()
            self.gradients.begin(self._micro_batches(batch_idx))
        self.statistics.begin()
        if self._first and trainer.world_size > 1:
            others = other_buffers(trainer.lightning_module)
            self._before = {name: buffer.clone() for name, buffer in others.items()}

    def weigh(self, output: Any, batch: Any) -> None:
        """After the forward pass of a micro-batch."""
        trainer, gradients = self._trainer, self.gradients
        if skips_backward(trainer):
            return
        if self._first:
            self._first = False
            warn_of_ignored_targets(output, batch)
            if names := [type(layer).__name__ for layer in self.statistics.repeated()]:
                warn(
                    f"note: {len(names)} {names[0]} layers are called more than once in a training_step: their"
                    " running statistics follow the last call"
                )
            now = other_buffers(trainer.lightning_module)
            changed = [name for name, value in self._before.items() if not torch.equal(now.get(name, value), value)]
            if changed:
                warn(f"note: {changed[0]} changes in each forward pass: the bits depend on the number of devices")
        if gradients.leaf is not None and (self._loader is not None or not is_empty(batch)):
            self.statistics.collect()
        loss = output if isinstance(output, Tensor) else None if output is None else output["loss"]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None or loss is None else scaler.scale(torch.ones((), device=loss.device))
        done = trainer.fit_loop.batch_idx + 1
        ends_epoch = done == trainer.num_training_batches or trainer.is_last_batch
        last = ends_epoch or done % trainer.accumulate_grad_batches == 0
        gradients.weigh(loss, 0 if loss is None else count_targets(output, batch), scale, last)
        if gradients.is_last:
            self.statistics.send(gradients.steps)
        if loss is None:
            self.collect()  # There is no backward pass.

    def collect(self) -> None:
        """After the backward pass of a micro-batch."""
        self.gradients.collect()
        self.statistics.restore()
        if self.gradients.is_last:
            self.statistics.finish(self.gradients.steps)


class GradientAccumulation(pl.Callback):
    """Makes each update the mean over all its targets, equal to the bit on any number of devices and nodes.

    Runs on: each `training_step` and its loss, the gradients after each backward pass, and DDP's reduction.

    `training_step` returns its ordinary mean loss and may add ``count``, the number of targets behind that mean (tokens
    that are not padding, say; an int, or a tensor of no dimension, which is never read back from the device). Without
    it the batch size counts. What is logged stays the ordinary mean. A count of 0 takes a micro-batch out, even if its
    loss is NaN.

    Gradients are added in an order that follows from the micro-batches' numbers (`callbacks.GradientSum`), and running
    statistics of BatchNorm are updated in the order of the numbers. So weights and buffers have the same bits on any
    number of ranks, where loaders of `datamodules` deal the micro-batches; with other loaders they are equal within
    rounding, and a line says so. On one device with one micro-batch per update all this is left to PyTorch.

    Memory: the gradients of log2(micro-batches of a rank) + 1 micro-batches while they add up.

    Args:
        steps: micro-batches per update on each device.
        global_batch_size: samples per update on all devices; the number of micro-batches follows, and the last of them
            may be short. A loader that is none of `datamodules` needs a multiple of what the devices hold at once.

    The size of an update is saved: a run resumed on other devices keeps it, and its place within the epoch.

    Raises:
        UserError: an update has fewer micro-batches than there are devices, `global_batch_size` does not divide, both
            arguments are given, something else accumulates as well, or the strategy cannot. LBFGS on several
            devices or micro-batches.
        RunFailedError: another optimiser calls its closure again there; or a loader has fewer batches than it says.

    Example:
        >>> trainer = pl.Trainer(callbacks=[GradientAccumulation(global_batch_size=1024)], logger=False)
    """

    def __init__(self, steps: int = 1, global_batch_size: int | None = None) -> None:
        super().__init__()
        if type(steps) is not int or steps < 1:
            raise UserError(f"accumulation of {steps!r} micro-batches: expected a whole number above 0")
        if global_batch_size is not None and steps != 1:
            raise UserError(
                f"accumulation of {steps} micro-batches and global_batch_size={global_batch_size}: pass one of them"
            )
        self.steps = steps
        self.global_batch_size = global_batch_size
        self._items: int | None = None
        """Items of an update on all devices, where a loader of `datamodules` deals them: samples, or batches."""
        self._samples: int | None = None
        """Samples of an update on all devices, for other loaders that say how many are in a batch."""
        self._sums: _UpdateSums | None = None
        self._undo: list[Callable[[], None]] = []
        self._undo_no_update: Callable[[], None] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._items = self._samples = None
        refuse_dataloader_iter(self, pl_module)
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimises manually, so only its training_step can accumulate: remove"
                " GradientAccumulation, or set automatic_optimization = True"
            )
        kinds = GradientAccumulation, GradientAccumulationScheduler
        found = [type(callback).__name__ for callback in callbacks_of(trainer) if isinstance(callback, kinds)]
        if trainer.accumulate_grad_batches != 1:
            found.append(f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})")
        if len(found) > 1:
            raise UserError(f"{' and '.join(found)} would both accumulate: keep one GradientAccumulation")
        self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", 1))
        self._undo.append(when_training_loader_is_made(trainer, lambda loaders: self._divide(trainer, loaders)))

    def _divide(self, trainer: pl.Trainer, loaders: Any) -> None:
        """Tell the Trainer, and the loaders of `datamodules`, what an update is."""
        dealing = resumable_loaders(loaders)
        if len(dealing) > 1 and self.global_batch_size is not None:
            loader_batch_size(loaders)  # Which raises.
        for loader in dealing:
            if self._items is None:
                size = self.global_batch_size
                steps = self.steps * loader.world_size
                self._items = loader.items_of(steps) if size is None else loader.items_of_samples(size)
            loader.divide_updates(self._items)
        if dealing and self._items is not None:
            trainer.accumulate_grad_batches = dealing[0].steps_in(self._items)
        else:
            trainer.accumulate_grad_batches = self._steps_with(trainer, loaders)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        averages = isinstance(trainer.strategy.model, DistributedDataParallel) or trainer.world_size == 1
        if not averages or trainer.strategy.handles_gradient_accumulation:
            raise UserError(
                f"{type(trainer.strategy).__name__} reduces gradients in its own way, which GradientAccumulation cannot"
                ' weigh: pass strategy="ddp", or remove the callback'
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wrap_again(trainer, pl_module)  # Where `configure_optimizers` has frozen layers.
        dealing, steps = resumable_loaders(trainer.train_dataloader), trainer.accumulate_grad_batches
        if (steps > 1 or trainer.world_size > 1) and isinstance(trainer.optimizers[0], LBFGS):
            raise UserError(describe_second_call(trainer.optimizers[0]))
        for config in trainer.lr_scheduler_configs:
            if steps > 1 and config.frequency > 1 and config.interval == "step":
                raise UserError(
                    f"frequency={config.frequency} of {type(config.scheduler).__name__} counts micro-batches, of which"
                    f' an update has {steps} here: pass frequency=1, or interval="epoch"'
                )
        self._undo += [partial(each.divide_updates, each.items_of(each.world_size)) for each in dealing]
        if dealing and trainer.fit_loop.restarting:
            move_place_in_epoch(trainer, dealing[0])
        if trainer.world_size > 1 or steps > 1:
            self._sums = _UpdateSums(trainer, pl_module)
            self._undo.append(observe_steps(pl_module, self._sums.weigh, self._sums.begin_step))

    def _steps_with(self, trainer: pl.Trainer, loaders: Any) -> int:
        """Steps of each device in an update, with loaders that deal nothing."""
        if self.global_batch_size is not None:
            at_once = loader_batch_size(loaders) * trainer.world_size
            found = f"global_batch_size={self.global_batch_size}"
            return steps_for_samples(self.global_batch_size, at_once, found)
        try:
            in_a_step = sum(map(loader_batch_size, CombinedLoader(loaders).flattened)) * trainer.world_size
        except UserError:  # One does not say.
            return self.steps
        if self._samples is None:
            self._samples = self.steps * in_a_step
        found = "the run began with other devices or batches than those of now"
        return steps_for_samples(self._samples, in_a_step, found)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if skips_backward(trainer):
            # Lightning would step at the epoch's end, with the gradients of the last update or with none.
            self._undo_no_update = self._undo_no_update or make_no_update(trainer)
        elif self._sums is not None:
            self._sums.called = False

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sums is not None and not skips_backward(trainer):
            self._sums.collect()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sums is not None and self._sums.gradients.is_open and not trainer.should_stop:
            raise RunFailedError(
                f"the training loader announced {trainer.num_training_batches} batches and gave fewer, so that the"
                " gradients of the last ones would be lost: correct the length of its data set"
            )

    def _release(self, *args: Any, **kwargs: Any) -> None:
        if self._sums is not None:
            self._sums.statistics.restore()  # Where a training_step has raised.
            self._sums.gradients.release()
        while self._undo:
            self._undo.pop()()
        if self._undo_no_update is not None:
            self._undo_no_update()
        self._sums = self._undo_no_update = None

    on_exception = teardown = _release

    @override
    def state_dict(self) -> dict[str, Any]:
        asked = {"steps": self.steps, "global_batch_size": self.global_batch_size}
        return {"asked": asked, "items": self._items, "samples": self._samples}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, asked = state_dict["asked"], {"steps": self.steps, "global_batch_size": self.global_batch_size}
        if saved == asked:
            self._items, self._samples = state_dict["items"], state_dict["samples"]
            return
        before, now = (", ".join(f"{name}={value}" for name, value in each.items()) for each in (saved, asked))
        warn(
            f"warning: GradientAccumulation found {before} in the checkpoint and has {now}: unless both make the same"
            " updates, this is another experiment from here on"
        )
