"""A ResNet-18 step on a CUDA GPU, from float32 as PyTorch has it to the recipe's settings, one change after the other.

Each contender adds one thing to the one before: the data on the device, the layout, bf16, the fused optimiser, and
compilation. Steps are timed by CUDA events, so that launching them ahead costs nothing and is not counted twice. How
much of the GPU's peak the arithmetic reaches is the model FLOP utilisation (Chowdhery et al., 2022, PaLM).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, pin_threads
from benchmarks.sections.fine_tuning import SETTLING, Clock, SameBatch, fine_tuner, fit
from datamodules.errors import UserError
from recipes.optim import build_optimizer
from recipes.parameter_groups import parameter_groups

__all__ = ["PEAK_TFLOPS", "Way", "flops_of_step", "peak_tflops", "run", "seconds_a_step"]

PEAK_TFLOPS = {
    "B200": 2250, "GH200": 990, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "A40": 150,
    "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 155, "RTX 4090": 165,
    "RTX 3090": 71, "V100": 125, "T4": 65,
}  # fmt: skip
"""Dense bf16 or fp16 with float32 sums, in 10^12 operations a second, from NVIDIA's data sheets."""

RECIPE = "the recipe in a Trainer"
MOST = 1.1
"""The recipe's step, at most, in steps of a plain PyTorch loop with the same settings."""


@dataclass(frozen=True)
class Way:
    """How a plain PyTorch loop trains.

    Args:
        resident: the batch lies on the device; otherwise each step copies it from pageable memory.
        bf16: autocast; otherwise float32, for which TF32 stays off, as PyTorch has it.
    """

    resident: bool = False
    channels_last: bool = False
    bf16: bool = False
    fused: bool = False
    compiled: bool = False


_STEPS = {
    "float32, batch copied in each step": {},
    "+ data on the device": {"resident": True},
    "+ channels_last": {"channels_last": True},
    "+ bf16": {"bf16": True},
    "+ fused optimiser": {"fused": True},
    "+ compiled": {"compiled": True},
}
FIRST, PLAIN_LOOP = next(iter(_STEPS)), "+ fused optimiser"


def ways() -> dict[str, Way]:
    """Each adds something to the one before.

    Example:
        >>> ways()["+ bf16"]
        Way(resident=True, channels_last=True, bf16=True, fused=False, compiled=False)
    """
    found, way = {}, Way()
    for name, change in _STEPS.items():
        found[name] = way = replace(way, **change)
    return found


def peak_tflops(name: str) -> float | None:
    """The peak of a GPU by the name that its driver gives; None for one that is not in the table.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA L40S"), peak_tflops("Some GPU")
        (989, 362, None)
    """
    known = (part for part in sorted(PEAK_TFLOPS, key=len, reverse=True) if part in name)
    return next((PEAK_TFLOPS[part] for part in known), None)


def flops_of_step(network: nn.Module, image: Tensor) -> int:
    """Multiplications and additions of a sample's forward and backward pass; those of convolutions and products.

    Args:
        image: of shape (1, channels, height, width).
    """
    with FlopCounterMode(display=False) as counter:
        network(image).sum().backward()
    network.zero_grad()
    return int(counter.get_total_flops())


