"""Training that runs out of memory goes on with the same batch in smaller pieces.

A batch that is too large for the device otherwise ends the run, possibly after hours, as where sentences are longer.
The gradient of a batch is the sum of those of its pieces, so the update is the same.
"""

import gc
import logging
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.accumulation import AccumulationWindow, is_replicated, scale_gradients, uses_loss, weigh_loss
from callbacks.lib.batch_norm import is_synchronised
from callbacks.lib.batch_pieces import cut_batch, join_outputs, number_of_samples, piece_slices
from callbacks.lib.consensus import FlagAllReduce
from callbacks.lib.generators import keep_generators
from callbacks.lib.gradient_mean import GradientMean, broadcast_tensors
from callbacks.lib.lightning_internals import (
    TrainingBatch,
    collective_timeout,
    keep_logged,
    replace_closures,
    set_logged_batch,
)
from callbacks.lib.sample_noise import narrow_noise
from callbacks.lib.targets import count_targets
from callbacks.lib.trainer_attributes import callbacks_of
from callbacks.warmup_lr import WarmupLR
from datamodules.errors import RunFailedError, is_out_of_memory
from datamodules.ranges import COUNT, check_ranges

__all__ = ["AutoMicroBatch"]

log = logging.getLogger("lightning_recipes")

_EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")

Undo = Callable[[], Any]


def free_memory(device: torch.device) -> None:
    """Returns what no tensor holds any more to the device."""
    gc.collect()  # Frames of an exception that refer to each other.
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def keep_metrics(metrics: list[Metric]) -> Undo:
    """Notes what metrics have counted; returns how to put it back."""
    kept = [
        (metric, {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(metric).items()})
        for metric in metrics
        if metric.update_called
    ]
    lists = [
        (values, name, list(value)) for _, values in kept for name, value in values.items() if isinstance(value, list)
    ]
    counted = {id(metric) for metric, _ in kept}

    def restore() -> None:
        for values, name, items in lists:
            values[name] = list(items)
        for metric, values in kept:
            vars(metric).update(values)
        for metric in metrics:
            if id(metric) not in counted:
                metric.reset()

    return restore


def keep_buffers(owners: list[dict[str, Tensor | None]]) -> Undo:
    """Notes the buffers of layers, such as the statistics of BatchNorm; returns how to put them back."""
    kept = [(owner, name, value) for owner in owners for name, value in owner.items() if value is not None]
    copies = [value.detach().clone() for _, _, value in kept]

    def restore() -> None:
        with torch.no_grad():
            for (owner, name, value), copied in zip(kept, copies, strict=True):
                owner[name] = value
                value.copy_(copied)

    return restore


