"""Gradient norms, sizes of updates, data wait and memory of a run, measured at the updates that are logged.

Lightning's `ThroughputMonitor` and the usual `self.log("grad_norm", ...)` wait for the device in every batch. At the
updates between two logs this one compares numbers and reads the clock.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.lightning_internals import observe_fetches
from callbacks.lib.step_cost import step_cost
from callbacks.lib.trainer_attributes import log_interval
from datamodules.ranges import COUNT, Range, check_ranges

__all__ = ["TrainingMonitor", "device_flops", "memory_gib", "total_norm"]

_GIB = 2**30


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all elements: a tensor of no dimension, float32 or float64.

    Sparse gradients and the shards of FSDP2 count in full; the latter makes it a collective call.

    Example:
        >>> total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    shards = [value for value in values if isinstance(value, DTensor)]
    plain = [value for value in values if not isinstance(value, DTensor)]
    norms = [*torch._foreach_norm(plain)] if plain else []
    if shards:
        norm: Any = nn.utils.get_total_norm(shards)
        norms.append(norm.full_tensor())
    if not norms:
        return torch.zeros(())
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked)
    return total


@cache
def _process() -> Any:
    import psutil

    return psutil.Process()


def memory_gib(device: torch.device) -> dict[str, float]:
    """GiB that this process holds now on its GPU, the most that it has held there, and its host memory now."""
    found = {"host_memory_gib": _process().memory_info().rss / _GIB}
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.memory_allocated(device) / _GIB
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
    return found


def device_flops(trainer: pl.Trainer) -> int | None:
    """Floating-point operations per second of the GPU at the run's precision, as Lightning knows them; else None."""
    if trainer.strategy.root_device.type != "cuda":
        return None
    kinds = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    dtype = next((kind for name, kind in kinds.items() if trainer.precision.startswith(name)), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of GPUs that it does not know.
        return get_available_flops(trainer.strategy.root_device, dtype)


@dataclass
class _Group:
    """A parameter group in the update that is measured.

    Args:
        parameters: those that have a gradient.
        weights: copies of them, from before the step.
        gradients: norm of the gradients before clipping; None where they are still scaled.
    """

    name: str
    parameters: list[nn.Parameter]
    weights: list[Tensor]
    gradients: Tensor | None


def _gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    return total_norm(parameter.grad for parameter in parameters if parameter.grad is not None)


def _norms(groups: Sequence[_Group], clipped: bool, by_group: bool) -> dict[str, float]:
    """The norms of all groups together and, if asked for, of each, after the optimiser's step."""
    columns = []
    for group in groups:
        after = group.gradients
        if clipped or after is None:
            after = _gradients(group.parameters)
        before = after if group.gradients is None else group.gradients
        weights = total_norm(group.weights)
        # In place, so that it takes no more memory.
        torch._foreach_sub_(group.weights, [parameter.detach() for parameter in group.parameters])
        columns.append(torch.stack([norm.float() for norm in (before, after, total_norm(group.weights), weights)]))
    # Read from the device at once.
    values = torch.stack([column.to(columns[0].device) for column in columns], 1)
    table = torch.cat((torch.linalg.vector_norm(values, dim=1, keepdim=True), values), 1).T.tolist()
    rows = dict(zip(["", *(f"/{group.name}" for group in groups if by_group)], table))
    found = {}
    for name, (before, after, update, weights) in rows.items():
        found[f"gradient_norm{name}"] = before
        if clipped:
            found[f"gradient_norm_clipped{name}"] = after
        found[f"update_to_weight_ratio{name}"] = update / weights if weights else 0.0
    return found


def _count_flops(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> int:
    """Floating-point operations of a micro-batch, forward and backward; 0 where they cannot be counted."""
    try:
        cost = step_cost(pl_module, batch, trainer.precision_plugin.train_step_context)
    except Exception as error:  # Of the user's step, which may read numbers off its output.
        rank_zero_warn(f"TrainingMonitor logs no FLOPs, since the step cannot be traced: {error}")
        return 0
    return cost.forward_flops + cost.backward_flops


class TrainingMonitor(pl.Callback):
    """Logs how training goes: norms of gradients and updates, the share of time that waits for data, memory.

    Under "monitor/" (in TensorBoard of the recipes under "updates/"):

    - ``gradient_norm``: of all gradients of the update, over all micro-batches and ranks, unscaled and before clipping.
    - ``gradient_norm_clipped``: after clipping, where the Trainer or the module clips.
    - ``update_to_weight_ratio``: the norm of what the optimiser has added to the weights, over the norm of the weights.
    - ``data_wait``: the share of the time of training steps that waits for the next batch, on this rank.
    - ``host_memory_gib``: of this process now; on a GPU, too, ``memory_gib`` and ``peak_memory_gib`` of its tensors.

    - ``mfu``: on a GPU the share of its peak that the floating-point operations of the steps make (Chowdhery et al.,
      2022); those of the first micro-batch count for all. ``tflops_per_second`` where Lightning knows no peak.

    Only parameters with a gradient count, so frozen ones do not. The samples per second are logged by `TrainLoss`.

    Runs on: `on_before_optimizer_step` and `on_train_batch_end`, once per ``log_every_n_steps`` updates, where it keeps
    a copy of the weights during the step, when the memory of the activations is free, and waits for the device once. At
    other updates it reads the clock. Nothing that it does changes the run.

    Args:
        groups: log the norms and ratios of each parameter group, too, as ``gradient_norm/NAME``.
        histogram_every: updates between histograms of weights and gradients in TensorBoard; 0 writes none.
        every: updates between two logs; by default the Trainer's ``log_every_n_steps``.
        peak_flops: floating-point operations per second of one device, for ``mfu``; by default Lightning's figure.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TrainingMonitor(groups=True)], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        groups: bool = False,
        histogram_every: int = 0,
        every: int | None = None,
        peak_flops: float | None = None,
    ) -> None:
        check_ranges(
            histogram_every=(histogram_every, Range(0, whole=True)),
            every=(every, COUNT),
            peak_flops=(peak_flops, Range(0, above=True)),
        )
        self.groups, self.histogram_every, self.every, self.peak_flops = groups, histogram_every, every, peak_flops
        self.values: dict[str, float] = {}
        """What was logged last."""
        self._stop_observing: Callable[[], None] | None = None
        self._is_due = self._draws = False
        self._start()

    def _start(self) -> None:
        self._measured: dict[Optimizer, list[_Group]] = {}
        self._waited = self._trained = 0.0
        self._batches = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start()
        self._epoch_start = trainer.global_step
        self._interval = self.every or log_interval(trainer)
        self._peak = self.peak_flops or device_flops(trainer)
        on_gpu = trainer.strategy.root_device.type == "cuda"
        self._flops: int | None = None if self._interval and (self._peak or on_gpu) else 0  # Of a batch, once counted.
        self._has_gradients = not isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy))
        if not self._has_gradients:
            rank_zero_warn(
                f"TrainingMonitor logs no gradients: {type(trainer.strategy).__name__} keeps them in its own way; pass"
                ' strategy="ddp" or "fsdp2" for them'
            )
        self._clips = pl_module.automatic_optimization and (
            trainer.gradient_clip_val is not None or is_overridden("configure_gradient_clipping", pl_module)
        )
        self._release()
        self._stop_observing = observe_fetches(trainer, self._before_fetch, self._after_fetch)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch_start = trainer.global_step

    def _before_fetch(self) -> None:
        self._since = time.perf_counter()

    def _after_fetch(self) -> None:
        self._waited += time.perf_counter() - self._since

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._flops is None:
            self._flops = _count_flops(trainer, pl_module, batch)
        self._began = time.perf_counter()
        self._update = before = trainer.global_step
        every, draws = self._interval, self.histogram_every
        if not every:
            return
        after = before + len(trainer.optimizers)
        short_epoch = self._epoch_start // every == before // every
        self._is_due = before // every < after // every or (short_epoch and trainer.is_last_batch)
        self._draws = draws > 0 and before // draws < after // draws

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self._is_due or not self._has_gradients:
            return
        # With GradScaler a fused optimiser unscales the gradients in its step.
        scaled = getattr(trainer.precision_plugin, "scaler", None) and hasattr(optimizer, "_step_supports_amp_scaling")
        earlier = self._measured.get(optimizer)  # Of the same step: LBFGS comes here several times.
        groups = self._measured[optimizer] = []
        for number, group in enumerate(optimizer.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            weights = earlier[number].weights if earlier else [p.detach().clone() for p in parameters]
            groups.append(
                _Group(str(group.get("name", number)), parameters, weights, None if scaled else _gradients(parameters))
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        made_update = (self._is_due or self._draws) and trainer.global_step > self._update
        if made_update and self._is_due:
            self._log(trainer)
        else:
            self._trained += time.perf_counter() - self._began
        if made_update and self._draws:
            self._draw(trainer, pl_module)

    def _log(self, trainer: pl.Trainer) -> None:
        groups = [group for found in self._measured.values() for group in found if group.parameters]
        row = _norms(groups, self._clips, self.groups) if groups else {}
        self._trained += time.perf_counter() - self._began  # The norms have waited for the device.
        row["data_wait"] = self._waited / (self._waited + self._trained)
        if self._flops:
            rate = self._flops * self._batches / (self._waited + self._trained)
            row |= {"mfu": rate / self._peak} if self._peak else {"tflops_per_second": rate / 1e12}
        row |= memory_gib(trainer.strategy.root_device)
        self.values = {f"monitor/{name}": value for name, value in row.items()}
        for logger in trainer.loggers:
            logger.log_metrics({**self.values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
        self._start()

    def _draw(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the histograms; TensorBoard's writer refuses values that are not finite."""
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is None:
                continue
            for kind, value in (("weights", parameter.detach()), ("gradients", parameter.grad)):
                dense = value.full_tensor() if isinstance(value, DTensor) else value.to_dense()
                finite = dense[dense.isfinite()].float()
                for logger in trainer.loggers if len(finite) else ():
                    if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                        # Below the scores in TensorBoard, which sorts by name.
                        logger.experiment.add_histogram(f"updates_{kind}/{name}", finite, trainer.global_step - 1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self._measured = {}
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None
