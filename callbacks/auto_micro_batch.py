"""Training that runs out of memory goes on with the same batch in smaller pieces.

A batch that is too large for the device otherwise ends the run, possibly after hours, as where sentences are longer.
The gradient of a batch is the sum of those of its pieces, so the update is the same.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric
from typing_extensions import override

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.accumulation import AccumulationWindow, is_replicated, scale_gradients, uses_loss, weigh_loss
from callbacks.lib.batch_norm import is_synchronised
from callbacks.lib.batch_pieces import cut_batch, join_outputs, number_of_samples, piece_slices
from callbacks.lib.consensus import FlagAllReduce, collectives_made
from callbacks.lib.generators import keep_generators
from callbacks.lib.gradient_mean import GradientMean, broadcast_tensors
from callbacks.lib.guarded_step import GuardedStep
from callbacks.lib.idle_hooks import drop_idle_hooks, restore_hooks
from callbacks.lib.lightning_internals import (
    TrainingBatch,
    collective_timeout,
    keep_logged,
    replace_closures,
    set_logged_batch,
)
from callbacks.lib.memory import release_memory
from callbacks.lib.sample_noise import narrow_noise
from callbacks.lib.targets import count_targets
from callbacks.lib.trainer_attributes import callbacks_of
from callbacks.lib.undo import Buffers, Undo, keep_metrics
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import RunFailedError, first_line, is_out_of_memory
from datamodules.ranges import COUNT, check_ranges

__all__ = ["AutoMicroBatch"]

log = logging.getLogger("lightning_recipes")

_EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")
_SMALLER = 'pass a smaller network, precision="bf16-mixed", activation checkpointing, or a device with more memory'
_COMMUNICATES = (
    "communicates with the other ranks, as log(sync_dist=True, on_step=True) does, which would wait for one that"
    " repeats its batch"
)


class AutoMicroBatch(pl.Callback):
    """Repeats a batch that runs out of memory in pieces of half as many samples, then of a quarter, and so on.

    The update is that of the batch, up to the rounding of sums: the same samples, each piece weighted by its number of
    targets (``count``, see `GradientAccumulation`), the same noise of layers of `stateless_dropout`. What the attempt
    did is taken back: gradients, statistics of BatchNorm, metrics, what was logged, random numbers. Cached memory is
    freed. The size is kept for the batches that follow, is said in one line, and stands in checkpoints. After
    `larger_after` updates twice the size is tried, and after each failure only after twice as many.

    In training, in the forward and the backward pass. In the optimiser's first step after any change of size, from
    a copy of its parameters, gradients and state on the host: with all of them released and put back, and then for one
    parameter after the other (``foreach=False``, which stays). Other optimisers than torch's, and LBFGS, have no such
    copy. In validation, test and prediction, where outputs of pieces are joined.

    On several ranks each repeats its own batch, while the others wait. No rank communicates before its gradients are
    there, so that none waits in the middle of a backward pass: DDP's reduction is replaced by one after the backward
    pass, which does not overlap with it and leaves out DDP's communication hooks. Once per update the ranks agree on
    the smallest size.

    What is not the same: BatchNorm normalises over a piece, and a warning says so. Layers of torch's dropout draw other
    numbers. Means that a step logs are weighted by samples: pass ``log(batch_size=...)`` for those over tokens.

    A `training_step` that itself communicates cannot be repeated while others wait for it. With synchronised BatchNorm
    on several ranks the callback does nothing, which a warning says; and so from the second update on where the first
    step is found to have made a collective call. Nor does it do anything with manual optimisation, or a strategy other
    than DDP.

    A batch is cut along the first dimension of its tensors; see `cut_batch` in `callbacks.lib.batch_pieces`.

    Runs on: `on_train_start`, where it replaces the closures of the loop, and `setup` for evaluation. Memory: while
    gradients accumulate over several batches, one more copy of them; one more of the buffers. Time where nothing runs
    out: 0.12 ms a step on a CPU, half of it for the states of the generators (7 % of a step of 1.6 ms), and on several
    ranks the all-reduce of five numbers, which runs beside that of `GradientAccumulation`.

    Args:
        larger_after: updates after which a larger size is tried again.

    Raises:
        RunFailedError: on all ranks, where a single sample does not fit; or where the optimiser's step does not.

    Example:
        >>> trainer = pl.Trainer(callbacks=[AutoMicroBatch()], logger=False, accelerator="cpu")
    """

    def __init__(self, larger_after: int = 1000) -> None:
        super().__init__()
        check_ranges(larger_after=(larger_after, COUNT))
        self.larger_after = larger_after
        self.size: int | None = None
        """Samples that a rank computes at once in training; None for whole batches."""
        self.evaluation_size: int | None = None
        """The same of this rank outside training."""
        self._since, self._wait, self._grown, self._largest = 0, larger_after, False, 0
        self._undo: list[Undo] = []
        self._forget()

    def _forget(self) -> None:
        self._active = False
        self._accumulation: GradientAccumulation | None = None
        self._warmups: list[WarmupLR] = []
        self._metrics: list[Metric] = []
        self._buffers: Buffers | None = None
        self._parameters: list[nn.Parameter] = []
        self._ranks: FlagAllReduce | None = None
        self._mean: GradientMean | None = None
        self._communicates = False
        self._guard: GuardedStep | None = None
        self._failure = ""
        self._agreed = self.size

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()
        self._metrics = [layer for layer in pl_module.modules() if isinstance(layer, Metric)]
        strategy: Any = trainer.strategy
        if not is_replicated(strategy):
            return  # Its ranks may wait for each other in any forward pass.
        for name in _EVALUATION_STEPS:
            setattr(strategy, name, self._evaluation_step(trainer, getattr(strategy, name)))
            self._undo.append(partial(vars(strategy).pop, name, None))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if reason := self._unsupported(trainer, pl_module):
            rank_zero_warn(f"AutoMicroBatch does nothing in training: {reason}")
            return
        callbacks = callbacks_of(trainer)
        self._accumulation = next((c for c in callbacks if isinstance(c, GradientAccumulation)), None)
        self._warmups = [callback for callback in callbacks if isinstance(callback, WarmupLR)]
        self._metrics = [layer for layer in pl_module.modules() if isinstance(layer, Metric)]
        self._buffers = Buffers(pl_module)
        self._parameters = list(pl_module.parameters())
        self._agreed = self.size
        if trainer.world_size > 1:
            self._ranks = FlagAllReduce(trainer.world_size, collective_timeout(trainer.strategy))
            self._mean = GradientMean(self._parameters, trainer.world_size)
        if self._accumulation is not None:
            self._accumulation.closed_by_other = True
        self._undo.append(replace_closures(trainer, lambda parts: self._compute(trainer, pl_module, parts)))
        if not uses_loss(trainer.optimizers[0]):
            self._guard = GuardedStep(trainer.optimizers[0], lambda: self._step_failed(trainer))
            self._undo.append(self._guard.remove)
        self._active = True
        drop_idle_hooks(self)

    def _unsupported(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str | None:
        if not pl_module.automatic_optimization:
            return f"{type(pl_module).__name__} optimises manually"
        if trainer.strategy.handles_gradient_accumulation:
            return f"{type(trainer.strategy).__name__} accumulates gradients in its own way"
        if trainer.world_size == 1:
            return None
        if not isinstance(trainer.strategy.model, DistributedDataParallel):
            return f'{type(trainer.strategy).__name__} reduces gradients in its own way; pass strategy="ddp"'
        if any(is_synchronised(layer) for layer in pl_module.modules()):
            return "BatchNorm is synchronised, in which the other ranks would wait for one that repeats its batch"
        return None

    @property
    def _weighing(self) -> GradientAccumulation | None:
        """What gives losses their weights; known once training has started."""
        return self._accumulation if self._accumulation is not None and self._accumulation.weighs else None

    def _compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule, parts: TrainingBatch) -> Any:
        """Loss and gradients of a batch, in as many attempts as it takes; before a step averaged over the ranks."""
        if parts.zero_grad is not None:
            self._begin_update(trainer)
        if not self._active:
            return parts.plain()
        strategy, model = trainer.strategy, trainer.strategy.model
        parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        earlier = [] if parts.zero_grad else [parameter.grad for parameter in parameters]
        undo = self._note(trainer)
        if self._weighing is not None:
            undo = _both(undo, self._weighing.begin_batch(trainer))
        samples = number_of_samples(parts.batch)
        self._largest = max(self._largest, samples or 0)
        to_call = [parts.zero_grad]

        def zero_grad() -> None:
            """Is called once, by whichever attempt comes so far."""
            if to_call and (function := to_call.pop()) is not None:
                function()

        def attempt() -> Any:
            if earlier:
                _drop_gradients(parameters)
            return self._attempt(trainer, parts, zero_grad, samples, parameters)

        def cut(reason: str) -> bool:
            _drop_gradients(parameters)
            return self._cut(pl_module, samples, reason)

        result = None
        strategy.model = pl_module  # DDP would begin to reduce in the backward pass.
        try:
            # Other ranks learn of a failure at the update's end: until then they wait for this one in other places.
            if not self._failure:
                result = self._repeated(strategy.root_device, attempt, undo, cut)
        finally:
            strategy.model = model
        for parameter, gradient in zip(parameters, earlier, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if parts.makes_update:
            self._end_update(trainer)
        return parts.nothing() if result is None else result

    def _repeated(
        self, device: torch.device, attempt: Callable[[], Any], undo: Undo, cut: Callable[[str], bool]
    ) -> Any:
        """What an attempt returns, after as many as it takes; None where nothing is left to cut."""
        while True:
            collectives = collectives_made()
            try:
                return attempt()
            except Exception as error:
                if not is_out_of_memory(error) or collectives_made() != collectives:
                    raise
                reason = first_line(error)
            undo()
            if not cut(reason):
                return None
            release_memory(device)

    def _begin_update(self, trainer: pl.Trainer) -> None:
        """Try a larger size where it is time to; leave training to Lightning where its steps cannot be repeated."""
        if self._communicates and self._active:
            self._active, self._mean = False, None
            if self._guard is not None:
                self._guard.remove()
            if self._accumulation is not None:
                self._accumulation.closed_by_other = False
            rank_zero_warn(f"AutoMicroBatch does nothing in training: training_step {_COMMUNICATES}")
        if self.size is not None and trainer.global_step - self._since >= self._wait:
            self.size = self._agreed = self.size * 2 if self.size * 2 < self._largest else None
            self._since, self._grown = trainer.global_step, True
            self._guard_next_step()

    def _attempt(
        self,
        trainer: pl.Trainer,
        parts: TrainingBatch,
        zero_grad: Callable[[], None],
        samples: int | None,
        parameters: list[nn.Parameter],
    ) -> Any:
        """One pass over the pieces of a batch."""
        if samples is None or self.size is None or samples <= self.size:
            result = self._step(parts, parts.batch)
            # As late as Lightning does: gradients freed before the forward pass give their memory back to the system,
            # and the backward pass asks for it again.
            zero_grad()
            if result.closure_loss is not None:
                parts.backward(result.closure_loss)
            return result
        zero_grad()
        window = AccumulationWindow()
        sizes, counts, losses, extras = [], [], [], []
        for piece in piece_slices(samples, self.size):
            narrow_noise(piece)
            batch = cut_batch(parts.batch, samples, piece)
            set_logged_batch(trainer, batch)
            result = self._step(parts, batch)
            if self._communicates:
                raise RunFailedError(f"a batch cannot be cut where training_step {_COMMUNICATES}")
            if result.closure_loss is None:
                continue
            count = count_targets(result.extra, batch)
            sizes.append(piece.stop - piece.start)
            counts.append(count)
            losses.append(result.loss)
            extras.append(result.extra)
            if self._weighing is None:
                weight = float(count) if not isinstance(count, Tensor) else count.detach().to(result.loss)
                weigh_loss(result.closure_loss, window.weight(weight))
            parts.backward(result.closure_loss)
            result.closure_loss = None
        if window.is_open:
            scale_gradients(parameters, window.close())
        set_logged_batch(trainer, parts.batch)
        if losses:
            result.loss, result.extra = join_outputs(losses, sizes, counts), join_outputs(extras, sizes, counts)
        return result

    def _note(self, trainer: pl.Trainer) -> Undo:
        """Notes what a step may change besides gradients."""
        return _both(
            keep_generators(trainer.strategy.root_device),
            keep_logged(trainer),
            keep_metrics(self._metrics),
            *([self._buffers.keep()] if self._buffers is not None and trainer.training else []),
        )

    def _step(self, parts: TrainingBatch, batch: Any) -> Any:
        """A training step, of which it is noted whether it communicates."""
        if self._ranks is None:
            return parts.step(batch)
        before = collectives_made()
        try:
            return parts.step(batch)
        finally:
            self._communicates |= collectives_made() != before

    def _cut(self, pl_module: pl.LightningModule, samples: int | None, reason: str) -> bool:
        """Compute half as many samples at once; False where it was one, which ends the run with the update."""
        half = _half_of(samples, self.size)
        if half is None:
            self._failure = _too_large(samples, reason)
            return False
        self.size = half
        if any(isinstance(layer, _BatchNorm) and layer.training for layer in pl_module.modules()):
            rank_zero_warn(
                "BatchNorm normalises over the pieces of a batch that runs out of memory, so that their update differs"
                " from the batch's; pass a smaller `batch_size` and accumulate for the same on every device"
            )
        return True

    def _end_update(self, trainer: pl.Trainer) -> None:
        """Agree on the size, and make the gradients those of the global batch.

        Raises:
            RunFailedError: a single sample did not fit on some rank.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        lacks = self._mean is not None and any(parameter.grad is None for parameter in trained)
        size = math.inf if self.size is None else self.size
        agree: Callable[[], list[float]] | None = None
        if self._ranks is not None:
            agree = self._ranks.start_maximum(bool(self._failure), self._communicates, lacks, -size, self._largest)
        if self._weighing is not None:
            self._weighing.close_window(trainer)  # Its sum over the ranks runs beside that agreement.
        if agree is not None:
            failed, communicates, lacks_any, smallest, largest = agree()
            if failed:
                self._failure = self._failure or f"out of memory with a single sample on another rank: {_SMALLER}"
            self.size = None if math.isinf(smallest) else int(-smallest)
            self._largest, self._communicates, lacks = int(largest), bool(communicates), bool(lacks_any)
        if self._failure:
            raise RunFailedError(self._failure)
        if self.size != self._agreed:
            self._keep_size(trainer)
        if self._mean is None or self._ranks is None:
            return
        if lacks:
            used = self._ranks.maximum(*(float(parameter.grad is not None) for parameter in trained))
            trained = [parameter for parameter, anywhere in zip(trained, used, strict=True) if anywhere]
        self._mean(trained)
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers and model.modules_buffers:
            broadcast_tensors(model.modules_buffers)

    def _keep_size(self, trainer: pl.Trainer) -> None:
        """A smaller size is that of the next updates, for twice as long where a larger one has just been tried."""
        before, self._agreed = self._agreed, self.size
        self._wait = self._wait * 2 if self._grown else self._wait
        self._since, self._grown = trainer.global_step, False
        self._guard_next_step()
        if trainer.is_global_zero:
            log.warning(
                "out of memory at update %d with %d samples at once: it was repeated in pieces of %d, as are the next"
                " %d updates",
                trainer.global_step + 1,
                before or self._largest,
                self.size,
                self._wait,
            )

    def _guard_next_step(self) -> None:
        """The memory that a step finds is another than before."""
        if self._guard is not None:
            self._guard.fits = False

    def _step_failed(self, trainer: pl.Trainer) -> None:
        """The optimiser's step ran out of memory, and is made again."""
        log.warning("out of memory in the optimizer's step of update %d: repeated", trainer.global_step + 1)
        for warmup in self._warmups:
            warmup.abandon_step()
        if self._grown and self.size == self._agreed:  # The ranks agree on that at the next update's end.
            self.size = _half_of(self._largest, self.size) or self.size

    def _evaluation_step(self, trainer: pl.Trainer, step: Callable[..., Any]) -> Callable[..., Any]:
        def repeated(batch: Any, *args: Any, **kwargs: Any) -> Any:
            strategy, model = trainer.strategy, trainer.strategy.model
            if isinstance(model, DistributedDataParallel) and self._mean is None:
                return step(batch, *args, **kwargs)  # DDP sends buffers at its first forward pass.
            samples = number_of_samples(batch)

            def attempt() -> tuple[Any]:
                return (self._evaluate(trainer, lambda batch: step(batch, *args, **kwargs), samples, batch),)

            def cut(reason: str) -> bool:
                half = _half_of(samples, self.evaluation_size)
                if half is None:
                    raise RunFailedError(_too_large(samples, reason))
                log.warning(
                    "out of memory with %d samples at once outside training: repeated in pieces of %d, as are the"
                    " batches that follow",
                    min(samples or 0, self.evaluation_size or math.inf),
                    half,
                )
                self.evaluation_size = half
                return True

            strategy.model = trainer.lightning_module
            try:
                return self._repeated(strategy.root_device, attempt, self._note(trainer), cut)[0]
            finally:
                strategy.model = model

        return repeated

    def _evaluate(self, trainer: pl.Trainer, step: Callable[[Any], Any], samples: int | None, batch: Any) -> Any:
        if samples is None or self.evaluation_size is None or samples <= self.evaluation_size:
            return step(batch)
        outputs, sizes, collectives = [], [], collectives_made()
        for piece in piece_slices(samples, self.evaluation_size):
            part = cut_batch(batch, samples, piece)
            set_logged_batch(trainer, part)
            outputs.append(step(part))
            sizes.append(piece.stop - piece.start)
            if collectives_made() != collectives:
                raise RunFailedError(f"a batch cannot be cut where an evaluation step {_COMMUNICATES}")
        set_logged_batch(trainer, batch)
        return join_outputs(outputs, sizes, sizes)

    @override
    def state_dict(self) -> dict[str, Any]:
        names = "size", "_since", "_wait", "_grown", "_largest"
        return {name.strip("_"): getattr(self, name) for name in names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.size, self._largest = state_dict["size"], state_dict["largest"]
        self._since, self._wait, self._grown = state_dict["since"], state_dict["wait"], state_dict["grown"]

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        restore_hooks(self)
        while self._undo:
            self._undo.pop()()
        if self._accumulation is not None:
            self._accumulation.closed_by_other = False
        self._forget()


def _half_of(samples: int | None, size: int | None) -> int | None:
    """Half as many samples as were computed at once, of a batch; None where they were not more than one."""
    at_once = samples or 1 if size is None else min(size, samples or 1)
    return -(-at_once // 2) if at_once > 1 else None


def _too_large(samples: int | None, reason: str) -> str:
    what = "with a single sample" if samples else "with a batch that holds no tensor along which to cut it"
    return f"out of memory {what} ({reason or 'no more is known'}): {_SMALLER}"


def _both(*functions: Undo) -> Undo:
    def call() -> None:
        for function in functions:
            function()

    return call


def _drop_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
