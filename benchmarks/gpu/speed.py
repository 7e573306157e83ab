"""How fast the recipes train on a GPU, compared with loops by hand, one change after the other."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.reach_accuracy import recipe as reach_accuracy
from benchmarks.gpu.loops import (
    SETTLING,
    Way,
    Workload,
    flops_of_step,
    image_loss,
    peak_tflops,
    recipe_seconds,
    seconds_a_step,
)
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.measurements import Column, Goal, Section, Spread, alternate
from benchmarks.harness.terminal import unread_terminal
from benchmarks.harness.tiny_recipes import ThinResNet
from benchmarks.sections.input_pipeline import write_files
from benchmarks.sections.time_to_accuracy import find_folder
from datamodules.errors import UserError
from datamodules.mnist.data_module import MNISTDataModule
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.packed_sentences import TranslationBatch
from recipes import MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator
from recipes.seq2seq.network import target_positions

__all__ = ["Setting", "Speed", "cifar", "fine_tuner", "mnist_99", "mnist_step", "resnet50", "translator"]


@dataclass(frozen=True)
class Setting:
    """Where and on what the parts run.

    Args:
        rehearse: on the CPU and tiny, to see that everything runs; the figures are worth nothing.
        peak_tflops: of the GPU, if it is not in the table.
        save: takes a section that is not complete yet, in case that its time ends.
    """

    data_dir: str
    rehearse: bool
    peak_tflops: float | None
    save: Callable[[Section], None]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearse else "cuda")


BASE = Way(resident=False, channels_last=False, fused=False)
BY_HAND, RECIPE = "by hand: + fused optimiser", "the recipe"
GRAPH, RECIPE_GRAPH = "by hand: + CUDA graph", "the recipe, --cuda-graph"


def ways(images: bool) -> dict[str, Way]:
    """Loops by hand; each of the first five adds something to the one before, the others add it to these.

    Args:
        images: with their layout.

    Example:
        >>> list(ways(images=False).values())[2]
        Way(precision='bf16-mixed', resident=True, channels_last=False, fused=False, compiled=False, graph=False)
    """
    steps: dict[str, dict[str, Any]] = {
        "by hand: float32, batch copied in each step": {},
        "by hand: + data on the device": {"resident": True},
        **({"by hand: + channels_last": {"channels_last": True}} if images else {}),
        "by hand: + bf16": {"precision": "bf16-mixed"},
        BY_HAND: {"fused": True},
    }
    found, way = {}, BASE
    for name, change in steps.items():
        found[name] = way = replace(way, **change)
    return found | {"by hand: + fp16 in place of bf16": replace(way, precision="16-mixed")}


class Speed:
    """A table of contenders by their seconds of a step.

    Args:
        goal: a contender, what it is compared with, and how many times as long it may take; the first that has run.
    """

    def __init__(self, setting: Setting, title: str, workload: Workload, goal: tuple[str, str, float]) -> None:
        self.setting, self.workload, self.goal = setting, workload, goal
        name = "CPU" if setting.rehearse else torch.cuda.get_device_name()
        self.peak = setting.peak_tflops or peak_tflops(name)
        self.section = Section(
            title=title,
            header={
                "workload": workload.what,
                "device": name + (f", peak {self.peak:g} TFLOP/s" if self.peak else ""),
                "arithmetic": f"{workload.flops / 1e12:.3g} TFLOP a step, forward and backward",
                "precision": "float32 as PyTorch has it (TF32 in convolutions), bf16 or fp16 autocast from there on",
            },
            columns=[
                Column(f"{workload.unit}/s", ",.0f"),
                Column("milliseconds a step", ".3f"),
                Column("% of the peak", ".1f"),
                Column(f"times {BY_HAND.removeprefix('by hand: + ')}", ".3f"),
            ],
            ours=[],
            notes=["each loop by hand adds to the one before, up to the fused optimiser; the others add to that one"],
        )
        if not self.peak:
            self.section.notes.append(f"the peak of {name} is not known, so no share of it; pass --peak-tflops")
        self.seconds: dict[str, Spread] = {}
        self.ratios: dict[str, Spread] = {}

    def measure(self, contenders: dict[str, Callable[[], float]], repeats: int) -> None:
        """Run contenders in turn; those that fail are left out, and said so."""
        able = {}
        with suppress_output():
            for name, contender in contenders.items():
                try:
                    first = contender()
                except Exception as error:
                    reason = str(error).strip().partition("\n")[0][:200]
                    self.section.notes.append(f"{name} failed: {type(error).__name__}: {reason}")
                    continue
                able[name] = contender
                self._add(name, Spread((first,)))
            if repeats and able:
                timings = alternate(able, repeats, warmup=0)
                self.section.interrupted = timings.interrupted
                for name in able:
                    if BY_HAND in able:
                        self.ratios[name] = timings.ratio(name, BY_HAND)
                    self._add(name, timings.spread(name))
        self._finish()

    def _add(self, name: str, seconds: Spread) -> None:
        self.seconds[name] = seconds
        workload, peak = self.workload, self.peak
        ratio = self.ratios.get(name)
        if ratio is None and BY_HAND in self.seconds:
            ratio = Spread(tuple(value / self.seconds[BY_HAND].median for value in seconds.values))
        self.section.rows[name] = [
            Spread(tuple(workload.units / value for value in seconds.values)),
            Spread(tuple(value * 1e3 for value in seconds.values)),
            Spread(tuple(100 * workload.flops / value / (peak * 1e12) for value in seconds.values)) if peak else None,
            ratio,
        ]
        self.setting.save(self.section)

    def _finish(self) -> None:
        ours, other, most = self.goal
        text = f"{ours}: a step within {most} of {other!r}"
        self.section.ours = [name for name in self.seconds if name.startswith(RECIPE)]
        if ours in self.seconds and other in self.seconds:
            ratio = self.seconds[ours].median / self.seconds[other].median
            self.section.goals = [Goal(text, f"{ratio:.3f}", ratio <= most)]
        else:
            self.section.goals = [Goal(text, "not measured", False)]
        self.setting.save(self.section)


def _compare(
    setting: Setting,
    title: str,
    workload: Workload,
    images: bool,
    steps: int,
    goal: tuple[str, str, float],
    data: pl.LightningDataModule | None = None,
) -> Section:
    """All contenders of a workload: loops by hand, the recipe, CUDA graphs, then those that compile, once each.

    Args:
        data: with which the recipe is measured, too, and captures its step.
    """
    speed, device = Speed(setting, title, workload, goal), setting.device
    steps, repeats = (2, 1) if setting.rehearse else (steps, 3)
    by_hand = ways(images)
    best = by_hand[BY_HAND]

    def hand(way: Way) -> Callable[[], float]:
        return lambda: seconds_a_step(way, workload, steps, device)

    def ours(way: Way, data: pl.LightningDataModule | None = None, **settings: Any) -> Callable[[], float]:
        return lambda: recipe_seconds(way, workload, steps, device, settings, data)

    contenders = {name: hand(way) for name, way in by_hand.items()}
    contenders |= {
        RECIPE: ours(best),
        f"{RECIPE}, batch copied in each step": ours(replace(best, resident=False)),
        f"{RECIPE}, fp16": ours(replace(best, precision="16-mixed")),
    }
    if data is not None:
        contenders[f"{RECIPE}, with its data module"] = ours(best, data)
    speed.measure(contenders, repeats)
    if images:  # A translator's batches differ in their lengths. A capture that fails may harm what runs after it.
        graphs = {GRAPH: hand(replace(best, graph=True))}
        if data is not None and not setting.rehearse:
            graphs[RECIPE_GRAPH] = ours(best, data, cuda_graph=True)
        speed.measure(graphs, repeats)
    if not setting.rehearse:  # Compiling takes a minute on a CPU; `tests/recipes` does it there.
        compiled = {"by hand: + compiled": hand(replace(best, compiled=True))}
        compiled[f"{RECIPE}, --compile"] = ours(best, compile=True)
        speed.measure(compiled, repeats=0)
    rounds = f"{repeats} rounds in turn" if repeats > 1 else "one round"
    speed.section.header["repeats"] = f"{rounds} of {steps} steps after {SETTLING} that do not count; compiled: one"
    return speed.section


def _images(
    what: str, build: Callable[..., Any], batch_size: int, channels: int, size: int, num_classes: int
) -> Workload:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch_size, channels, size, size, generator=generator)
    batch = images, torch.arange(batch_size) % num_classes
    few = images[:2], batch[1][:2]
    flops = flops_of_step(lambda: image_loss(build().network, few)) * batch_size // 2
    return Workload(f"{what}, {batch_size} images of {size} px, AdamW", build, batch, batch_size, "images", flops)


SECONDS_GOAL = 1.0


def mnist_99(setting: Setting) -> Section:
    """Seconds to 99 % on MNIST's test set, from the first step, which is the first of its process in one row.

    Raises:
        UserError: there is no MNIST.
    """
    section = Section(
        title="seconds to 99 % on MNIST's test set",
        header={
            "run": "python -m recipes.mnist --max-epochs 1, from the first step to the end of the epoch, not tested",
            "device": "CPU" if setting.rehearse else torch.cuda.get_device_name(),
            "precision": "as the command line chooses it",
        },
        columns=[Column("seconds", ".3f"), Column("accuracy, %", ".2f")],
    )
    ways = {"at its defaults": (), "--cuda-graph": ("--cuda-graph", "true", "--training-monitor", "false")}
    if setting.rehearse:  # A capture needs a GPU.
        del ways["--cuda-graph"]
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        folder, source = find_folder("" if setting.rehearse else setting.data_dir, Path(scratch))
        if source != "MNIST" and not setting.rehearse:
            raise UserError("MNIST is not there; pass --data-dir FOLDER with its files")
        for name, flags in ways.items():
            # The first run chooses kernels and compiles what it needs; the others show what is left without that.
            for row, seeds in ((f"{name}, first run of the process", (1,)), (f"{name}, later runs", (2, 3))):
                found = []
                accelerator = "cpu" if setting.rehearse else "gpu"
                try:
                    for seed in seeds[: 1 if setting.rehearse else None]:
                        with suppress_output(), unread_terminal():
                            found.append(reach_accuracy(str(folder), seed, 0.99, 1, -1, accelerator, *flags))
                except (Exception, SystemExit) as error:
                    section.notes.append(f"{row} failed: {type(error).__name__}: {error}")
                    continue
                section.rows[row] = [
                    Spread(tuple(answer["seconds"] for answer in found)),
                    Spread(tuple(100 * answer["accuracies"][-1] for answer in found)),
                ]
                setting.save(section)
    section.goals = [Goal(f"99 % in under {SECONDS_GOAL:g} s from the first step", *_fastest(section, 99.0))]
    return section


def _fastest(section: Section, wanted: float) -> tuple[str, bool]:
    """The least seconds of a row that always reaches an accuracy, in words, and whether they are few enough."""
    found = [
        (seconds.median, name)
        for name, (seconds, accuracy) in section.rows.items()
        if seconds and accuracy and accuracy.low >= wanted
    ]
    if not found:
        return f"no row reached {wanted:g} %", False
    seconds, name = min(found)
    return f"{seconds:.3f} s ({name})", seconds < SECONDS_GOAL


def mnist_step(setting: Setting) -> Section:
    """A step of MNIST's default network."""
    size = 16 if setting.rehearse else 256
    workload = _images("MNIST's default network", MNISTClassifier, size, 1, 28, 10)
    goal = (RECIPE_GRAPH, GRAPH, 1.05)
    count = size * (SETTLING + (2 if setting.rehearse else 200))
    pixels = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    still: dict[str, Any] = {"shift": 0.0, "rotation": 0.0, "scale": 0.0}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        write_files(Path(scratch), pixels, (torch.arange(count) % 10).to(torch.uint8))
        data = MNISTDataModule("mnist", scratch, size, val_fraction=0, download=False, **still)
        return _compare(setting, "a step of MNIST's default network", workload, True, 200, goal, data)


