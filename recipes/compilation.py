"""torch.compile for the network of a recipe: in place, in training, with one graph for batches of every size."""

import functools
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from callbacks.lib.updates import accumulates
from datamodules.errors import RunFailedError, UserError, first_line

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""The modes of torch.compile."""

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs on a GPU, which write the gradients of each backward pass to the same place."""

_MOST_GRAPHS = 64
"""Training, validation and each set of frozen layers have a graph; torch's limit of 8 is for all networks together."""


def check_compile_mode(mode: bool | str) -> None:
    """Refuse what is no mode of torch.compile.

    Raises:
        UserError: with the modes.
    """
    if not isinstance(mode, bool) and mode not in get_args(CompileMode):
        raise UserError(f"compile={mode!r} is no mode of torch.compile; pass True, {', '.join(get_args(CompileMode))}")


def compile_network(
    network: nn.Module, mode: bool | str = True, varying_dims: int = 1, backend: str = "inductor"
) -> None:
    """Compile the calls of a network, in place: modules, parameters, names and hooks stay; copies are not compiled.

    Sizes that vary are symbols from the first batch on. torch's own way, a graph for the first size and a second one
    when another size comes, would give a resumed run other kernels than the run that it continues. Another graph is
    compiled for validation, when layers are unfrozen, and for a batch, or sentences, of length one.

    torch ends a graph at each recurrent layer, and runs the layer as it is. Noise is drawn as without compilation.

    Args:
        mode: of torch.compile; True is its default.
        varying_dims: how many of the first dimensions of the inputs may have another size in the next batch.
        backend: of torch.compile.
    """
    slot: Any = network

    # Not `network.compile`: of an nn.Sequential that of torch 2.13 compiles nothing, without a word.
    @functools.partial(torch.compile, mode=None if isinstance(mode, bool) else mode, backend=backend)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return slot._call_impl(*args, **kwargs)

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    # Without it Inductor draws other noise than the same network does eagerly.
    torch._inductor.config.fallback_random = True

    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, list(range(min(varying_dims, tensor.dim()))))
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.ShortenTraceback as error:  # Of the backend, or where there is no compiler.
            cause = first_line(getattr(error, "inner_exception", error))
            cure = "pass compile=False, or install a C++ compiler such as g++ where it is missing"
            raise RunFailedError(f"torch.compile fails on this network ({cause}); {cure}") from error

    # What `nn.Module.compile` fills. Sizes cannot be marked by a hook: hooks are a part of the graph.
    slot._compiled_call_impl = call


def restore_network(network: nn.Module) -> None:
    """Call a network as it is, not compiled."""
    slot: Any = network
    slot._compiled_call_impl = None


class CompileNetwork(pl.Callback):
    """Compiles the network of a recipe for a fit, where its ``compile`` says so.

    Runs on: `on_fit_start` and `on_train_start`; `on_fit_end` leaves the network as it was.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if mode := pl_module.hparams.compile:
            compile_network(pl_module.network, mode, pl_module.varying_dims)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        mode, on_gpu = pl_module.hparams.compile, trainer.strategy.root_device.type == "cuda"
        if mode in _CUDA_GRAPHS and on_gpu and accumulates(trainer):
            raise UserError(f"compile={mode!r} cannot accumulate micro-batches: pass compile=True, or accumulate=1")

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.hparams.compile:
            restore_network(pl_module.network)
