"""An update of which some ranks have a micro-batch more than others: what a stand-in leaves behind, and its weight."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.errors import UserError

_NEUTRAL = {"max": -math.inf, "min": math.inf}
"""What changes no result of a reduction; 0 for others."""


@contextlib.contextmanager
def uneven_logs(results: Any, is_stand_in: bool) -> Iterator[None]:
    """Surrounds a micro-batch: another rank logs what a stand-in would, and no rank waits for another one's logs.

    A stand-in logs what changes no mean, sum or extreme: at the epoch's end all ranks compute the same ones.

    Args:
        results: Lightning's, of the training loop.
        is_stand_in: whether the micro-batch counts for nothing.
    """
    log = results.log

    def log_what_counts(hook: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("sync_dist") and kwargs.get("on_step"):
            raise UserError(
                "self.log(on_step=True, sync_dist=True) waits for all devices at each micro-batch, and this update"
                " has one more on some: log with on_step=False, on_epoch=True, or in on_train_batch_end"
            )
        if is_stand_in and isinstance(value, Tensor):
            reduction = kwargs.get("reduce_fx")
            neutral = _NEUTRAL.get(getattr(reduction, "__name__", str(reduction)), 0.0)
            value = torch.full_like(value + 0.0, neutral)
            kwargs["batch_size"] = 0
        log(hook, name, value, *args, **kwargs)

    results.log = log_what_counts
    try:
        yield
    finally:
        del results.log


@contextlib.contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Surrounds a stand-in: the metrics of torchmetrics in a module are afterwards what they were before."""
    metrics = [layer for layer in module.modules() if isinstance(layer, Metric)]
    kept = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        # The stand-in changes copies, some of them in place.
        for name, state in metric.metric_state.items():
            setattr(metric, name, state.detach().clone() if isinstance(state, Tensor) else list(state))
    try:
        yield
    finally:
        for metric, attributes in zip(metrics, kept, strict=True):
            vars(metric).clear()
            vars(metric).update(attributes)


@contextlib.contextmanager
def weighted_gradients(module: nn.Module, weight: float) -> Iterator[None]:
    """Multiplies the gradients of a module's parameters as backward passes compute them, before DDP averages them."""
    handles = []
    for parameter in module.parameters():
        if parameter.is_floating_point():
            # A module may let it learn in its `training_step` only, and a hook wants a tensor that does.
            learns = parameter.requires_grad
            parameter.requires_grad_(True)
            handles.append(parameter.register_hook(lambda gradient: gradient * weight))
            parameter.requires_grad_(learns)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
