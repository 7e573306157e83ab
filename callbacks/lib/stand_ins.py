"""Contexts for stand-ins: micro-batches that a rank computes only to take part in the collective calls of an update.

Such a rank computes its own first micro-batch again, or without one the first of the update. Nothing of it counts.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from callbacks.lib.batch_norm import stand_in


@contextlib.contextmanager
def uneven_micro_batch(
    module: nn.Module, results: Any, synchronised_layers: Sequence[nn.Module], is_stand_in: bool
) -> Iterator[None]:
    """Run a micro-batch of an update of which some ranks have one micro-batch more than others.

    Args:
        results: the `UpdateResults` of the training loop.
        synchronised_layers: the BatchNorm layers that wait for all ranks in each forward pass.
    """
    with contextlib.ExitStack() as stack:
        if is_stand_in:
            stack.enter_context(results.stand_in())
            stack.enter_context(stand_in(synchronised_layers))
            stack.enter_context(kept_metrics(module))
        yield


@contextlib.contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the torchmetrics objects of a module after a stand-in.

    A state of one element keeps the shape and type that its first update gives it: ranks exchange states of one shape,
    and a rank that has only computed stand-ins has no update of its own.
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
