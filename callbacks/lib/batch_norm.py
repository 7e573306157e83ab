"""Batch normalisation over several processes, for layers that already exist.

torch's SyncBatchNorm runs on accelerators only, is a class of its own, and turning it back loses the class and the mode
of a layer. Here a layer changes its class in place and nothing else: parameters, buffers, hooks, mode and name stay,
``isinstance(layer, nn.BatchNorm2d)`` stays true, and copies and pickles of it are plain layers.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.tree_sum import TreeSum, nodes_by_rank, total_over_ranks
from datamodules.errors import UserError
from datamodules.loading.sampling import range_of_rank

__all__ = [
    "broadcast_tensors",
    "check_batchnorm",
    "combine_moments",
    "exempt_from_broadcast",
    "is_synchronised",
    "plain_layers",
    "recalibrate",
    "restore_batchnorm",
    "running_buffers",
    "sync_batchnorm",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def combine_moments(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count of a whole from those of its parts (Chan, Golub and LeVeque, 1979).

    Args:
        parts: (part, 2 * channels + 1): means, biased variances and the number of values. Parts may be empty.

    Example:
        >>> combine_moments(torch.tensor([[1.0, 0.0, 1.0], [4.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
        (tensor([3.]), tensor([2.6667]), tensor(3.))
    """
    means, variances, counts = parts.split([(parts.shape[1] - 1) // 2] * 2 + [1], dim=1)
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean) ** 2)).sum(0), total


def _local_moments(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What one process adds to `combine_moments`, in float64 so that combining adds no rounding."""
    channels = x.shape[1]
    if x.numel() == 0:
        return torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    # The kernel behind nn.BatchNorm, 4 to 25 times faster than torch.var_mean; the discarded buffers set its precision.
    buffers = torch.zeros(2, channels, dtype=dtype, device=x.device)
    mean, variance = torch.batch_norm_update_stats(x, buffers[0], buffers[1], 0.0)
    return torch.cat(
        [mean.double(), variance.double(), mean.new_full((1,), x.numel() // channels, dtype=torch.float64)]
    )


def running_statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The running mean, the running variance and the number of batches of a layer that tracks them."""
    mean, variance, batches = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert batches is not None
    return mean, variance, batches


class _SynchronisedFunction(torch.autograd.Function):
    """Normalises with the statistics of all processes: one all-gather forwards, one all-reduce backwards.

    The gradients of weight and bias are this process's part, as everywhere under DDP, which averages them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        moments = _local_moments(x, dtype)
        parts = [torch.empty_like(moments) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, moments)
        mean, variance, total = combine_moments(torch.stack(parts))
        if total == 1:
            raise ValueError(
                "batch normalisation found 1 value per channel on all processes, expected 2 or more: "
                "pass another batch size"
            )
        if running is not None and total > 0:
            # By `data`, since torch's kernel counts no change either: within the same loss the layer may have computed
            # with them in evaluation mode.
            running[0].data.lerp_(mean.to(running[0].dtype), momentum)
            running[1].data.lerp_((variance * (total / (total - 1))).to(running[1].dtype), momentum)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.total = eps, max(total.item(), 1)
        if x.numel() == 0:
            return torch.empty_like(x)
        weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        settings = ctx.needs_input_grad, ctx.eps, ctx.total
        return *_SynchronisedGradient.apply(grad_output, *ctx.saved_tensors, *settings), None, None, None


class _SynchronisedGradient(torch.autograd.Function):
    """The gradients of `_SynchronisedFunction`, which cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004
        grad_output: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        needed: tuple[bool, ...],
        eps: float,
        total: float,
    ) -> tuple[Tensor | None, ...]:
        grad_input = None
        sums = torch.zeros(2, len(mean), dtype=torch.float64, device=x.device)
        if x.numel() > 0:
            # In evaluation mode the kernel yields sum(dy * x_hat) and sum(dy), in one pass over x and dy.
            _, by_x_hat, plain = torch.ops.aten.native_batch_norm_backward(
                grad_output, x, None, mean, variance, None, None, False, eps, [False, True, True]
            )
            sums = torch.stack([by_x_hat, plain]).double()
        grad_weight = sums[0].to(weight.dtype) if weight is not None and needed[1] else None
        grad_bias = sums[1].to(weight.dtype) if weight is not None and needed[2] else None
        if needed[0]:
            # A process without samples has nothing to add, but the others wait for it.
            sums = sums.clone()
            dist.all_reduce(sums)
            scale = (variance + eps).rsqrt()
            scale = scale if weight is None else scale * weight.to(scale.dtype)
            slope, shift = (-scale * sums / total).to(scale.dtype)
            grad_input = torch.empty_like(x)
            if x.numel() > 0:
                # dx = scale * (dy - mean(dy) - x_hat * mean(dy * x_hat)), in two calls of a kernel that is fast and
                # accurate for half-precision activations too, where plain products are 5 times slower.
                projection = F.batch_norm(x, mean, variance, slope, shift, eps=eps)
                unit = torch.ones_like(mean)
                # torch.batch_norm: the function in nn.functional of torch 2.11 refuses an eps of 0.
                scaled = torch.batch_norm(grad_output, scale, None, unit - 1, unit, False, 0.0, 0.0, False)
                grad_input = scaled.add_(projection)
        return grad_input, grad_weight, grad_bias

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:  # noqa: ARG004
        raise UserError(
            "SyncBN has no second derivative, which a gradient penalty (create_graph=True) asks for: remove SyncBN, put"
            " the layers into evaluation mode for the penalty, or normalise with nn.GroupNorm"
        )