def fine_tuner(setting: Setting, arch: str, image_size: int, num_classes: int) -> Callable[..., Any]:
    """Builds the ResNet recipe with all layers; in a rehearsal with a network of 92,000 parameters."""
    options: dict[str, Any] = {
        "num_classes": num_classes,
        "image_size": image_size,
        "weights": "none",
        "freeze_until": "none",
    }
    return partial(ThinResNet, **options) if setting.rehearse else partial(ResNetFineTuner, arch=arch, **options)


def cifar(setting: Setting) -> Section:
    """A step of a ResNet-18 for images of CIFAR's size."""
    build = fine_tuner(setting, "resnet18", 32, 10)
    workload = _images("ResNet-18, 10 classes", build, 4 if setting.rehearse else 256, 3, 32, 10)
    return _compare(setting, "a ResNet-18 on images of CIFAR's size", workload, True, 50, (RECIPE, BY_HAND, 1.05))


def resnet50(setting: Setting) -> Section:
    """A step of a ResNet-50 at 224 pixels."""
    size, batch_size = (32, 4) if setting.rehearse else (224, 128)
    build = fine_tuner(setting, "resnet50", size, 1000)
    workload = _images("ResNet-50, 1,000 classes", build, batch_size, 3, size, 1000)
    return _compare(setting, "a ResNet-50 at 224 pixels", workload, True, 10, (RECIPE, BY_HAND, 1.03))


