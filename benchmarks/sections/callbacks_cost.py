"""Measures the microseconds that the callbacks add to an update of a bare Trainer, on one device.

The network takes about a millisecond per step, as a small model does on a fast GPU, so that the overhead of the
framework is visible. Its width is chosen so that a plain PyTorch loop takes that long. Nothing is logged to disk.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.harness.bare_trainer import Again, bare_trainer, suppress_output
from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, pin_threads
from benchmarks.harness.terminal import interruptible
from callbacks import GradientAccumulation, SeedControl, SyncBN, TrainingMonitor, WarmupLR, WeightAveraging

__all__ = ["run"]

BATCH_SIZE = 256
SETTLING = 20
"""Steps before the clock starts, since the first ones are slower."""
PLAIN = "plain PyTorch loop"
BARE = "bare Trainer"
ALL = "all four"
EMPTY = "four callbacks that do nothing"
AVERAGING = "WeightAveraging(ema=0.999)"
MONITOR = "TrainingMonitor"
GOALS = {ALL: 1.05, AVERAGING: 1.02, MONITOR: 1.01}
"""Greatest allowed ratios to the bare Trainer."""


class Classifier(pl.LightningModule):
    """LightningModule of two linear layers with BatchNorm between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(784, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network(inputs)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Clock(pl.Callback):
    """Callback that records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def batches(count: int) -> Again:
    """Return a loader that repeats one random batch."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH_SIZE, 784, generator=generator)
    return Again((images, torch.randint(10, (BATCH_SIZE,), generator=generator)), count)


def plain_loop(width: int, steps: int) -> float:
    """Return the seconds of a step of a plain PyTorch loop."""
    model = Classifier(width)
    start = 0.0
    optimizer = model.configure_optimizers()
    for number, batch in enumerate(batches(SETTLING + steps), 1):
        loss = model.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == SETTLING:
            start = time.perf_counter()
    return (time.perf_counter() - start) / steps


def width_for(seconds: float) -> int:
    """Return the smallest width whose step in a plain PyTorch loop takes `seconds`, or the largest width."""
    widths = range(32, 1025, 32)
    return next((w for w in widths if statistics.median(plain_loop(w, 20) for _ in range(5)) >= seconds), widths[-1])


def fit(model: Classifier, steps: int, make_callbacks: Callable[[], list[pl.Callback]]) -> float:
    """Return the seconds of a step of a Trainer with these callbacks and no others."""
    clock = Clock()
    with interruptible():
        bare_trainer([clock, *make_callbacks()]).fit(model, batches(SETTLING + steps))
    return (clock.ends[-1] - clock.ends[SETTLING - 1]) / steps


CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    BARE: list,
    "SeedControl": lambda: [SeedControl(1)],
    "GradientAccumulation(1)": lambda: [GradientAccumulation()],
    "WarmupLR": lambda: [WarmupLR("5%", scale="linear", base_batch_size=BATCH_SIZE)],
    "SyncBN": lambda: [SyncBN()],
    AVERAGING: lambda: [WeightAveraging(ema=0.999)],
    MONITOR: lambda: [TrainingMonitor()],
    EMPTY: lambda: [pl.Callback() for _ in range(4)],
    ALL: lambda: [make()[0] for make in list(CALLBACKS.values())[1:5]],
}
"""Contenders, whose callbacks are made for each round."""


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure each callback alone, and all together."""
    # One thread, since the framework's overhead is Python, which more threads do not shorten but make unsteady.
    threads = pin_threads(options.threads or 1)
    steps = 40 if options.quick else 400
    with suppress_output():
        width = 32 if options.quick else width_for(1e-3)
        contenders: dict[str, Callable[[], float]] = {PLAIN: partial(plain_loop, width, steps)}
        for name, make in CALLBACKS.items():
            contenders[name] = lambda make=make: fit(Classifier(width), steps, make)  # type: ignore[misc]
        timings = alternate(contenders, options.rounds(15, quick=3), progress=progress)
    rows: dict[str, list[Spread | None]] = {}
    for name in contenders:
        compared = [timings.added(name, BARE, unit=1e-6), timings.ratio(name, BARE)] if name != BARE else [None, None]
        rows[name] = [timings.spread(name, unit=1e-6), *compared]
    ratios = {name: timings.ratio(name, BARE) for name in GOALS}
    return Section(
        title="callbacks' cost",
        header={
            "network": f"784 to {width} to 10, BatchNorm, SGD; batch {BATCH_SIZE}; the width of 1 ms in a plain loop",
            "threads": threads,
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds in turn of {steps} steps, after 1 round that does not count",
        },
        columns=[Column("microseconds an update", ".0f"), Column("added", "+.0f"), Column("ratio to bare", ".3f")],
        rows=rows,
        goals=[
            Goal(
                f"{name} at most {GOALS[name] - 1:.0%} more than the bare Trainer",
                f"{ratio.median - 1:+.1%} ({ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})",
                ratio.median <= GOALS[name],
            )
            for name, ratio in ratios.items()
        ],
        notes=[
            f"{ALL}: SeedControl, GradientAccumulation, WarmupLR and SyncBN; SyncBN does nothing on one process",
            f"{EMPTY}: Lightning's own work to call four callbacks, which no callback can avoid",
        ],
        interrupted=timings.interrupted,
    )
