"""A training step of the recipes on one GPU, beside a plain PyTorch loop: ``python -m benchmarks.gpu``.

Both train the same network in bf16 with AdamW on one batch on the device, with and without ``torch.compile``. The
recipe runs in a Trainer with the callbacks of its command line. Nothing is downloaded.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor
from typing_extensions import override

import callbacks
from benchmarks.harness import measurements
from benchmarks.harness.bare_trainer import Again, bare_trainer, suppress_output
from benchmarks.harness.measurements import Column, Section, Spread, alternate
from benchmarks.harness.terminal import interruptible
from benchmarks.harness.tiny_recipes import ThinResNet
from datamodules import TranslationDataModule
from datamodules.translation.loaders import TranslationBatch
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from recipes.optim import optimizer_by_name, parameter_groups
from recipes.seq2seq.network import target_positions

__all__ = ["WORKLOADS", "Workload", "images", "main"]

SETTLING = 5
"""Steps before the clock starts. The first ones choose kernels, allocate memory and may compile."""
PLAIN = "plain loop"
RECIPE = "recipe"
COMPILED = ", compiled"


def image_loss(forward: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of images of shape (batch, channels, height, width)."""
    return F.cross_entropy(forward(batch[0]), batch[1])


def pairs_loss(forward: Callable[..., Tensor], batch: TranslationBatch) -> Tensor:
    """Return the label-smoothed cross-entropy of the target tokens."""
    positions = target_positions(batch.target, batch.target_lengths)
    logits = forward(batch.source, batch.source_lengths, batch.target, positions)
    return F.cross_entropy(logits.float(), batch.target[:, 1:].flatten()[positions], label_smoothing=0.1)


@dataclass(frozen=True)
class Workload:
    """Training of a recipe on one batch, which is repeated.

    Args:
        what: description of network and batch.
        build: function that returns a new recipe with the given settings.
        batch: batch on the CPU.
        units: number of images or target tokens in the batch.
        unit: name of a unit.
        loss: function that computes the loss from the network, possibly compiled, and the batch.
        move: function that copies the batch to a device.
    """

    what: str
    build: Callable[..., Any]
    batch: Any
    units: int
    unit: str = "images"
    loss: Callable[[Callable[..., Tensor], Any], Tensor] = image_loss
    move: Callable[[Any, torch.device], Any] = move_data_to_device

    def on(self, device: torch.device) -> Any:
        """Return the batch on a device, with images in the memory format of the recipes."""
        batch = self.move(self.batch, device)
        inputs = batch[0]
        if inputs.dim() == 4:
            return (inputs.contiguous(memory_format=torch.channels_last), *batch[1:])
        return batch


def images(what: str, build: Callable[..., Any], count: int, channels: int, size: int, classes: int) -> Workload:
    """Return a workload of random images of shape (count, channels, size, size)."""
    pixels = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))
    return Workload(f"{what}, {count} images of {size} px", build, (pixels, torch.arange(count) % classes), count)


def mnist(quick: bool) -> Workload:
    """Return the workload of MNIST's default network."""
    return images("MNIST's default network", MNISTClassifier, 16 if quick else 256, 1, 28, 10)


def resnet(quick: bool) -> Workload:
    """Return the workload of a ResNet-50 at 224 pixels, or with `quick` of a network of 92,000 parameters."""
    size, count = (32, 4) if quick else (224, 128)
    options: dict[str, Any] = {"num_classes": 1000, "image_size": size, "weights": "none", "freeze_until": "none"}
    build = partial(ThinResNet, **options) if quick else partial(ResNetFineTuner, arch="resnet50", **options)
    return images("ThinResNet" if quick else "ResNet-50, all layers", build, count, 3, size, 1000)


def translator(quick: bool) -> Workload:
    """Return the workload of the translator at its defaults on a batch of the bundled sentences."""
    count, hidden = (8, 16) if quick else (256, 256)
    data = TranslationDataModule(batch_size=count)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    settings = Seq2SeqTranslator.settings_from_data(data) | {"hidden_size": hidden}
    tokens = int(batch.target_lengths.sum()) - len(batch.target)

    def move(batch: TranslationBatch, device: torch.device) -> Any:
        return data.transfer_batch_to_device(batch, device, 0)

    build = partial(Seq2SeqTranslator, **settings)
    return Workload(f"translator, {count} pairs", build, batch, tokens, "target tokens", pairs_loss, move)


WORKLOADS: dict[str, Callable[[bool], Workload]] = {"mnist": mnist, "resnet50": resnet, "translator": translator}


