"""The whole step of a small network as one CUDA graph: forward, backward, clipping and the optimiser's update.

A small network's step takes less time on a GPU than Python needs to launch its kernels. A CUDA graph launches all of
them at once, from and into the same memory: so each batch, the keys of its noise and the learning rates are copied into
tensors that stay, and the results are copied out of others ("Whole-network capture" in PyTorch's notes on CUDA).

**No line of `GraphedStep` has run on a GPU yet.** The path of the data around it is the same with `DirectStep`, which
calls the step in place of replaying it, and is tested on the CPU: it gives the weights of an ordinary run to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.lightning_internals import finish_closure
from callbacks.lib.sample_noise import begin_noise, noise_keys
from callbacks.lib.trainer_attributes import callbacks_of
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError

__all__ = ["DirectStep", "GraphedStep", "StepCapture", "check_capture", "runner_for"]

_WARM_UP = 3
"""Steps on a side stream before the capture, as many as torch's notes make."""

_WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""The hooks within a step, whose Python a graph does not repeat."""

_IDLE_WITHIN: tuple[type[pl.Callback], ...] = (SeedControl, GradientAccumulation)
"""Those whose hooks there have nothing to do where each update has one micro-batch and one backward pass."""

Function = Callable[[], Any]
Runner = Callable[[Function], Function]
"""Makes of a step on static tensors what runs it again and again, and returns its outputs."""


class DirectStep:
    """Calls the step each time: the data path of `GraphedStep` on any device."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self) -> Any:
        return self._function()


class GraphedStep:
    """Runs the step three times on a side stream, then captures it, and replays it. It has not run on a GPU yet."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self) -> Any:
        if self._done < _WARM_UP:
            self._done += 1
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self._function()
            torch.cuda.current_stream().wait_stream(stream)
            return outputs
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = self._function()
        self._graph.replay()
        return self._outputs


def runner_for(device: torch.device) -> Runner:
    """What replays steps on a device.

    Raises:
        UserError: it is no CUDA device.
    """
    if device.type != "cuda":
        raise UserError(f"cuda_graph=True needs a CUDA device, and this run is on {device.type}; pass cuda_graph=False")
    return GraphedStep


def check_capture(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Refuse a run whose step cannot be captured; from `on_train_start` on.

    Raises:
        UserError: with the reason.
    """
    clear = "; pass cuda_graph=False"
    if trainer.world_size > 1:
        raise UserError(f"cuda_graph=True captures the step of one device, and there are {trainer.world_size}{clear}")
    if trainer.accumulate_grad_batches > 1:
        raise UserError("cuda_graph=True captures updates of one micro-batch; pass steps=1 or cuda_graph=False")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UserError(
            "cuda_graph=True cannot capture the loss scaling of float16, which reads numbers from the device; pass"
            ' precision="bf16-mixed"'
        )
    if len(trainer.optimizers) != 1 or not type(trainer.optimizers[0]).__module__.startswith("torch.optim."):
        raise UserError(f"cuda_graph=True captures one optimizer of torch's whose step needs no loss{clear}")
    for owner in (pl_module, *callbacks_of(trainer)):
        base: Any = pl.LightningModule if owner is pl_module else pl.Callback
        hooks = [name for name in _WITHIN if _does_something(owner, name, base)]
        if hooks and not isinstance(owner, _IDLE_WITHIN):
            name = type(owner).__name__
            cure = "pass training_monitor=False" if name == "TrainingMonitor" else "leave it out"
            raise UserError(f"cuda_graph=True would not call {hooks[0]} of {name} within the captured step; {cure}")
    if is_overridden("optimizer_zero_grad", pl_module) or is_overridden("backward", pl_module):
        raise UserError(f"cuda_graph=True does not call optimizer_zero_grad and backward of the module{clear}")


def _does_something(owner: Any, name: str, base: type) -> bool:
    hook = getattr(owner, name)
    return callable(hook) and getattr(hook, "__func__", hook) is not getattr(base, name)


class _Kind(NamedTuple):
    """What has to be the same for a step to be run on the same static tensors."""

    structure: Any
    leaves: tuple[Any, ...]
    trains: tuple[bool, ...]


