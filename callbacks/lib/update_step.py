"""One optimizer update: mean gradient over all its targets, BatchNorm statistics, and the optimizer's step.

Tested in `tests/callbacks/test_updates.py`.
"""

import contextlib
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from callbacks.lib.batch_norm import OrderedStatistics, exempt_from_broadcast, is_synchronized, stand_in
from callbacks.lib.first_update import DrawnNumbers, FirstUpdate
from callbacks.lib.gradient_sum import GradientSum, most_of_rank, reject_kept_gradients, without_backward
from callbacks.lib.hook_calls import NoTargets, StockCalls
from callbacks.lib.optimizers import calls_closure_once, is_torchs, skip_step_on_device
from callbacks.lib.targets import Count, TargetCounter, joined_outputs
from datamodules.errors import UserError
from datamodules.lightning import ClosureResult, MisconfigurationException, pl
from datamodules.loading.updates import Update
from datamodules.notes import warn


@contextlib.contextmanager
def uneven_micro_batch(
    module: nn.Module, results: Any, synchronized_layers: Sequence[nn.Module], is_dummy: bool
) -> Iterator[None]:
    """Run a micro-batch of an update of which some ranks have one micro-batch more than others.

    Args:
        results: the `UpdateResults` of the training loop.
        synchronized_layers: the BatchNorm layers that wait for all ranks in each forward pass.
    """
    with contextlib.ExitStack() as stack:
        if is_dummy:
            stack.enter_context(results.stand_in())
            stack.enter_context(stand_in(synchronized_layers))
            stack.enter_context(kept_metrics(module))
        yield


@contextlib.contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the torchmetrics objects of a module after a stand-in.

    A state of one element keeps the shape and type that its first update gives it: ranks exchange states of one shape,
    and a rank that has only computed stand-ins has made no update.
    """
    metrics = [layer for layer in module.modules() if isinstance(layer, Metric)]
    saved_attributes = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        # States are copied, since some metrics update them in place.
        for name, state in metric.metric_state.items():
            setattr(metric, name, state.detach().clone() if isinstance(state, Tensor) else list(state))
    try:
        yield
    finally:
        for metric, attributes in zip(metrics, saved_attributes, strict=True):
            updated = {name: state for name, state in metric.metric_state.items() if isinstance(state, Tensor)}
            vars(metric).clear()
            vars(metric).update(attributes)
            for name, like in updated.items():
                state = getattr(metric, name)
                if (state.shape, state.dtype) != (like.shape, like.dtype) and state.numel() == 1:
                    setattr(metric, name, state.to(like.dtype).reshape(()).expand(like.shape).clone())


@contextlib.contextmanager
def weighted_gradients(module: nn.Module, weight: float) -> Iterator[None]:
    """Multiply the gradients of a module's parameters in each backward pass, before DDP averages them."""

    def scale(gradient: Tensor) -> Tensor:
        return gradient * weight

    handles = []
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            # torch registers hooks only on tensors that require a gradient, and a module that optimizes manually may
            # set `requires_grad` within its `training_step`.
            requires_grad = parameter.requires_grad
            parameter.requires_grad_(True)
            handles.append(parameter.register_hook(scale))
            parameter.requires_grad_(requires_grad)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


NO_CONTEXT = contextlib.nullcontext()
"""Made once, since a step enters several."""


class _MicroBatch(NamedTuple):
    """Micro-batch that this rank computes; `is_first` and `is_last` are its position on this rank."""

    number: int
    position: int
    """Index in the update's batches; 0 for a stand-in, which computes the first one again."""
    is_first: bool
    is_last: bool
    is_dummy: bool
    """Whether it is computed only for the collective calls, and nothing of it counts."""
    samples: int | None
    """Number of samples that the loader dealt; None if it is unknown."""