def _now(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def plain_seconds(workload: Workload, device: torch.device, steps: int, compiled: bool) -> float:
    """Return the seconds of a step of a plain PyTorch loop."""
    torch.manual_seed(1)
    network: Any = workload.build().network
    network = network.to(device).to(memory_format=torch.channels_last)
    optimizer = optimizer_by_name("adamw", parameter_groups(network.parameters(), 0.01), 1e-3)
    forward: Callable[..., Tensor] = torch.compile(network) if compiled else network
    batch = workload.on(device)
    start = 0.0
    for step in range(SETTLING + steps):
        if step == SETTLING:
            start = _now(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = workload.loss(forward, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (_now(device) - start) / steps


class _Clock(pl.Callback):
    """Callback that records the end of the settling and of the last step."""

    def __init__(self, steps: int) -> None:
        self.ends = (SETTLING, SETTLING + steps)
        self.times = list[float]()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step in self.ends:
            self.times.append(_now(pl_module.device))


def recipe_seconds(workload: Workload, device: torch.device, steps: int, compiled: bool) -> float:
    """Return the seconds of a step of the recipe in a Trainer with the callbacks of its command line."""
    recipe = workload.build(compile=compiled)
    clock = _Clock(steps)
    recipe.transfer_batch_to_device = lambda batch, *_: batch
    used = [callbacks.SeedControl(1), callbacks.WarmupLR(0), callbacks.GradientAccumulation()]
    used += [callbacks.FiniteWeights(), callbacks.RankConsistency(), callbacks.Preemption()]
    trainer = bare_trainer(
        [*used, callbacks.TrainingMonitor(), callbacks.TrainLoss(), clock],
        accelerator="gpu" if device.type == "cuda" else "cpu",
        precision="bf16-mixed",
        max_steps=SETTLING + steps,
        max_epochs=-1,
        limit_val_batches=0,
    )
    with interruptible():
        trainer.fit(recipe, Again(workload.on(device), SETTLING + steps))
    return (clock.times[1] - clock.times[0]) / steps


def measure(workload: Workload, device: torch.device, steps: int, repeats: int, compiled: bool) -> Section:
    """Measure the plain loop and the recipe. A contender that fails is left out, with a note."""
    peaks: dict[str, float] = {}

    def contender(seconds: Callable[..., float], name: str, compiled: bool) -> float:
        # Otherwise torch counts the compilations of all networks together, and gives up at its limit.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        step_seconds = seconds(workload, device, steps, compiled)
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device) / 2**30
        return step_seconds

    contenders: dict[str, Callable[[], float]] = {}
    notes: list[str] = []
    for suffix in ("", COMPILED) if compiled else ("",):
        for name, seconds in ((PLAIN, plain_seconds), (RECIPE, recipe_seconds)):
            run = partial(contender, seconds, name + suffix, bool(suffix))
            try:
                run()
            except Exception as error:
                notes.append(f"{name}{suffix} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            else:
                contenders[name + suffix] = run
    timings = alternate(contenders, repeats, warmup=0)
    rows: dict[str, list[Spread | None]] = {}
    for name in contenders:
        seconds_of_step = timings.spread(name)
        rate = Spread(tuple(workload.units / value for value in seconds_of_step.values))
        base = name.replace(RECIPE, PLAIN)
        ratio = timings.ratio(name, base) if name != base and base in contenders else None
        rows[name] = [rate, timings.spread(name, 1e-3), ratio, Spread((peaks[name],)) if peaks else None]
    columns = [Column(f"{workload.unit}/s", ",.0f"), Column("milliseconds a step", ".3f")]
    return Section(
        title=workload.what,
        header={
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "precision": "bf16-mixed",
            "repeats": f"{timings.rounds} rounds in turn of {steps} steps, after {SETTLING} that do not count",
        },
        columns=[*columns, Column("times plain loop", ".3f"), Column("most memory, GiB", ".2f")],
        rows=rows,
        notes=notes,
        interrupted=timings.interrupted,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each workload, print and write its table as soon as it is done, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=WORKLOADS, help="one of them, in place of all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu shows that it runs")
    parser.add_argument("--quick", action="store_true", help="tiny and not compiled, for no figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each table")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu --quick shows that it runs")
    device = torch.device(args.device)
    console = Console(highlight=False)
    machine = measurements.describe_machine(False)
    done = dict[str, Section]()
    steps, repeats = (2, 1) if args.quick else (50, 3)
    for name in [args.only] if args.only else WORKLOADS:
        with suppress_output():
            done[name] = measure(WORKLOADS[name](args.quick), device, steps, repeats, not args.quick)
        measurements.print_section(done[name], console)
        if args.json is not None:
            measurements.write_json(args.json, machine, done, done[name].interrupted)
        if done[name].interrupted:
            return 130
    return int(any(section.notes for section in done.values()))


if __name__ == "__main__":
    sys.exit(main())
