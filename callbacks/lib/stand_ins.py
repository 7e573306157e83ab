"""A micro-batch that counts for nothing: the first one, which a rank computes that has none in an update."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torchmetrics import Metric


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
        if parameter.is_floating_point() or parameter.is_complex():
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
