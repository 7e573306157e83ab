"""Synchronized BatchNorm over all ranks of a run, on any kind of device.

`Trainer(sync_batchnorm=True)` raises an error on CPUs and, after the fit, loses the class of each layer and whether it
was frozen. Without it each rank normalizes alone, and checkpoints hold the statistics of rank 0.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.batch_norm import (
    combine_moments,
    exempt_from_broadcast,
    local_moments,
    own_batch_layers,
    running_statistics,
)
from callbacks.lib.lightning_internals import OneLightningCallback, converts_batchnorm
from callbacks.update_loop import install_update_loop
from datamodules.errors import UserError, spelled
from datamodules.lightning import pl
from datamodules.loading.randomness import widest_float


class _SynchronizedFunction(torch.autograd.Function):
    """Batch normalization over all processes, with one all-gather in the forward and one all-reduce in the backward.

    The gradients of weight and bias are local to this process, since DDP averages them.
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
        moments = local_moments(x, dtype)
        moments_by_rank = [torch.empty_like(moments) for _ in range(dist.get_world_size())]
        dist.all_gather(moments_by_rank, moments)
        mean, variance, total = combine_moments(torch.stack(moments_by_rank))
        if total == 1:
            raise ValueError(
                "batch normalization found 1 value per channel on all processes, expected 2 or more: "
                "pass another batch size"
            )
        if running is not None and total > 0:
            # Through `data`, which raises no version counter, as torch's kernel does not: the layer may have used these
            # buffers in evaluation mode within the same loss, and autograd would reject a change.
            running[0].data.lerp_(mean.to(running[0].dtype), momentum)
            running[1].data.lerp_((variance * (total / (total - 1))).to(running[1].dtype), momentum)
        mean = mean.to(dtype)
        variance = variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        ctx.total = max(total.item(), 1)
        if x.numel() == 0:
            return torch.empty_like(x)
        if weight is not None:
            weight = weight.to(dtype)
        if bias is not None:
            bias = bias.to(dtype)
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        settings = ctx.needs_input_grad, ctx.eps, ctx.total
        return *_SynchronizedGradient.apply(grad_output, *ctx.saved_tensors, *settings), None, None, None


class _SynchronizedGradient(torch.autograd.Function):
    """Gradients of `_SynchronizedFunction`; a second derivative raises an error."""

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
        sums = torch.zeros(2, len(mean), dtype=widest_float(x.device), device=x.device)
        if x.numel() > 0:
            # In evaluation mode the kernel yields sum(dy * x_hat) and sum(dy), in one pass over x and dy.
            _, by_x_hat, plain = torch.ops.aten.native_batch_norm_backward(
                grad_output, x, None, mean, variance, None, None, False, eps, [False, True, True]
            )
            sums = torch.stack([by_x_hat, plain]).to(sums.dtype)
        grad_weight = sums[0].to(weight.dtype) if weight is not None and needed[1] else None
        grad_bias = sums[1].to(weight.dtype) if weight is not None and needed[2] else None
        if needed[0]:
            # A process without samples adds zeros, since the others wait for it in the all-reduce.
            sums = sums.clone()
            dist.all_reduce(sums)
            scale = (variance + eps).rsqrt()
            scale = scale if weight is None else scale * weight.to(scale.dtype)
            slope, shift = (-scale * sums / total).to(scale.dtype)
            grad_input = torch.empty_like(x)
            if x.numel() > 0:
                # dx = scale * (dy - mean(dy) - x_hat * mean(dy * x_hat)), in two calls of a kernel that is fast and
                # accurate also for half-precision activations, where plain products are 5 times slower.
                projection = F.batch_norm(x, mean, variance, slope, shift, eps=eps)
                unit = torch.ones_like(mean)
                # torch.batch_norm: the function in nn.functional of torch 2.11 rejects an eps of 0.
                scaled = torch.batch_norm(grad_output, scale, None, unit - 1, unit, False, 0.0, 0.0, False)
                grad_input = scaled.add_(projection)
        return grad_input, grad_weight, grad_bias

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:  # noqa: ARG004
        raise UserError(
            "SyncBN has no second derivative, which a gradient penalty (create_graph=True) asks for: remove SyncBN, put"
            " the layers into evaluation mode for the penalty, or normalize with nn.GroupNorm"
        )


