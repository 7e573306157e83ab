"""Too little memory for tests: planted errors, and limits that the kernel enforces.

A planted error is raised at one phase of a step, wherever a batch of more samples than fit gets there. The limits are
for processes of their own, such as those of `run_ranks`.
"""

import contextlib
import os
import resource
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["PHASES", "OutOfMemoryPlant", "Phase", "data_limit", "memory_cgroup", "planted_out_of_memory"]

Phase = Literal["forward", "backward", "optimizer", "midway", "validation"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "midway", "validation")
"""Where a step runs out of memory. The optimiser: before it has changed anything, and after its first parameter."""


@contextlib.contextmanager
def planted_out_of_memory(
    module: nn.Module, phase: Phase, fits: int = 0, active: Callable[[], bool] = lambda: True
) -> Iterator[list[int]]:
    """A network that runs out of memory at one phase, with any batch of more than ``fits`` samples.

    The backward pass fails in the first layer, thus last: gradients of all others are there, and other ranks have begun
    to reduce theirs. Copies of the module fail, too. Validation is what runs in evaluation mode.

    Args:
        active: whether it may fail at present.

    Yields:
        The batch sizes at which it has failed.
    """
    layer = next(layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False)))
    parameters = {tuple(parameter.shape) for parameter in module.parameters()}
    failed: list[int] = []
    largest, stepped = 0, False  # Of an update, whose step may be made again.

    def fail(size: int) -> None:
        failed.append(size)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Planted at {phase} of {size} samples.")

    def before(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal largest, stepped
        size = len(inputs[0])
        if not torch.is_grad_enabled() or not layer.training:
            if phase == "validation" and size > fits and active():
                fail(size)
            return
        largest, stepped = max(0 if stepped else largest, size), False
        if phase == "forward" and size > fits and active():
            fail(size)

    def after(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        size, first = len(inputs[0]), output if isinstance(output, Tensor) else output[0]
        if phase == "backward" and first.requires_grad and size > fits and active():
            first.register_hook(lambda _: fail(size))

    def at_step(own: list[nn.Parameter]) -> None:
        nonlocal stepped
        size, stepped = largest, True
        if size <= fits or not active() or any(tuple(parameter.shape) not in parameters for parameter in own):
            return
        if phase == "midway":
            with torch.no_grad():
                own[0].add_(1.0)
        if phase in ("optimizer", "midway"):
            fail(size)

    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            at_step(own)
            return None

        def failing_closure() -> Any:
            # Lightning runs forward and backward in here.
            loss = closure()
            at_step(own)
            return loss

        return args[:1], {**kwargs, "closure": failing_closure}

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    handles.append(register_optimizer_step_pre_hook(before_step))
    try:
        yield failed
    finally:
        for handle in handles:
            handle.remove()


class OutOfMemoryPlant(pl.Callback):
    """`planted_out_of_memory` as a callback, for one rank or several and chosen updates.

    Args:
        phase: where a step fails.
        fits: samples that fit on each rank, or by rank; on a rank that is not named all fit.
        updates: those in which it fails, by ``trainer.global_step``; None for all.
        times: how often it fails at most.
    """

    def __init__(
        self,
        phase: Phase,
        fits: int | Mapping[int, int] = 0,
        updates: Container[int] | None = None,
        times: int | None = None,
    ) -> None:
        self.phase, self.fits, self.updates, self.times = phase, fits, updates, times
        self.failed: list[int] = []
        """The batch sizes at which this rank has failed."""
        self._open = contextlib.ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        fits = self.fits if isinstance(self.fits, int) else self.fits.get(trainer.global_rank)
        if fits is None:
            return

        def active() -> bool:
            chosen = self.updates is None or trainer.global_step in self.updates
            return chosen and (self.times is None or len(self.failed) < self.times)

        self.failed = self._open.enter_context(planted_out_of_memory(pl_module, self.phase, fits, active))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._open.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._open.close()


@contextlib.contextmanager
def data_limit(more: int) -> Iterator[None]:
    """Let this process allocate so many bytes more than now (RLIMIT_DATA); torch raises a RuntimeError beyond them."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _memory_controller() -> tuple[Path, str]:
    """The folder of this process's memory cgroup, and the file of its limit: of version 1 or 2."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {names: path.strip("/") for _, names, path in lines}
    root = Path("/sys/fs/cgroup")
    if "memory" in paths:
        return root / "memory" / paths["memory"], "memory.limit_in_bytes"
    return root / paths.get("", ""), "memory.max"


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[list[str]]:
    """A cgroup of that many bytes, beyond which the kernel kills its processes; skips a test where none may be made.

    Yields:
        The start of a command line that runs the rest of it in there.
    """
    parent, name = _memory_controller()
    folder = parent / f"lightning-recipes-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here ({error})")
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        folder.rmdir()