def _pairs_loss(forward: Callable[..., Tensor], batch: TranslationBatch) -> Tensor:
    positions = target_positions(batch.target, batch.target_lengths)
    logits = forward(batch.source, batch.source_lengths, batch.target, positions)
    return F.cross_entropy(logits.float(), batch.target[:, 1:].flatten()[positions], label_smoothing=0.1)


def translator(setting: Setting) -> Section:
    """A step of the translator, on a batch of the bundled sentences."""
    batch_size, hidden = (8, 16) if setting.rehearse else (256, 256)
    data = TranslationDataModule(batch_size=batch_size)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    settings = Seq2SeqTranslator.settings_from_data(data) | {"hidden_size": hidden}
    build = partial(Seq2SeqTranslator, **settings)
    tokens = int(batch.target_lengths.sum()) - len(batch.target)
    workload = Workload(
        what=f"the translator at its defaults, {batch_size} bundled pairs, {tokens:,} target tokens, AdamW",
        build=build,
        batch=batch,
        units=tokens,
        unit="tokens",
        flops=flops_of_step(lambda: _pairs_loss(build().network, batch)),
        loss=_pairs_loss,
        move=lambda batch, device: data.transfer_batch_to_device(batch, device, 0),
    )
    return _compare(setting, "the translator", workload, False, 50, (RECIPE, BY_HAND, 1.05))