def _not_compiled(function: Function) -> Function:
    disabled: Function = torch.compiler.disable(function)
    return disabled


class _Synchronised(_BatchNorm):
    """The second base of the classes that `sync_batchnorm` makes."""

    original: ClassVar[type[_BatchNorm]]
    process_group: ClassVar[None] = None  # For torch's `forward`.
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @override
    @_not_compiled  # a collective inside an autograd function; the layers around it compile
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        if input.device.type != "cpu":
            # torch's layer sends the statistics of an empty half-precision batch in half, the other ranks in float32.
            empty = input.float() if input.numel() == 0 and input.dtype != torch.float64 else input
            torchs_forward: Callable[[Any, Tensor], Tensor] = nn.SyncBatchNorm.forward
            return torchs_forward(self, empty).to(input.dtype)
        check: Callable[[Tensor], None] = self._check_input_dim
        check(input)
        momentum = self.momentum
        running = None
        if self.track_running_stats and self.running_mean is not None:
            mean, variance, batches = running_statistics(self)
            batches.add_(1)
            momentum = 1.0 / batches.item() if momentum is None else momentum
            running = (mean, variance)
        apply: Callable[..., Tensor] = _SynchronisedFunction.apply
        return apply(input, self.weight, self.bias, running, momentum, self.eps)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy (a moving average of the weights, a pickled model) takes part in no collective: it is a plain layer.
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (self.original,), *reduced[2:]


def _normalise_drop_activate(layer: Any, inputs: Tensor) -> Tensor:
    """The forward pass of timm's BatchNormAct2d, which repeats that of BatchNorm2d and does not call it."""
    outputs: Tensor = layer.act(layer.drop(_Synchronised.forward(layer, inputs)))
    return outputs


def _synchronised_class(cls: type[_BatchNorm]) -> type[_BatchNorm]:
    attributes: dict[str, Any] = {"original": cls}
    forward = cls.forward
    if (forward.__module__, forward.__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d.forward"):
        attributes["forward"] = _normalise_drop_activate
    elif forward is not _BatchNorm.forward and "__class__" not in forward.__code__.co_freevars:
        raise UserError(
            f"{cls.__name__}.forward normalises by itself, so SyncBN cannot synchronise it: let it call"
            " super().forward(input), use torch's class, or remove SyncBN"
        )
    # Ours comes behind the user's class and before _BatchNorm, where forward() and super().forward() end.
    return type(f"Synchronised{cls.__name__}", (cls, _Synchronised), attributes)


def check_batchnorm(module: nn.Module) -> None:
    """Refuses layers that `sync_batchnorm` could not change.

    Raises:
        UserError: a subclass normalises in a `forward` of its own.
    """
    for layer in _changeable(module):
        _synchronised_class(type(layer))


def _changeable(module: nn.Module) -> list[_BatchNorm]:
    done = (_Synchronised, nn.SyncBatchNorm)
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and not isinstance(m, done)]


def sync_batchnorm(module: nn.Module) -> None:
    """Makes every batch normalisation layer of a module normalise over all processes, in place.

    `restore_batchnorm` undoes it. CUDA and other accelerators run torch's kernels, the CPU ours. Batch sizes may differ
    between processes and be zero on some. Layers in evaluation mode keep using their running statistics. Each process
    must call the layers in the same order. Layers with an activation inside, timm's BatchNormAct2d, are changed, too.

    Raises:
        UserError: a subclass normalises in a `forward` of its own.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(3))
        >>> sync_batchnorm(net)
        >>> type(net[0]).__name__, isinstance(net[0], nn.BatchNorm2d)
        ('SynchronisedBatchNorm2d', True)
        >>> restore_batchnorm(net)
        >>> type(net[0]).__name__
        'BatchNorm2d'
    """
    layers = _changeable(module)
    classes = {cls: _synchronised_class(cls) for cls in {type(layer) for layer in layers}}
    for layer in layers:
        untyped: Any = layer
        untyped.__class__ = classes[type(layer)]


