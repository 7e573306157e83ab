"""What a training step costs, layer by layer: floating-point operations, and the memory of activations.

The step runs on a copy of the module whose weights are fake tensors, which have shapes and no memory. So nothing is
computed but what depends on the batch alone, such as the lengths of its sentences.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric
from typing_extensions import override

from callbacks.lib.generators import untouched_generators
from callbacks.lib.lightning_internals import attached_trainer, set_trainer
from callbacks.lib.sample_noise import repeat_noise
from datamodules.errors import UserError

__all__ = ["LayerCost", "StepCost", "step_cost", "storage_bytes"]


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs in one training step, with the layers in it.

    Args:
        name: as in `named_modules`.
        kind: its class.
        output: shape of its last output, or of the first tensor of several; None where there is none.
        parameters: number of its parameters.
        forward_flops: floating-point operations; a multiply-add counts as two.
        activation_bytes: what is kept for the backward pass, without parameters.
    """

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int


@dataclass(frozen=True)
class StepCost:
    """What one training step of one micro-batch costs.

    Args:
        layers: in the order of `named_modules`, without the module itself.
    """

    layers: list[LayerCost]
    forward_flops: int
    backward_flops: int
    activation_bytes: int


class _Step(nn.Module):
    """The training step as a call of a module, from which torch's tracker names all layers."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)


def storage_bytes(tensors: Any) -> int:
    """Bytes of the memory behind tensors; what several share counts once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of `log`."""


def _zero(*args: Any, **kwargs: Any) -> Tensor:
    """Takes the place of a metric, which reads numbers off its inputs."""
    return torch.zeros(())


def _fake_copy(module: pl.LightningModule) -> pl.LightningModule:
    """A copy of a module with the same layers and Trainer, fake weights, and without its logs."""
    trainer = attached_trainer(module)
    set_trainer(module, None)
    try:
        with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
            copied = copy.deepcopy(module)
    finally:
        set_trainer(module, trainer)
    set_trainer(copied, trainer)
    # A function that was put before the module's own would call the original.
    vars(copied).pop("training_step", None)
    untyped: Any = copied
    untyped.log = untyped.log_dict = _do_nothing
    for layer in copied.modules():
        if isinstance(layer, Metric):
            vars(layer).update(forward=_zero, compute=_zero, update=_do_nothing)
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and torch.distributed.is_initialized():
            layer.eval()  # Else it would average over the ranks.
    return copied


def step_cost(
    module: pl.LightningModule, batch: Any, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> StepCost:
    """Run the training step and its backward pass without memory and arithmetic, and count.

    The module, its gradients, metrics and logs, and all random numbers stay as they are.

    Args:
        batch: on the module's device.
        context: what the step runs in, such as autocast.

    Raises:
        UserError: the module makes its own updates, which would be those of the run's optimisers.
        Exception: of the step, which may read a number off its output, which fake tensors do not have.

    Example:
        >>> class Module(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(10, 3)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).sum()
        >>> cost = step_cost(Module(), torch.zeros(4, 10))
        >>> cost.forward_flops, cost.backward_flops, cost.layers[0].output
        (240, 240, (4, 3))
    """
    if not module.automatic_optimization:
        raise UserError("a step with manual optimisation cannot be tried: it steps the run's own optimisers")
    try:
        with untouched_generators(), torch.compiler.set_stance("force_eager"):
            return _count(module, batch, context)
    finally:
        repeat_noise()  # The step that is to come calls the layers of stateless dropout for the first time.


def _count(module: pl.LightningModule, batch: Any, context: Callable[[], AbstractContextManager[Any]]) -> StepCost:
    counter = FlopCounterMode(display=False)
    outputs: dict[str, tuple[int, ...]] = {}
    kept: dict[int, Any] = {}
    activations: dict[str, int] = {}
    step = _Step(_fake_copy(module))
    layers = {name: layer for name, layer in step.module.named_modules() if name}
    for name, layer in layers.items():

        def note(layer: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            first = next(iter(output), None) if isinstance(output, (tuple, list)) else output
            if isinstance(first, Tensor):
                outputs[name] = tuple(first.shape)

        layer.register_forward_hook(note)
    weights = {tensor.untyped_storage()._cdata for tensor in (*step.parameters(), *step.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept and storage._cdata not in weights:
            kept[storage._cdata] = storage
            for name in counter.mod_tracker.parents:
                activations[name] = activations.get(name, 0) + storage.nbytes()
        return tensor

    with counter, context(), torch.enable_grad():
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        forward = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
        trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
    total = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}

    def cost(name: str, layer: nn.Module) -> LayerCost:
        key = f"{_Step.__name__}.module.{name}"
        first = forward.get(key, 0)
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        return LayerCost(
            name,
            type(layer).__name__,
            outputs.get(name),
            parameters,
            first,
            total.get(key, 0) - first,
            activations.get(key, 0),
        )

    first = forward.get("Global", 0)
    costs = [cost(name, layer) for name, layer in layers.items()]
    return StepCost(costs, first, total.get("Global", 0) - first, activations.get("Global", 0))