class UpdateStep:
    """Computation of the updates of one Trainer from their micro-batches.

    Args:
        trainer: the Trainer.
        loop: the `UpdateLoop` of the Trainer.
    """

    calls: StockCalls
    """The caller of the hooks of the running epoch."""

    def __init__(self, trainer: pl.Trainer, loop: Any) -> None:
        self.trainer: Any = trainer
        self._loop = loop
        self.seeds: Any = None
        """The `SeedControl` of the run, or None."""
        self.sums_gradients = False
        """Whether `GradientSum` replaces DDP's reduction."""
        self.has_several = False
        """Whether an update may have several micro-batches."""
        self.count: Callable[[Any], Any] | None = None
        """Function of the batch that returns its number of targets, if the user passed one."""
        self.counts_targets = False
        """Whether the outputs of the steps need their number of targets."""
        self.is_skipped = False
        """Whether the last update had no target, so that no step was made."""
        self._skips_on_device = False
        self.skips_backward = False
        """Whether this epoch makes no updates: `StochasticWeightAveraging` recomputes BatchNorm statistics in it."""
        self._forget()

    def _forget(self) -> None:
        self._model: Any = None
        self._gradients: GradientSum | None = None
        self._statistics: OrderedStatistics | None = None
        self._synchronized: list[Any] = []
        self._repeats = False
        """Whether the optimizer may call its closure again."""
        self._first_update: FirstUpdate | None = None
        self._is_checked = False
        self._drawn: DrawnNumbers | None = None
        self._is_watched = False
        self._has_warned = False
        self._targets: TargetCounter | None = None
        self._on_device: list[Any] = []
        """Micro-batches of the update that are on the device and may be needed again."""
        self._last_batch: Any = None
        self._passes = 0
        """Number of calls of the closure so far in the update."""

    def release(self) -> None:
        """Restore the module, also after an exception in `training_step`."""
        if self._statistics is not None:
            self._statistics.restore()
        if self._gradients is not None:
            self._gradients.release()
        self._forget()

    def begin(self, update: Update[Any]) -> Any:
        """Begin an update, and return its first micro-batch on the device."""
        self._passes = 0
        first_batch = self._to_device(update, 0)
        self._on_device = [first_batch]
        self._last_batch = first_batch
        return first_batch

    def end(self, batch_idx: int) -> Any:
        """End an update before its `on_train_batch_end`, and return this rank's last micro-batch, which that gets."""
        last_batch = self._last_batch
        self._last_batch = None
        self._on_device = []
        if self._drawn is not None:
            self._drawn.finish()
            self._drawn = None
        if self.seeds is not None and self.calls.draws_at_end:
            self.seeds.seed_update(self.trainer, "end", batch_idx)
        return last_batch

    def make(self, update: Update[Any], batch_idx: int) -> Any:
        """Make an update that has begun, and return the outputs for `on_train_batch_end`."""
        if not self.calls.is_automatic:
            return self._make_manually(update, batch_idx)
        outputs: list[dict[str, Any]] = []

        def closure() -> Tensor | None:
            with NO_CONTEXT if torch.is_grad_enabled() else torch.enable_grad():
                return self._compute_gradients(update, batch_idx, outputs)

        if self.skips_backward:
            closure()  # Forward passes alone, which update the BatchNorm statistics.
        else:
            # Compared here, since callbacks that unfreeze layers wrap the module in a new DDP in the hooks before.
            if self._model is not self.calls.strategy.model:
                self._attach()
            if self.seeds is not None and self.calls.draws_in_step:
                self.seeds.seed_update(self.trainer, "optimizer", batch_idx, 0)
            self.is_skipped = not self.calls.optimizer_step(batch_idx, closure)
            if self.is_skipped:
                self._end_skipped()
            if self._skips_on_device:
                skip_step_on_device(self.calls.optimizers[0], None)
                self._skips_on_device = False
        if not outputs:
            raise MisconfigurationException(
                f"{type(self.calls.optimizers[0]).__name__}.step() has not called its closure, which computes the"
                " gradients: call it there, or set automatic_optimization = False"
            )
        if len(update) == 1 and not update.is_dummy:
            return outputs[0] if outputs[0]["loss"] is not None else {}
        return joined_outputs(outputs, update.is_dummy)

    def _compute_gradients(self, update: Update[Any], batch_idx: int, outputs: list[dict[str, Any]]) -> Tensor | None:
        """Compute the mean gradient over all targets of an update into ``.grad``; the closure of the optimizer.

        Args:
            outputs: list for the outputs of the micro-batches.

        Returns:
            The loss for the optimizer: of this rank, or the mean over all ranks if the optimizer searches by it.
        """
        if outputs:  # LBFGS and SAM call the closure several times in a step.
            outputs.clear()
            self._loop.results.begin_update()
        self._passes += 1
        calls = self.calls
        optimizer = calls.optimizers[0]
        # None on one device with one micro-batch, where PyTorch's gradients and statistics need no sum.
        gradients = None if self.skips_backward else self._gradients
        statistics = self._statistics
        has_unequal_ranks = self._has_unequal_ranks(update)
        if gradients is not None:
            gradients.start_update(update.count)
        last_loss = None
        for micro_batch in self._micro_batches(update):
            # All ranks have a last micro-batch, in which DDP reduces the gradients.
            with self._context(update, micro_batch) if has_unequal_ranks or not micro_batch.is_last else NO_CONTEXT:
                batch = self._batch(update, micro_batch, batch_idx)
                if self.seeds is not None:
                    self.seeds.seed_micro_batch(self.trainer, micro_batch.number)
                loss, output = self._forward(gradients, batch, batch_idx, micro_batch)
                if gradients is not None or (self.counts_targets and loss is not None):
                    output["count"] = 0.0 if loss is None else self._count(output, batch, micro_batch.samples, loss)
                if micro_batch.is_first and not self.skips_backward:
                    self._zero_grad(batch_idx, optimizer)
                if gradients is not None:
                    assert statistics is not None
                    if micro_batch.is_first and calls.has_zeroing:
                        reject_kept_gradients(calls.module, gradients.parameters)
                    gradients.scale_loss(loss, output["count"], last=micro_batch.is_last)
                    if micro_batch.is_last:
                        # Before the backward pass, which the transfer then overlaps.
                        statistics.send(self._most_of_rank(update))
                    if loss is not None:
                        calls.backward(loss, optimizer, is_whole=False)
                    gradients.collect()
                    statistics.restore()
                    self._end_first_update(micro_batch)
                elif loss is not None and not self.skips_backward:
                    share = self._share_of_mean(update, micro_batch) if has_unequal_ranks else 1.0
                    # Lightning calls `on_after_backward` within its backward pass.
                    self._seed_after_gradients(batch_idx)
                    calls.backward(loss if share == 1.0 else loss * share, optimizer, is_whole=True)
            if micro_batch.is_first or not micro_batch.is_dummy:
                outputs.append(output)
            if output["loss"] is not None:
                last_loss = output["loss"]
        if gradients is None:
            count = outputs[-1].get("count")
            # A tensor is not read: only its device knows it.
            if self.sums_gradients and not self.skips_backward and type(count) is float and not count:
                raise NoTargets
            return last_loss
        assert statistics is not None
        statistics.finish(self._most_of_rank(update))
        self._seed_after_gradients(batch_idx)
        calls.hook("on_after_backward")
        if gradients.is_empty():
            raise NoTargets
        flag = gradients.skips_on_device()
        if flag is not None:
            self._skips_on_device = True
            skip_step_on_device(optimizer, flag)
        return gradients.mean_loss() if gradients.keeps_loss else last_loss

    def _end_skipped(self) -> None:
        """End an update that has no target on any rank: as after one that float16 skips, nothing has changed."""
        for parameter in self.calls.module.parameters():
            parameter.grad = None  # They may be NaN.
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"note: update {self._loop.batch_idx} of epoch {self.trainer.current_epoch} had no target, since each"
                " `count` was 0: such an update makes no step, and no schedule counts it"
            )

    def _make_manually(self, update: Update[Any], batch_idx: int) -> Any:
        """Run the step of a module that optimizes manually, whose update is one micro-batch."""
        (number,) = update.numbers
        (batch,) = self._on_device
        if self.seeds is not None:
            self.seeds.seed_micro_batch(self.trainer, number)
        micro_batch = self._micro_batches(update)[0]
        with self._manual_context(update, micro_batch) if self._has_unequal_ranks(update) else NO_CONTEXT:
            arguments = OrderedDict(self.calls.step_arguments(batch, batch_idx))
            if self.seeds is None or all(map(is_torchs, self.calls.optimizers)):
                outputs = self._loop.manual_optimization.run(arguments)
            else:
                with self._addressed_steps(number, batch_idx):
                    outputs = self._loop.manual_optimization.run(arguments)
        if outputs.get("loss") is not None:
            outputs = {**outputs, "count": self._count(outputs, batch, micro_batch.samples)}
        return {"loss": None, "micro_batches": []} if update.is_dummy and outputs else outputs

    @contextlib.contextmanager
    def _addressed_steps(self, number: int, batch_idx: int) -> Iterator[None]:
        """Give the noise of foreign optimizers, whose steps `training_step` calls, the address of the update.

        The noise of what comes after a step, and of its closure, keeps the address of the micro-batch.
        """
        trainer = self.trainer
        seeds = self.seeds
        # Each seed is used once: a second step, and a second call of a closure, draw other numbers than the first.
        uses = itertools.count(1)

        def addressed(closure: Callable[[], Any]) -> Any:
            seeds.seed_micro_batch(trainer, number, next(uses))
            loss = closure()
            seeds.seed_update(trainer, "optimizer", batch_idx, next(uses))
            return loss

        def begin(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            seeds.seed_update(trainer, "optimizer", batch_idx, next(uses))
            if options.get("closure") is not None:
                return args, {**options, "closure": partial(addressed, options["closure"])}
            if len(args) > 1 and callable(args[1]):
                return (args[0], partial(addressed, args[1]), *args[2:]), options
            return None

        def end(*_: Any) -> None:
            seeds.seed_micro_batch(trainer, number, next(uses))

        with contextlib.ExitStack() as stack:
            for optimizer in self.calls.optimizers:
                if not is_torchs(optimizer):
                    stack.callback(optimizer.register_step_pre_hook(begin).remove)
                    stack.callback(optimizer.register_step_post_hook(end).remove)
            yield

    def _attach(self) -> None:
        """Replace the reduction of the present DDP with sums in the order of micro-batch numbers."""
        trainer = self.trainer
        self._repeats = not calls_closure_once(trainer.optimizers[0])
        self._model = self.calls.strategy.model
        self._gradients = self._statistics = None
        if trainer.world_size > 1:
            self._synchronized = [layer for layer in trainer.lightning_module.modules() if is_synchronized(layer)]
        if not self.sums_gradients or not (self.has_several or trainer.world_size > 1):
            return  # One device with one micro-batch needs no sum: gradients and statistics are PyTorch's own.
        members = self._loop.loaded.members
        expected_count = members[0].batch_size if len(members) == 1 else None
        assert self._model is not None
        self._gradients = GradientSum(self._model, expected_count or 1)
        self._gradients.keeps_loss = self._repeats
        self._statistics = OrderedStatistics(trainer.lightning_module, trainer.world_size)
        if isinstance(self._model, DistributedDataParallel):
            exempt_from_broadcast(self._model)

    def _micro_batches(self, update: Update[Any]) -> list[_MicroBatch]:
        """Return the micro-batches that this rank computes.

        Synchronized layers wait for all ranks in each micro-batch, so a rank with one fewer computes a stand-in.
        """
        adds_stand_in = bool(self._synchronized) and len(update) < self._most_of_rank(update)
        last = len(update) - 1 + adds_stand_in
        micro_batches = [
            _MicroBatch(number, index, index == 0, index == last, update.is_dummy, update.samples[index])
            for index, number in enumerate(update.numbers)
        ]
        if adds_stand_in:
            micro_batches.append(
                _MicroBatch(
                    update.numbers[0], 0, is_first=False, is_last=True, is_dummy=True, samples=update.samples[0]
                )
            )
        return micro_batches

    def _batch(self, update: Update[Any], micro_batch: _MicroBatch, batch_idx: int) -> Any:
        """Return a micro-batch on the device, where it arrives once, and is shown to `on_train_batch_start` once.

        That hook may change it in place, and a repeated closure or a stand-in must not change it a second time.
        """
        is_new = micro_batch.position >= len(self._on_device)
        batch = self._to_device(update, micro_batch.position) if is_new else self._on_device[micro_batch.position]
        # `log` takes the size of this batch as the weight of a mean.
        results = self._loop.results
        results.batch = batch
        results.batch_size = micro_batch.samples
        if is_new:
            self._last_batch = batch
            if batch is not None:
                self.calls.start_next_batch(batch, batch_idx)
            if self._repeats:
                self._on_device.append(batch)
        return batch

    def _to_device(self, update: Update[Any], index: int) -> Any:
        if self.seeds is not None and self.calls.draws_in_transfer:
            self.seeds.seed_transfer(self.trainer, update.numbers[index])
        return self.calls.to_device(update.batches[index])

    def _count(self, output: Any, batch: Any, samples: int | None, loss: Tensor | None = None) -> Count:
        """Return the number of targets of a micro-batch."""
        if self._targets is None:
            self._targets = TargetCounter(self.count, guesses=self._gradients is None)
        return self._targets.count(output, batch, samples, loss)

    def _forward(
        self, gradients: GradientSum | None, batch: Any, batch_idx: int, micro_batch: _MicroBatch
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss and the output of a micro-batch, after checks of what its `training_step` must not do."""
        if gradients is None and (self._is_checked or not self.sums_gradients):
            return self._training_step(batch, batch_idx)
        module = self.calls.module
        if gradients is None:
            # Checked in the first update only: in each one it would take longer than the rest of the step.
            self._is_checked = batch is not None
            return without_backward(module, list(module.parameters()), self._training_step, batch, batch_idx)
        statistics = self._statistics
        assert statistics is not None
        if not self._is_checked and self._first_update is None and batch is not None:
            self._first_update = FirstUpdate(self.trainer)
        first_update = self._first_update
        statistics.begin()
        with NO_CONTEXT if first_update is None else first_update.watched_collectives():
            result = without_backward(module, gradients.parameters, self._training_step, batch, batch_idx)
        if batch is not None and not micro_batch.is_dummy:
            statistics.collect()
        else:
            statistics.leave_out_frozen()
        if first_update is not None:
            first_update.check_forward(statistics)
        return result

    def _end_first_update(self, micro_batch: _MicroBatch) -> None:
        """Check after the first update what it has changed; momenta and buffers of BatchNorm are restored by then."""
        if self._first_update is not None and micro_batch.is_last:
            self._first_update.check_changes()
            self._first_update = None
            self._is_checked = True

    def _training_step(self, batch: Any, batch_idx: int) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss of a micro-batch, and the output of `training_step` with the loss detached."""
        # A collate function may return None for a micro-batch.
        output = None if batch is None else self.calls.training_step(batch, batch_idx)
        if output is None and self.calls.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported. It is"
                " recommended that you rewrite your training logic to avoid having to skip the step in the first place."
            )
        if output is None and batch is not None:
            warnings.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning...", stacklevel=2
            )
        loss: Any = None
        if type(output) is Tensor:
            loss = output
        elif type(output) is dict:
            loss = output.get("loss")
        if type(loss) is not Tensor:
            # Only here, for its error messages: it also divides the loss by 1, in the forward and the backward pass.
            result = ClosureResult.from_training_step_output(output)
            return result.closure_loss, result.asdict()
        # Cloned, since a GradScaler may scale the loss in place.
        values = dict(output) if type(output) is dict else {}
        values["loss"] = loss.detach().clone()
        return loss, values

    def _zero_grad(self, batch_idx: int, optimizer: Optimizer) -> None:
        progress = self._loop.automatic_optimization.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        self.calls.hook("on_before_zero_grad", optimizer)
        progress.increment_started()
        self.calls.zero_gradients(batch_idx, optimizer)
        progress.increment_completed()

    def _most_of_rank(self, update: Update[Any]) -> int:
        """Return the largest number of micro-batches of a rank in this update."""
        return len(update) if update.count is None else most_of_rank(update.count, self.calls.world_size)

    # Seeds and contexts of a micro-batch

    def watch_generators(self) -> None:
        """Begin to watch in the first update of a fit whether random numbers are drawn that another run has to repeat.

        That is a run that resumes or trains on several devices, and has no `SeedControl`.
        """
        if not self._is_watched:
            self._is_watched = True
            if self.trainer.world_size > 1 or self.trainer.ckpt_path is not None:
                self._drawn = DrawnNumbers(self.trainer)

    def _seed_after_gradients(self, batch_idx: int) -> None:
        """Seed the generators for the hooks that change gradients, and for the rest of the optimizer's step."""
        if self.seeds is not None and self.calls.draws_after_gradients:
            self.seeds.seed_update(self.trainer, "gradients", batch_idx, self._passes)

    def _has_unequal_ranks(self, update: Update[Any]) -> bool:
        """Whether some ranks have one micro-batch more than others."""
        return update.count is not None and update.count % self.calls.world_size != 0

    def _context(self, update: Update[Any], micro_batch: _MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch: DDP reduces gradients only in the last one of each rank."""
        stack = contextlib.ExitStack()
        if not micro_batch.is_last and isinstance(self._model, DistributedDataParallel):
            stack.enter_context(self._model.no_sync())
        if self._has_unequal_ranks(update):
            stack.enter_context(self._unequal_ranks(update, micro_batch))
        return stack

    def _manual_context(self, update: Update[Any], micro_batch: _MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a `training_step` with its own backward passes, in an uneven update."""
        stack = contextlib.ExitStack()
        stack.enter_context(self._unequal_ranks(update, micro_batch))
        stack.enter_context(weighted_gradients(self.calls.module, self._share_of_mean(update, micro_batch)))
        return stack

    def _share_of_mean(self, update: Update[Any], micro_batch: _MicroBatch) -> float:
        """Return the factor by which DDP's mean over all ranks becomes the mean over the ranks without a stand-in."""
        assert update.count is not None
        return 0.0 if micro_batch.is_dummy else self.calls.world_size / update.count

    def _unequal_ranks(self, update: Update[Any], micro_batch: _MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch in an uneven update."""
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._synchronized):
            raise UserError(
                f"torch's SyncBatchNorm waits for all devices in each micro-batch, and this update has {update.count}"
                f" for {self.trainer.world_size} devices: pass callbacks=[SyncBN()] in place of sync_batchnorm=True"
            )
        return uneven_micro_batch(self.calls.module, self._loop.results, self._synchronized, micro_batch.is_dummy)