class StepCapture:
    """Runs the steps of a module on static tensors.

    A step is the Trainer's: `training_step`, backward, clipping, the optimiser with its hooks, which run before and
    after it as Python. Static tensors are made for a size of batch that comes twice in succession; another batch, such
    as the last of an epoch, takes Lightning's way. Where layers begin to train, the step is captured again. Of the
    optimiser's settings only the learning rate may change afterwards; the others are numbers within the captured step.

    Args:
        runner: what runs or replays the step.
    """

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: Runner) -> None:
        self._trainer, self._module, self._runner = trainer, pl_module, runner
        self._parameters = list(pl_module.parameters())
        self._kind: _Kind | None = None
        self._last: _Kind | None = None
        self._static: list[Tensor] = []
        self._rates: list[Tensor] = []
        self._run: Function | None = None
        self.replayed = 0
        """Steps that were run on static tensors."""

    def step(self, batch: Any, batch_idx: int, optimizer: Optimizer | LightningOptimizer, closure: Any) -> None:
        """Make an update, in place of ``optimizer.step(closure=closure)``."""
        plain: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        leaves, structure = tree_flatten((batch, noise_keys()))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shown = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        kind = _Kind(structure, shown, tuple(parameter.requires_grad for parameter in self._parameters))
        before, self._last = self._last, kind
        if kind != self._kind and kind == before:
            self._prepare(kind, leaves, batch_idx, plain)
        if kind != self._kind or self._run is None:
            optimizer.step(closure=closure)
            return
        for static, tensor in zip(self._static, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        _call_hooks(plain, "pre")
        for rate, group in zip(self._rates, plain.param_groups, strict=True):
            rate.fill_(group["lr"])
        outputs = self._run()
        _call_hooks(plain, "post")
        self.replayed += 1
        # The next step writes into the same tensors.
        finish_closure(self._trainer, closure, tree_map_only(Tensor, torch.clone, outputs))

    def _prepare(self, kind: _Kind, leaves: Sequence[Any], batch_idx: int, optimizer: Optimizer) -> None:
        """Make static tensors for batches of this kind, and the step on them."""
        statics = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batch, keys = tree_unflatten(statics, kind.structure)
        device = self._module.device
        # A CUDA kernel reads a rate of float32; on the CPU float64 gives the bits of Python's number.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._static = [leaf for leaf in statics if isinstance(leaf, Tensor)]
        if device.type == "cuda":
            _move_step_counts(optimizer)
        self._kind = kind
        self._run = self._runner(lambda: self._whole_step(batch, keys, batch_idx, optimizer))

    def _whole_step(self, batch: Any, keys: Tensor | None, batch_idx: int, optimizer: Optimizer) -> Any:
        """What is captured; it gets everything from static tensors, and leaves its outputs in others."""
        trainer, module = self._trainer, self._module
        outputs: Any
        if keys is not None:
            begin_noise(keys)
        with trainer.precision_plugin.train_step_context():
            outputs = module.training_step(batch, batch_idx)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        # Gradients that are not there yet are written by the backward pass; others would be added to.
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        module.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        # Only within the step: a checkpoint holds the settings of an ordinary run, which resumes on any device.
        kept = ("lr", "capturable")
        own: list[dict[str, Any]] = [{k: group[k] for k in kept if k in group} for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group and rate.is_cuda:
                group["capturable"] = True
        try:
            # Without its hooks, which are called around the step.
            step: Any = type(optimizer).step
            getattr(step, "__wrapped__", step)(optimizer)
        finally:
            for group, settings in zip(optimizer.param_groups, own, strict=True):
                group.update(settings)
        return tree_map_only(Tensor, torch.detach, outputs)


def _call_hooks(optimizer: Optimizer, when: str) -> None:
    """Call the hooks that ``optimizer.step()`` calls; torch has no public way to them."""
    hooks: dict[int, Any] = getattr(optimizer, f"_optimizer_step_{when}_hooks")
    for hook in list(hooks.values()):
        hook(optimizer, (), {})


def _move_step_counts(optimizer: Optimizer) -> None:
    """Keep the optimiser's counts of steps on the device, as a graph needs them."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)
