"""Compilation of a recipe's network with torch.compile: in place, in training, for batches of every size."""

import functools
import shlex
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from callbacks.lib.updates import accumulates
from datamodules.errors import RunFailedError, UserError, first_line, spelled
from datamodules.lightning import pl

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""The modes of torch.compile."""

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs on a GPU. A graph writes the gradients of each backward pass to the same memory."""

_MAX_GRAPHS = 64
"""Training, validation and each set of frozen layers need a graph; torch's limit of 8 is for all networks together."""


def check_compile_mode(mode: bool | str) -> None:
    """Reject a mode that torch.compile does not have.

    Raises:
        UserError: the mode is unknown.
    """
    if not isinstance(mode, bool) and mode not in get_args(CompileMode):
        modes = ", ".join(get_args(CompileMode))
        raise UserError(f"{spelled('compile', mode)} is no mode of torch.compile; pass True, {modes}")


def compile_network(
    network: nn.Module, mode: bool | str = True, varying_dims: int = 1, backend: str = "inductor"
) -> None:
    """Compile the calls of a network in place: modules, parameters, names and hooks are unchanged.

    Varying dimensions are dynamic shapes from the first batch. By default, torch compiles a graph for the first size
    and a dynamic graph at the second size, so a resumed run would have other kernels than the original run. More graphs
    are compiled for validation, after layers are unfrozen, and for a batch or sentences of length one.

    torch ends a graph at each recurrent layer, and runs the layer uncompiled. Random numbers are the same as in eager
    mode. Copies of the network are not compiled.

    Args:
        network: the network to compile.
        mode: the mode of torch.compile; True is its default mode.
        varying_dims: number of leading dimensions of the inputs whose size varies between batches.
        backend: the backend of torch.compile.
    """
    slot: Any = network

    # Not `network.compile`: for an nn.Sequential, torch 2.13 silently compiles nothing.
    @functools.partial(torch.compile, mode=None if isinstance(mode, bool) else mode, backend=backend)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return slot._call_impl(*args, **kwargs)

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    # Otherwise Inductor draws other random numbers than eager mode does.
    torch._inductor.config.fallback_random = True

    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, list(range(min(varying_dims, tensor.dim()))))
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.ShortenTraceback as error:  # The backend failed, or there is no C++ compiler.
            cause = first_line(getattr(error, "inner_exception", error))
            hint = f"pass {spelled('compile', False)}, or install a C++ compiler such as g++ if it is missing"
            if isinstance(getattr(error, "inner_exception", None), OSError) and ".so" in cause:
                # Such as "file too short": a process was killed, or the disk was full, while the library was written.
                from torch._inductor.runtime.cache_dir_utils import cache_dir

                hint = f"a library in torch's cache is damaged: type rm -r {shlex.quote(cache_dir())}"
            raise RunFailedError(f"torch.compile fails on this network ({cause}); {hint}") from error

    # `nn.Module.compile` sets this attribute too. A hook could not mark sizes: hooks are part of the graph.
    slot._compiled_call_impl = call


def restore_network(network: nn.Module) -> None:
    """Undo `compile_network`."""
    slot: Any = network
    slot._compiled_call_impl = None


class CompileNetwork(pl.Callback):
    """Callback that compiles the network of a recipe for a fit, if its ``compile`` is set.

    Runs on: `on_fit_start` and `on_train_start`; `on_fit_end` undoes the compilation.
    """

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        mode = pl_module.hparams.compile
        if mode:
            compile_network(pl_module.network, mode, pl_module.varying_dims)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        mode = pl_module.hparams.compile
        on_gpu = trainer.strategy.root_device.type == "cuda"
        # The next backward pass of a CUDA graph overwrites the gradients of the previous pass.
        if mode in _CUDA_GRAPHS and on_gpu and accumulates(trainer):
            raise UserError(
                f"{spelled('compile', mode)} cannot accumulate micro-batches: pass {spelled('compile', True)}, or"
                f" {spelled('accumulate', 1)}"
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.hparams.compile:
            restore_network(pl_module.network)