class _Synchronized(_BatchNorm):
    """Mixin of the layer classes that `sync_batchnorm` makes."""

    original: ClassVar[type[_BatchNorm]]
    process_group: ClassVar[None] = None  # Read by torch's `forward`: None is the default group.
    is_dummy = False
    """Whether the micro-batch does not count; see `stand_in`."""
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @override
    # A collective inside an autograd function; the layers around it compile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        if self.is_dummy:
            # An empty batch takes part in the collective calls. The product with 0 connects its output to the loss, so
            # that the backward pass takes part as well.
            return input + self._normalize(input[:0]).sum() * 0
        return self._normalize(input)

    def _normalize(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            # torch's layer sends the statistics of an empty half-precision batch in half, but other ranks send float32.
            is_empty = input.numel() == 0 and input.dtype != torch.float64
            values = input.float() if is_empty else input
            torch_forward: Callable[[Any, Tensor], Tensor] = nn.SyncBatchNorm.forward
            return torch_forward(self, values).to(input.dtype)
        check: Callable[[Tensor], None] = self._check_input_dim
        check(input)
        momentum = self.momentum
        running = None
        if self.track_running_stats and self.running_mean is not None:
            mean, variance, batches = running_statistics(self)
            batches.add_(1)
            momentum = 1.0 / batches.item() if momentum is None else momentum
            running = (mean, variance)
        apply: Callable[..., Tensor] = _SynchronizedFunction.apply
        return apply(input, self.weight, self.bias, running, momentum, self.eps)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy becomes a plain layer: a moving average of the weights or a pickled model has no ranks to wait for.
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (self.original,), *reduced[2:]


def _normalize_drop_activate(layer: Any, inputs: Tensor) -> Tensor:
    """Run the forward pass of timm's BatchNormAct2d, whose own copies BatchNorm2d's code instead of calling it."""
    outputs: Tensor = layer.act(layer.drop(_Synchronized.forward(layer, inputs)))
    return outputs


def _synchronized_class(cls: type[_BatchNorm]) -> type[_BatchNorm]:
    attributes: dict[str, Any] = {"original": cls}
    forward = cls.forward
    if (forward.__module__, forward.__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d.forward"):
        attributes["forward"] = _normalize_drop_activate
    elif forward is not _BatchNorm.forward and "__class__" not in forward.__code__.co_freevars:
        raise UserError(
            f"{cls.__name__}.forward normalizes by itself, so SyncBN cannot synchronize it: let it call"
            " super().forward(input), use torch's class, or remove SyncBN"
        )
    # Ours comes behind the user's class and before _BatchNorm, where forward() and super().forward() end.
    return type(f"Synchronized{cls.__name__}", (cls, _Synchronized), attributes)


def check_batchnorm(module: nn.Module) -> None:
    """Reject layers that `sync_batchnorm` cannot change.

    Raises:
        UserError: a subclass overrides `forward`.
    """
    for layer in own_batch_layers(module):
        _synchronized_class(type(layer))


def sync_batchnorm(module: nn.Module) -> None:
    """Make every batch normalization layer of a module normalize over all processes, in place.

    `restore_batchnorm` undoes it. CUDA and other accelerators run torch's kernels, the CPU ours. Batch sizes may differ
    between processes and be zero on some. Layers in evaluation mode keep using their running statistics. Each process
    must call the layers in the same order. timm's BatchNormAct2d, which includes an activation, is also changed.

    Raises:
        UserError: a subclass overrides `forward`.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(3))
        >>> sync_batchnorm(net)
        >>> type(net[0]).__name__, isinstance(net[0], nn.BatchNorm2d)
        ('SynchronizedBatchNorm2d', True)
        >>> restore_batchnorm(net)
        >>> type(net[0]).__name__
        'BatchNorm2d'
    """
    layers = own_batch_layers(module)
    classes = {cls: _synchronized_class(cls) for cls in {type(layer) for layer in layers}}
    for layer in layers:
        untyped: Any = layer
        untyped.__class__ = classes[type(layer)]


def restore_batchnorm(module: nn.Module) -> None:
    """Restore the classes of the layers that `sync_batchnorm` changed."""
    for layer in module.modules():
        if isinstance(layer, _Synchronized):
            untyped: Any = layer
            untyped.__class__ = layer.original


class SyncBN(OneLightningCallback):
    """Callback that normalizes over the samples of all processes, so splitting a batch over devices changes nothing.

    Every BatchNorm1d, 2d and 3d, and timm's BatchNormAct2d, computes mean and variance over the samples of all ranks:
    torch's SyncBatchNorm on accelerators, our own on CPUs. Ranks may hold different numbers of samples, and none.
    Frozen layers (in evaluation mode) stay frozen. State-dict keys do not change, and after the fit, or an exception in
    it, each layer has its class back. Alone on one process it does nothing.

    Runs on: `on_fit_start`, after ``configure_model``, loading and DDP, and `on_train_batch_start`; undone in
    `teardown` and `on_exception`.

    Raises:
        UserError: the strategy splits layers, the Trainer has ``sync_batchnorm=True``, or a subclass of BatchNorm
            overrides `forward`.

    Example:
        >>> trainer = pl.Trainer(callbacks=[SyncBN()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        self._ddp: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if converts_batchnorm(trainer):
            raise UserError(
                "SyncBN synchronizes BatchNorm itself: leave Trainer(sync_batchnorm=True) out, or remove SyncBN"
            )
        if stage == "fit" and trainer.world_size > 1:
            # The update loop adds stand-ins, so that each rank calls the layers equally often.
            install_update_loop(trainer)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1:
            return
        if not isinstance(trainer.strategy.model, DistributedDataParallel):
            raise UserError(
                f"{type(trainer.strategy).__name__} splits the layers that SyncBN would replace: pass"
                f" {spelled('strategy', 'ddp')}, or remove SyncBN"
            )
        sync_batchnorm(pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Checked in each update: a callback that unfreezes layers may have wrapped the module in a new DDP.
        if trainer.strategy.model is not self._ddp:
            self._ddp = trainer.strategy.model
            if isinstance(self._ddp, DistributedDataParallel):
                exempt_from_broadcast(self._ddp)

    def _release(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        restore_batchnorm(pl_module)
        self._ddp = None

    on_exception = teardown = _release
