"""A table of the layers and an estimate of the memory of a run, before its first step."""

import copy
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.memory import peak_memory, used_memory
from callbacks.lib.step_cost import LayerCost, StepCost, step_cost, storage_bytes
from callbacks.lib.terminal import fit_rows, terminal_width
from callbacks.lib.trainer_attributes import callbacks_of
from datamodules.ranges import Range, check_ranges

__all__ = ["StepSummary", "memory_estimate", "optimizer_bytes", "summary_rows", "with_unit"]

_PROBE = 16
_WIDTH = 28  # Of a layer's name and class, with which a row fits 80 columns.


def with_unit(number: float, unit: str = "") -> str:
    """A number with three digits and k, M, G or T.

    Example:
        >>> with_unit(102778), with_unit(51380224, "B"), with_unit(0)
        ('103 k', '51.4 MB', '0')
    """
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def summary_rows(cost: StepCost, depth: int) -> list[dict[str, str]]:
    """A row for each layer down to a depth, and the sums of the step; ``memory`` is that of its activations.

    Args:
        depth: 1 for the module's children, 2 for their children, too; -1 for all layers.
    """

    def row(name: str, output: str, parameters: str, of: LayerCost | StepCost) -> dict[str, str]:
        return {
            "layer": name,
            "output": output,
            "params": parameters,
            "FLOPs": with_unit(of.forward_flops),
            "backward": with_unit(of.backward_flops),
            "memory": with_unit(of.activation_bytes, "B"),
        }

    rows = []
    for layer in cost.layers:
        level = layer.name.count(".")
        used = layer.output is not None or layer.forward_flops or layer.activation_bytes
        if used and (depth < 0 or level < depth):
            output = "x".join(map(str, layer.output or ()))
            name = f"{'  ' * level}{layer.name.rpartition('.')[2]}: {layer.kind}"
            name = name if len(name) <= _WIDTH else f"{name[: _WIDTH - 2]}.."
            rows.append(row(name, output, with_unit(layer.parameters), layer))
    return [*rows, row("the training step", "", "", cost)]


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimiser's state after its first step, without making one.

    Where the state is still empty, a copy of the optimiser steps on a matrix of 16 x 16, and larger parameters count in
    proportion.

    Example:
        >>> optimizer_bytes(torch.optim.AdamW([torch.zeros(1000, requires_grad=True)]))
        8000
    """
    if optimizer.state:
        return storage_bytes(_tensors(optimizer.state))
    total = 0
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not parameters:
            continue
        probe = nn.Parameter(torch.zeros(_PROBE, _PROBE, dtype=parameters[0].dtype, device=parameters[0].device))
        probe.grad = torch.zeros_like(probe)
        trial = copy.copy(optimizer)  # Without its hooks.
        trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [probe]}]
        with suppress(Exception):  # Of an optimiser that needs more than gradients.
            trial.step(lambda: 0.0)
        # Without counters of steps.
        state = sum(tensor.nbytes for tensor in _tensors(trial.state) if tensor.numel() > 1)
        total += sum(parameter.nbytes for parameter in parameters) * state // probe.nbytes
    return total


def memory_estimate(trainer: pl.Trainer, pl_module: pl.LightningModule, activations: int | None) -> dict[str, int]:
    """Bytes that training holds on each device, by what they are for, and their ``total``.

    The workspace of operations, the batches and the program itself are not counted.

    Args:
        activations: of a micro-batch; None where they are not known.
    """
    gradients = sum(parameter.nbytes for parameter in pl_module.parameters() if parameter.requires_grad)
    parameters = storage_bytes(pl_module.parameters())
    averages = sum(parameters * getattr(callback, "copies", 0) for callback in callbacks_of(trainer))
    others = [value for callback in callbacks_of(trainer) for value in vars(callback).values()]
    copies = [value for value in others if isinstance(value, nn.Module) and value is not pl_module]
    model = trainer.strategy.model
    buckets = isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view
    parts = {
        "weights": storage_bytes((*pl_module.parameters(), *pl_module.buffers())),
        "gradients": gradients * (2 if buckets else 1),
        "optimizer": sum(map(optimizer_bytes, trainer.optimizers)),
        "averaged": averages + sum(storage_bytes((*copied.parameters(), *copied.buffers())) for copied in copies),
        "activations": activations or 0,
    }
    found = {name: size for name, size in parts.items() if size}
    return {**found, "total": sum(found.values())}


class StepSummary(pl.Callback):
    """Prints layers with outputs, parameters, FLOPs and activations, and an estimate of the memory of training.

    The table is of the first micro-batch of the run. FLOPs are counted by torch, which knows matrix products,
    convolutions and attention; a multiply-add counts as two. cuDNN's kernels of whole recurrent layers count as none.

    Runs on: `on_train_batch_start` of the first batch, where a copy of the module without memory makes a step; and
    `on_train_end`, which notes what the run has taken. Neither changes the run.

    Args:
        depth: levels of layers that are shown; -1 shows all.

    Example:
        >>> trainer = pl.Trainer(callbacks=[StepSummary(depth=1)], logger=False, accelerator="cpu")
    """

    def __init__(self, depth: int = 2) -> None:
        check_ranges(depth=(depth, Range(-1, whole=True)))
        self.depth = depth
        self.estimate: dict[str, int] = {}
        """Bytes by what they are for, and their ``total``; empty before the first batch."""
        self.taken = 0
        """Bytes that training has taken at most: of tensors on a GPU; on a CPU what the process has grown by, and the
        weights."""
        self._before = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.estimate = {}

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.estimate:
            return
        cost, lines = None, []
        try:
            cost = step_cost(pl_module, batch, trainer.precision_plugin.train_step_context)
        except Exception as error:  # Of the user's step, which meets fake tensors for the first time.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            lines.append(f"the layers, their FLOPs and activations are not known ({reason})")
        else:
            lines += fit_rows(summary_rows(cost, self.depth), terminal_width(sys.stdout))
        self.estimate = memory_estimate(trainer, pl_module, cost.activation_bytes if cost else None)
        parts = [f"{name} {with_unit(size, 'B')}" for name, size in self.estimate.items() if name != "total"]
        lines.append(f"memory of training, estimated: {with_unit(self.estimate['total'], 'B')} = {' + '.join(parts)}")
        if trainer.is_global_zero:
            trainer.print("\n".join(lines))
        self._before = used_memory(trainer.strategy.root_device)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        peak = peak_memory(trainer.strategy.root_device)
        on_host = trainer.strategy.root_device.type == "cpu"
        self.taken = peak - self._before + self.estimate.get("weights", 0) if on_host else peak
