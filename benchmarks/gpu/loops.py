"""A training step on a GPU, by hand and by a recipe, from float32 as PyTorch has it to a CUDA graph.

Steps by hand are timed by CUDA events, so that launching them ahead costs nothing and is not counted twice. How much of
the GPU's peak the arithmetic reaches is the model FLOP utilisation (Chowdhery et al., 2022, PaLM).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from benchmarks.harness.bare_trainer import bare_trainer
from benchmarks.harness.terminal import interruptible
from callbacks import (
    FiniteWeights,
    GradientAccumulation,
    LeanLoop,
    Preemption,
    RankConsistency,
    SeedControl,
    TrainingMonitor,
    TrainLoss,
    WarmupLR,
)
from recipes.optim import build_optimizer
from recipes.parameter_groups import parameter_groups
from recipes.recipe import Recipe

__all__ = [
    "PEAK_TFLOPS",
    "SETTLING",
    "Clock",
    "Way",
    "Workload",
    "flops_of_step",
    "image_loss",
    "peak_tflops",
    "recipe_seconds",
    "seconds_a_step",
]

PEAK_TFLOPS = {
    "B200": 2250, "GH200": 990, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A40": 150,
    "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 155, "RTX 4090": 165,
    "RTX 3090": 71, "V100": 125, "T4": 65,
}  # fmt: skip
"""Dense bf16 or fp16 with float32 sums, in 10^12 operations a second, from NVIDIA's data sheets."""

SETTLING = 5
"""Steps before the clock starts: the first choose kernels, allocate memory and, where asked to, compile."""


@dataclass(frozen=True)
class Way:
    """How a step is computed.

    Args:
        precision: Lightning's name; for float32 TF32 stays as PyTorch has it.
        resident: the batch lies on the device; otherwise each step copies it from pinned memory.
        graph: the whole step is captured once as a CUDA graph, and replayed.
    """

    precision: str = "32-true"
    resident: bool = True
    channels_last: bool = True
    fused: bool = True
    compiled: bool = False
    graph: bool = False

    @property
    def layout(self) -> torch.memory_format:
        """Of the weights and the images."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


def image_loss(forward: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of images of shape (batch, channels, height, width)."""
    return F.cross_entropy(forward(batch[0]), batch[1])


@dataclass(frozen=True)
class Workload:
    """What is trained, on the same batch again and again.

    Args:
        what: network and batch, in words.
        build: a new recipe, with the settings given to it.
        batch: on the CPU.
        units: how many images or tokens it has.
        unit: which of the two.
        flops: of a step, forward and backward.
        loss: of what the network computes; its arguments are the network, or its compiled form, and the batch.
        move: copies the batch to a device without waiting for it.
    """

    what: str
    build: Callable[..., Recipe]
    batch: Any
    units: int
    unit: str
    flops: int
    loss: Callable[[Callable[..., Tensor], Any], Tensor] = image_loss
    move: Callable[[Any, torch.device], Any] = move_data_to_device


def peak_tflops(name: str) -> float | None:
    """The peak of a GPU by the name that its driver gives; None for one that is not in the table.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA L40S"), peak_tflops("Some GPU")
        (989, 362, None)
    """
    known = (part for part in sorted(PEAK_TFLOPS, key=len, reverse=True) if part in name)
    return next((PEAK_TFLOPS[part] for part in known), None)


def flops_of_step(loss: Callable[[], Tensor]) -> int:
    """Multiplications and additions of a forward and a backward pass; those of convolutions and products.

    Count on a CPU: cuDNN's recurrent layers are one operation that is not counted.
    """
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    return int(counter.get_total_flops())


def _pinned(batch: Any) -> Any:
    return apply_to_collection(batch, Tensor, Tensor.pin_memory)