def plain_layers(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a module that normalise over one process's batch and track statistics."""
    return [layer for layer in _changeable(module) if layer.running_mean is not None]


def is_synchronised(module: nn.Module) -> bool:
    """Whether a module has BatchNorm layers that normalise over all processes."""
    return any(isinstance(layer, (_Synchronised, nn.SyncBatchNorm)) for layer in module.modules())


def restore_batchnorm(module: nn.Module) -> None:
    """Gives the layers that `sync_batchnorm` changed their classes back."""
    for layer in module.modules():
        if isinstance(layer, _Synchronised):
            untyped: Any = layer
            untyped.__class__ = layer.original


def running_buffers(module: nn.Module) -> list[Tensor]:
    """Running statistics and counters of batch normalisation."""
    layers = (layer for layer in module.modules() if isinstance(layer, _BatchNorm))
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors by those of rank 0, with one broadcast for each data type."""
    for dtype in {tensor.dtype: None for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, 0)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))


def exempt_from_broadcast(ddp: DistributedDataParallel) -> None:
    """Keeps DDP from replacing running statistics with those of rank 0 before each forward pass."""
    layers = {id(buffer) for buffer in running_buffers(ddp.module)}
    names = {
        name: id(buffer) in layers
        for name, buffer in ddp.module.named_buffers()
        if name not in ddp.parameters_to_ignore
    }
    if all(names.values()):
        # One broadcast less at every step, and torch fails on an empty list of buffers.
        ddp.broadcast_buffers = False
    else:
        ddp.parameters_to_ignore |= {name for name, is_ours in names.items() if is_ours}


def _join_moments(sizes: Sequence[int], left: list[Tensor], right: list[Tensor]) -> None:
    """Add the moments of layers, one after the other in a flat tensor, to others."""
    for one, other in zip(left[0].split(list(sizes)), right[0].split(list(sizes)), strict=True):
        mean, variance, total = combine_moments(torch.stack((one, other)))
        one.copy_(torch.cat((mean, variance, total.view(1))))


@torch.no_grad()
def recalibrate(
    module: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[_BatchNorm] | None = None,
    forward: Callable[[Any], Any] | None = None,
    count: int | None = None,
) -> None:
    """Replaces the running statistics of batch normalisation layers by those of the given batches, in place.

    Weights that are averaged over a run have the statistics of none of its moments (Izmailov et al., 2018); and a
    running mean lags behind even the weights of now (Wu and Johnson, 2021). Here mean and variance are those of all
    values that reach a layer, over all batches and processes. The layers normalise as in training, by their batch; all
    else is in evaluation mode, so that no random number is drawn.

    Every process must call it, with as many batches where layers are synchronised. A layer that nothing reaches keeps
    its statistics. Modes, momenta and the counters of batches are afterwards as before.

    Args:
        batches: what `forward` is called with.
        layers: by default those in training mode: frozen ones are left alone.
        forward: by default the module.
        count: batches of all processes, of which each has a range, as `range_of_rank` says: the result is then equal to
            the bit on any number of processes. None where each has batches of its own.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1))
        >>> recalibrate(net, [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]]).expand(2, 1)])
        >>> net[0].running_mean, net[0].running_var
        (tensor([3.7500]), tensor([6.9167]))
    """
    found = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training] if layers is None else layers
    chosen = [layer for layer in found if layer.running_mean is not None]
    if not chosen:
        return
    several = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    first, stop = (0, math.inf) if count is None else range_of_rank(count, rank, world_size)
    sizes = [2 * layer.num_features + 1 for layer in chosen]
    nothing = torch.zeros(sum(sizes), dtype=torch.float64, device=running_statistics(chosen[0])[0].device)
    join = partial(_join_moments, sizes)
    places = dict(zip(chosen, itertools.pairwise(itertools.accumulate(sizes, initial=0))))
    of_batch = nothing

    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        start, end = places[cast("_BatchNorm", layer)]
        new = _local_moments(inputs[0], torch.promote_types(inputs[0].dtype, torch.float32))
        _join_moments([end - start], [of_batch[start:end]], [new])

    modes = [(m, m.training) for m in module.modules()]
    before = [(layer, layer.momentum, layer.num_batches_tracked) for layer in chosen]
    handles = [layer.register_forward_pre_hook(add) for layer in chosen]
    moments, number = TreeSum(count, join), int(first)
    try:
        module.eval()
        for layer in chosen:
            # A momentum of 0 keeps the statistics until the end.
            layer.training, layer.momentum = True, 0.0
            layer.num_batches_tracked = running_statistics(layer)[2].clone()
        for batch in batches:
            of_batch = nothing.clone()
            (forward or module)(batch)
            if number < stop:
                moments.add((number, number + 1), [of_batch])
                number += 1
    finally:
        for handle in handles:
            handle.remove()
        for layer, momentum, tracked in before:
            layer.momentum, layer.num_batches_tracked = momentum, tracked
        for m, training in modes:
            m.training = training
    if count is None:
        moments.end(number)
    own = [flat for _, (flat,) in moments.nodes]
    nodes = nodes_by_rank(world_size if count is None else count, world_size)
    whole = total_over_ranks(own or [nothing], nodes, nothing, join)()
    for layer, part in zip(chosen, whole.split(sizes), strict=True):
        mean, variance, total = combine_moments(part.unsqueeze(0))
        if total > 0:
            running_mean, running_var, _ = running_statistics(layer)
            running_mean.copy_(mean)
            running_var.copy_(variance * total / (total - 1).clamp(min=1))