def keep_optimizer(optimizer: Optimizer) -> Undo:
    """Copies an optimiser's parameters and state to the host; returns how to put them back."""

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [copied(parameter) for parameter in parameters]
    groups = [
        {key: copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = {
        parameter: {name: (copied(value), getattr(value, "device", None)) for name, value in entries.items()}
        for parameter, entries in optimizer.state.items()
    }

    def restore() -> None:
        optimizer.state.clear()
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
            for group, entries in zip(optimizer.param_groups, groups, strict=True):
                for name, value in entries.items():
                    if isinstance(group[name], Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value
            for parameter, entries in state.items():
                optimizer.state[parameter] = {
                    name: value if device is None else value.to(device) for name, (value, device) in entries.items()
                }

    return restore


class AutoMicroBatch(pl.Callback):
    """Repeats a batch that runs out of memory in pieces of half as many samples, then of a quarter, and so on.

    The update is that of the batch, up to the rounding of sums: the same samples, each piece weighted by its number of
    targets (``count``, see `GradientAccumulation`), the same noise of layers of `stateless_dropout`. What the attempt
    did is taken back: gradients, statistics of BatchNorm, metrics, what was logged, random numbers. Cached memory is
    freed. The size is kept for the batches that follow, is said in one line, and stands in checkpoints. After
    `larger_after` updates twice the size is tried, and after each failure only after twice as many.

    In training, in the forward and the backward pass. In the optimiser's first step after any change of size, from
    a copy of its parameters and state on the host; other optimisers than torch's, and LBFGS, have no such copy. In
    validation, test and prediction, where outputs of pieces are joined.

    On several ranks each repeats its own batch, while the others wait. No rank communicates before its gradients are
    there, so that none waits in the middle of a backward pass: DDP's reduction is replaced by one after the backward
    pass, which does not overlap with it and leaves out DDP's communication hooks. Once per update the ranks agree on
    the smallest size.

    What is not the same: BatchNorm normalises over a piece, and a warning says so. Layers of torch's dropout draw other
    numbers. Means that a step logs are weighted by samples: pass ``log(batch_size=...)`` for those over tokens.

    A `training_step` that itself communicates cannot be repeated: with synchronised BatchNorm on several ranks the
    callback does nothing. Nor does it with manual optimisation, or a strategy other than DDP.

    A batch is cut along the first dimension of its tensors; see `cut_batch` in `callbacks.lib.batch_pieces`.

    Runs on: `on_train_start`, where it replaces the closures of the loop, and `setup` for evaluation. Memory: while
    gradients accumulate over several batches, one more copy of them.

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
        self._accumulation: GradientAccumulation | None = None
        self._warmups: list[WarmupLR] = []
        self._metrics: list[Metric] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        self._ranks: FlagAllReduce | None = None
        self._mean: GradientMean | None = None
        self._step_fits = False
        self._failure = ""
        self._size_before = self.size

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
        self._buffers = [layer._buffers for layer in pl_module.modules() if layer._buffers]
        if trainer.world_size > 1:
            self._ranks = FlagAllReduce(trainer.world_size, collective_timeout(trainer.strategy))
            self._mean = GradientMean(list(pl_module.parameters()), trainer.world_size)
        if self._accumulation is not None:
            self._accumulation.closed_by_other = True
        self._undo.append(replace_closures(trainer, lambda parts: self._compute(trainer, pl_module, parts)))
        if not uses_loss(trainer.optimizers[0]):
            self._undo.append(self._guard_step(trainer, trainer.optimizers[0]))

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

    def _compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule, parts: TrainingBatch) -> Any:
        """Loss and gradients of a batch, in as many attempts as it takes; before a step averaged over the ranks."""
        if parts.zero_grad is not None:
            self._begin_update(trainer)
        parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        earlier = [] if parts.zero_grad else [parameter.grad for parameter in parameters]
        strategy, model = trainer.strategy, trainer.strategy.model
        undo = self._begin_attempt(trainer, training=True)
        if self._accumulation is not None and self._accumulation.weighs:
            begin = self._accumulation.begin_batch(trainer)
            undo = _both(undo, begin)
        samples = number_of_samples(parts.batch)
        self._largest = max(self._largest, samples or 0)
        if parts.zero_grad is not None:
            parts.zero_grad()
        strategy.model = pl_module  # DDP would begin to reduce in the backward pass.
        result = parts.nothing()
        try:
            # Other ranks learn of a failure at the update's end: until then they wait for this one in other places.
            while not self._failure:
                if earlier:
                    _set_gradients(parameters, [None] * len(parameters))
                try:
                    result = self._attempt(trainer, parts, samples)
                    break
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = str(error)
                undo()
                _set_gradients(parameters, [None] * len(parameters))
                free_memory(strategy.root_device)
                if self._halve(samples, reason):
                    _warn_of_batch_norm(pl_module)
        finally:
            strategy.model = model
        for parameter, gradient in zip(parameters, earlier, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if parts.makes_update:
            self._end_update(trainer)
        return result

    def _begin_update(self, trainer: pl.Trainer) -> None:
        """Try a larger size where it is time to."""
        if self.size is not None and trainer.global_step - self._since >= self._wait:
            self.size = self.size * 2 if self.size * 2 < self._largest else None
            self._since, self._grown, self._step_fits = trainer.global_step, True, False
        self._size_before = self.size

    def _attempt(self, trainer: pl.Trainer, parts: TrainingBatch, samples: int | None) -> Any:
        """One pass over the pieces of a batch."""
        if samples is None or self.size is None or samples <= self.size:
            result = parts.step(parts.batch)
            if result.closure_loss is not None:
                parts.backward(result.closure_loss)
            return result
        weighs = self._accumulation is not None and self._accumulation.weighs
        pieces, window = piece_slices(samples, self.size), AccumulationWindow()
        sizes, counts, losses, extras = [], [], [], []
        parameters = (p for group in trainer.optimizers[0].param_groups for p in group["params"])
        for piece in pieces:
            narrow_noise(piece)
            batch = cut_batch(parts.batch, samples, piece)
            set_logged_batch(trainer, batch)
            result = parts.step(batch)
            if result.closure_loss is None:
                continue
            count = count_targets(result.extra, batch)
            sizes.append(piece.stop - piece.start)
            counts.append(count)
            losses.append(result.loss)
            extras.append(result.extra)
            if not weighs:
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

    def _begin_attempt(self, trainer: pl.Trainer, training: bool) -> Undo:
        """Notes what a step may change besides gradients; returns how to put it back, any number of times."""
        return _both(
            keep_generators(trainer.strategy.root_device),
            keep_logged(trainer),
            keep_metrics(self._metrics),
            *([keep_buffers(self._buffers)] if training else []),
        )

    def _halve(self, samples: int | None, reason: str) -> bool:
        """Compute half as many samples at once; False where it was one, which ends the run with the update."""
        at_once = samples if self.size is None or samples is None else min(self.size, samples)
        if at_once is None or at_once <= 1:
            what = "with a single sample" if at_once else "with a batch that holds no tensor along which to cut it"
            self._failure = f"out of memory {what} ({_first_line(reason)}): {_SMALLER}"
            return False
        self.size = -(-at_once // 2)
        return True

    def _agree(self, trainer: pl.Trainer) -> list[nn.Parameter]:
        """Agree on the smallest size and the largest batch of all ranks.

        Returns:
            The parameters that have a gradient on any rank.

        Raises:
            RunFailedError: a single sample did not fit on some rank.
        """
        trained = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
        if self._ranks is None:
            if self._failure:
                raise RunFailedError(self._failure)
            return trained
        size = math.inf if self.size is None else self.size
        has_gradient = (float(parameter.grad is not None) for parameter in trained)
        any_failed, smallest, largest, *used = self._ranks.maximum(
            bool(self._failure), -size, self._largest, *has_gradient
        )
        if any_failed:
            raise RunFailedError(self._failure or f"out of memory with a single sample on another rank: {_SMALLER}")
        self.size = None if math.isinf(smallest) else int(-smallest)
        self._largest = int(largest)
        return [parameter for parameter, anywhere in zip(trained, used, strict=True) if anywhere]

    def _end_update(self, trainer: pl.Trainer) -> None:
        """Agree on the size, and make the gradients those of the global batch."""
        reduced = self._agree(trainer)
        if self.size != self._size_before:
            before, self._size_before = self._size_before, self.size
            self._wait = self._wait * 2 if self._grown else self._wait
            self._since, self._grown, self._step_fits = trainer.global_step, False, False
            if trainer.is_global_zero:
                log.warning(
                    "out of memory at update %d with %d samples at once: it was repeated in pieces of %d, as are"
                    " the next %d updates",
                    trainer.global_step + 1,
                    before or self._largest,
                    self.size,
                    self._wait,
                )
        if self._accumulation is not None and self._accumulation.weighs:
            self._accumulation.close_window(trainer)
        if self._mean is None:
            return
        for parameter in reduced:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._mean(parameter.grad for parameter in reduced if parameter.grad is not None)
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers and model.modules_buffers:
            broadcast_tensors(model.modules_buffers)

    def _guard_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> Undo:
        """Repeats the optimiser's step where it runs out of memory, until one has passed; returns how to undo it."""
        attributes = vars(optimizer)
        step: Any = optimizer.step
        patched = attributes.get("step")

        @wraps(step)
        def guarded(closure: Any = None, **kwargs: Any) -> Any:
            if self._step_fits:
                return step(closure, **kwargs) if closure is not None else step(**kwargs)
            loss = None if closure is None else closure()
            arguments = {} if closure is None else {"closure": lambda: loss}
            undo = keep_optimizer(optimizer)
            try:
                result = step(**arguments, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self._step_fits = True
                return result
            for warmup in self._warmups:
                warmup.abandon_step()
            undo()
            free_memory(trainer.strategy.root_device)
            log.warning("out of memory in the optimizer's step of update %d: repeated", trainer.global_step + 1)
            try:
                result = step(**arguments, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise RunFailedError(f"{_OPTIMIZER} ({error})") from error
            self._step_fits = True
            return result

        def remove() -> None:
            attributes.pop("step", None)
            if patched is not None:
                attributes["step"] = patched

        attributes["step"] = guarded
        return remove

    def _evaluation_step(self, trainer: pl.Trainer, step: Callable[..., Any]) -> Callable[..., Any]:
        def repeated(batch: Any, *args: Any, **kwargs: Any) -> Any:
            strategy, model = trainer.strategy, trainer.strategy.model
            if isinstance(model, DistributedDataParallel) and self._mean is None:
                return step(batch, *args, **kwargs)  # DDP sends buffers at its first forward pass.
            samples = number_of_samples(batch)
            undo = self._begin_attempt(trainer, training=False)
            strategy.model = trainer.lightning_module
            try:
                while True:
                    try:
                        return self._evaluate(trainer, step, samples, batch, *args, **kwargs)
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        reason = str(error)
                    undo()
                    free_memory(strategy.root_device)
                    at_once = samples if self.evaluation_size is None else min(samples or 0, self.evaluation_size)
                    if not at_once or at_once == 1:
                        raise RunFailedError(f"out of memory with a single sample ({_first_line(reason)}): {_SMALLER}")
                    self.evaluation_size = -(-at_once // 2)
                    log.warning(
                        "out of memory with %d samples at once outside training: repeated in pieces of %d, as are the"
                        " batches that follow",
                        at_once,
                        self.evaluation_size,
                    )
            finally:
                strategy.model = model

        return repeated

    def _evaluate(
        self, trainer: pl.Trainer, step: Callable[..., Any], samples: int | None, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if samples is None or self.evaluation_size is None or samples <= self.evaluation_size:
            return step(batch, *args, **kwargs)
        outputs, sizes = [], []
        for piece in piece_slices(samples, self.evaluation_size):
            part = cut_batch(batch, samples, piece)
            set_logged_batch(trainer, part)
            outputs.append(step(part, *args, **kwargs))
            sizes.append(piece.stop - piece.start)
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
        while self._undo:
            self._undo.pop()()
        if self._accumulation is not None:
            self._accumulation.closed_by_other = False
        self._forget()


_SMALLER = 'pass a smaller network, precision="bf16-mixed", activation checkpointing, or a device with more memory'
_OPTIMIZER = f"out of memory in the optimizer's step, twice: {_SMALLER}, or an optimizer with less state"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0] or "no more is known"


def _both(*functions: Undo) -> Undo:
    def call() -> None:
        for function in functions:
            function()

    return call


def _set_gradients(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _warn_of_batch_norm(pl_module: pl.LightningModule) -> None:
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in pl_module.modules()):
        rank_zero_warn(
            "BatchNorm normalises over the pieces of a batch that runs out of memory, so that their update differs from"
            " the batch's; pass a smaller `batch_size` and accumulate for the same on every device"
        )