def seconds_a_step(way: Way, build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], steps: int) -> float:
    """Seconds of a step of a plain PyTorch loop, on the device of the batch's targets.

    Args:
        batch: images on the CPU, of shape (batch, channels, height, width), and targets of shape (batch,).
    """
    images, targets = batch
    device = targets.device
    layout = torch.channels_last if way.channels_last else torch.contiguous_format
    torch.manual_seed(1)
    network = build().to(device).to(memory_format=layout)
    optimizer = build_optimizer("adamw", parameter_groups(network, 0.01), 1e-3, fused=way.fused)
    forward: Callable[[Tensor], Tensor] = torch.compile(network) if way.compiled else network
    if way.resident:
        images = images.to(device)

    def step() -> None:
        inputs = images.to(device).contiguous(memory_format=layout)
        with torch.autocast(device.type, torch.bfloat16, enabled=way.bf16):
            loss = F.cross_entropy(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(SETTLING):
        step()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / steps


class _Settled(Clock):
    """A clock that waits for the device where the counted steps begin and end."""

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 in (SETTLING, trainer.num_training_batches):
            torch.cuda.synchronize()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def _recipe_step(batch_size: int, image_size: int, steps: int) -> float:
    """Seconds of a step of the fine-tuning recipe; the batch is copied in each step, as a loader's is."""
    batches = SameBatch(batch_size, image_size, SETTLING + steps)
    recipe = fine_tuner("none", image_size)
    clock = fit(recipe, "bf16-mixed", clock=_Settled(), accelerator="gpu", train_dataloaders=batches)
    return (clock.step_ends[-1] - clock.step_ends[SETTLING - 1]) / steps


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measures each way in turn.

    Raises:
        UserError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("this section needs a CUDA GPU, and there is none; leave it out")
    from torchvision.models import resnet18

    quick, threads = options.quick, pin_threads(options.threads or 1)
    batch_size, image_size, steps = (16, 64, 3) if quick else (256, 224, 30)
    repeats = options.repeats or (1 if quick else 5)
    name = torch.cuda.get_device_name()
    peak = options.peak_tflops or peak_tflops(name)
    images, targets = SameBatch(batch_size, image_size, 1).batch
    batch = images, targets.cuda()
    build = partial(resnet18, num_classes=2)
    flops = flops_of_step(build(), images[:1]) * batch_size
    contenders: dict[str, Callable[[], float]] = {
        way_name: partial(seconds_a_step, way, build, batch, steps) for way_name, way in ways().items()
    }
    contenders[RECIPE] = partial(_recipe_step, batch_size, image_size, steps)
    with suppress_output():
        timings = alternate(contenders, repeats, progress=progress)
    rows: dict[str, list[Spread | None]] = {}
    for contender in contenders:
        spread = timings.spread(contender)
        used = Spread(tuple(100 * flops / seconds / (peak * 1e12) for seconds in spread.values)) if peak else None
        rows[contender] = [
            Spread(tuple(batch_size / seconds for seconds in spread.values)),
            timings.spread(contender, 1e-3),
            timings.ratio(FIRST, contender),
            used,
        ]
    ratio = timings.ratio(RECIPE, PLAIN_LOOP)
    found = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    no_peak = f"the peak of {name} is not in the table, so no utilisation; pass --peak-tflops"
    return Section(
        title="CUDA: a ResNet-18 step, one change after the other",
        header={
            "network": f"ResNet-18, all layers, {batch_size} images of {image_size} px, AdamW",
            "device": f"{name}" + (f", peak {peak:g} TFLOP/s" if peak else ""),
            "arithmetic": f"{flops / 1e12:.2f} TFLOP a step, forward and backward",
            "threads": threads,
            "precision": "float32 without TF32, and bf16 autocast from there on",
            "repeats": f"{timings.rounds} rounds in turn of {steps} steps, by CUDA events, after {SETTLING} that do not"
            " count",
        },
        columns=[
            Column("samples/s", ",.0f"),
            Column("milliseconds a step", ".2f"),
            Column("times faster", ".2f"),
            Column("% of the peak", ".1f"),
        ],
        rows=rows,
        goals=[
            Goal(
                f"the recipe: at most {MOST} times a plain PyTorch loop that does the same", found, ratio.median <= MOST
            )
        ],
        ours=[RECIPE],
        notes=[
            "each way adds to the one before; the recipe has all but compilation, and copies each batch",
            "utilisation is of the bf16 peak, for float32 too",
            *([] if peak else [no_peak]),
        ],
        interrupted=timings.interrupted,
    )