def _timed(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds of a step, after those that do not count."""
    for _ in range(SETTLING):
        step()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / steps


def _captured(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The step as a CUDA graph, which repeats its launches; on a CPU the step itself."""
    if device.type != "cuda":
        return step
    # As torch's notes on CUDA graphs have it: warmed up on another stream, so that what is lazy is done.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_a_step(way: Way, workload: Workload, steps: int, device: torch.device) -> float:
    """Seconds of a step of a plain PyTorch loop."""
    torch.manual_seed(1)
    network: Any = workload.build().network
    network = network.to(device).to(memory_format=way.layout)
    capturable = {"capturable": True} if way.graph and device.type == "cuda" else {}
    optimizer = build_optimizer("adamw", parameter_groups(network, 0.01), 1e-3, fused=way.fused, arguments=capturable)
    forward: Callable[..., Tensor] = torch.compile(network) if way.compiled else network
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(way.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    batch = workload.batch if device.type == "cpu" else _pinned(workload.batch)
    if way.resident:
        batch = _in_layout(workload.move(batch, device), way.layout)

    def step() -> None:
        inputs = batch if way.resident else _in_layout(workload.move(batch, device), way.layout)
        # A cache of casts would keep tensors of the capture.
        cast = torch.autocast(device.type, dtype, cache_enabled=not way.graph) if dtype else nullcontext()
        with cast:
            loss = workload.loss(forward, inputs)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return _timed(_captured(step, device) if way.graph else step, steps, device)


def _in_layout(batch: Any, layout: torch.memory_format) -> Any:
    """A batch whose images are in a layout."""
    first = batch[0]
    return (first.contiguous(memory_format=layout), *batch[1:]) if first.dim() == 4 else batch


class _Again:
    """The same batch again and again, as a loader that Lightning leaves alone."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count
        self.batch_size = len(batch[0])

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.count))


class Clock(pl.Callback):
    """Seconds of a step, from the end of one, with what the device has left to do, to the end of the last."""

    seconds = 0.0

    def __init__(self, steps: int, settling: int = SETTLING) -> None:
        self.steps, self.settling = steps, settling
        self._last = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.global_step
        if done == self._last or done not in (self.settling, self.settling + self.steps):
            return
        self._last = done
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds = now if done == self.settling else (now - self.seconds) / self.steps


def recipe_seconds(
    way: Way,
    workload: Workload,
    steps: int,
    device: torch.device,
    settings: Mapping[str, Any],
    data: pl.LightningDataModule | None = None,
) -> float:
    """Seconds of a step of the recipe in a Trainer with the callbacks of its command line.

    Args:
        settings: of the recipe, such as ``compile``.
        data: in place of the same batch again and again.
    """

    def transfer(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return workload.move(batch, device)

    clock = Clock(steps)
    callbacks = [SeedControl(1), GradientAccumulation(), WarmupLR(0), FiniteWeights(), RankConsistency(), Preemption()]
    # Its hooks within a step keep the step from being captured.
    callbacks += [] if settings.get("cuda_graph") else [TrainingMonitor()]
    callbacks += [TrainLoss(), LeanLoop(), clock]
    options: dict[str, Any] = {"precision": way.precision}
    if way.precision == "16-mixed":  # Which Lightning replaces by bf16 on a CPU.
        options = {"plugins": [MixedPrecision("16-mixed", device.type, torch.amp.GradScaler(device.type))]}
    batch = workload.batch if device.type == "cpu" else _pinned(workload.batch)
    if way.resident:
        batch = _in_layout(workload.move(batch, device), way.layout)
    recipe = workload.build(channels_last=way.channels_last, fused=way.fused, **settings)
    if data is None:
        recipe.transfer_batch_to_device = transfer  # type: ignore[method-assign]
    trainer = bare_trainer(
        callbacks,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        max_steps=SETTLING + steps,
        max_epochs=-1,
        limit_val_batches=0,
        log_every_n_steps=50,
        **options,
    )
    with interruptible():
        trainer.fit(recipe, data or _Again(batch, SETTLING + steps))
    return clock.seconds
