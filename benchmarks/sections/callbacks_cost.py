"""Microseconds that the callbacks add to an update of the same bare Trainer, on one device.

The network takes about a millisecond a step, which is what a fast GPU makes of any small model: there the framework's
own work shows. Its width is chosen on the machine so that a plain PyTorch loop takes that long, and the table shows how
long it took. Batches are in memory already and nothing is logged to disk, so that nothing else is measured.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, pin_threads
from benchmarks.harness.terminal import interruptible
from callbacks import (
    GradientAccumulation,
    SeedControl,
    SyncBN,
    TrainingMonitor,
    WarmupLR,
    WeightAveraging,
)

__all__ = ["run"]

BATCH_SIZE = 256
ACCUMULATED = 4
SETTLING = 20  # Steps before the clock starts: the first are slower.

PLAIN, BARE, ALL = "plain PyTorch loop", "bare Trainer", "all four"
BARE_4 = f"bare Trainer, accumulate_grad_batches={ACCUMULATED}"
EMPTY = "four callbacks that do nothing"
OURS_4 = f"GradientAccumulation({ACCUMULATED})"
AVERAGING, MONITOR = "WeightAveraging(ema=0.999)", "TrainingMonitor"
GOALS = {ALL: 1.05, AVERAGING: 1.02, MONITOR: 1.01}
"""The largest ratios to the bare Trainer."""


class Batches:
    """The same batch again and again, as a loader that Lightning leaves alone."""

    batch_size = BATCH_SIZE

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(BATCH_SIZE, 784, generator=generator)
        self.batch = images, torch.randint(10, (BATCH_SIZE,), generator=generator)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch for _ in range(self.count))


class Classifier(pl.LightningModule):
    """Two linear layers with BatchNorm between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(784, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network(inputs)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Clock(pl.Callback):
    """Seconds from the end of step `SETTLING` to the end of the last."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start = self.seconds = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == SETTLING:
            self.start = time.perf_counter()
        elif batch_idx + 1 == SETTLING + self.steps:
            self.seconds = time.perf_counter() - self.start


def plain_loop(width: int, steps: int) -> float:
    """Seconds a step of what a plain PyTorch loop does."""
    model, batches = Classifier(width), Batches(SETTLING + steps)
    optimizer = model.configure_optimizers()
    start = 0.0
    for number, batch in enumerate(batches, 1):
        loss = model.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == SETTLING:
            start = time.perf_counter()
    return (time.perf_counter() - start) / steps


def width_for(seconds: float, widths: Sequence[int] = tuple(range(32, 1025, 32))) -> int:
    """The smallest width whose step takes that long in a plain PyTorch loop, or the largest of all."""
    return next((w for w in widths if statistics.median(plain_loop(w, 20) for _ in range(5)) >= seconds), widths[-1])


def fit(model: Classifier, steps: int, accumulate: int, make_callbacks: Callable[[], list[pl.Callback]]) -> float:
    """Seconds a step of a Trainer with these callbacks and nothing else; a step is one micro-batch."""
    clock = Clock(steps)
    trainer = bare_trainer([clock, *make_callbacks()], accumulate_grad_batches=accumulate)
    with interruptible():
        trainer.fit(model, Batches(SETTLING + steps))
    return clock.seconds / steps


def warmup(duration: str = "5%") -> WarmupLR:
    """As the recipes set it up, with a rate that follows the global batch."""
    return WarmupLR(duration, scale="linear", base_batch_size=BATCH_SIZE)


def trainers() -> dict[str, tuple[int, Callable[[], list[pl.Callback]]]]:
    """What is compared: micro-batches that the Trainer itself accumulates, and the callbacks, made for each round."""
    return {
        BARE: (1, list),
        "SeedControl": (1, lambda: [SeedControl(1)]),
        "GradientAccumulation(1)": (1, lambda: [GradientAccumulation()]),
        "WarmupLR, after the warm-up": (1, lambda: [warmup("1 steps")]),
        "WarmupLR, warming up": (1, lambda: [warmup("100%")]),
        "SyncBN": (1, lambda: [SyncBN()]),
        AVERAGING: (1, lambda: [WeightAveraging(ema=0.999)]),
        MONITOR: (1, lambda: [TrainingMonitor()]),
        EMPTY: (1, lambda: [pl.Callback() for _ in range(4)]),
        ALL: (1, lambda: [GradientAccumulation(), SeedControl(1), warmup(), SyncBN()]),
        BARE_4: (ACCUMULATED, list),
        OURS_4: (1, lambda: [GradientAccumulation(ACCUMULATED)]),
    }


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measures each callback alone, and all together."""
    # One thread: what the framework adds is Python, which a second one would not shorten but make unsteady.
    threads = pin_threads(options.threads or 1)
    repeats = options.repeats or (3 if options.quick else 15)
    steps = 40 if options.quick else 400
    with suppress_output():
        width = width_for(1e-3)

        def contender(accumulate: int, make: Callable[[], list[pl.Callback]]) -> Callable[[], float]:
            return lambda: fit(Classifier(width), steps, accumulate, make)

        contenders = {name: contender(*how) for name, how in trainers().items()}
        timings = alternate({PLAIN: lambda: plain_loop(width, steps), **contenders}, repeats, progress=progress)
    for name in (BARE_4, OURS_4):
        # An update is as many micro-batches as are accumulated, by whomever.
        timings.seconds[name] = [seconds * ACCUMULATED for seconds in timings.seconds[name]]
    rows: dict[str, list[Spread | None]] = {}
    for name in timings.seconds:
        base = BARE_4 if name in (BARE_4, OURS_4) else BARE
        compared = name != base
        rows[name] = [
            timings.spread(name, unit=1e-6),
            timings.added(name, base, unit=1e-6) if compared else None,
            timings.ratio(name, base) if compared else None,
        ]
    ratios = {name: timings.ratio(name, BARE) for name in GOALS}
    goals = [
        Goal(
            f"{name} at most {GOALS[name] - 1:.0%} more than the bare Trainer",
            f"{ratio.median - 1:+.1%} ({ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})",
            ratio.median <= GOALS[name],
        )
        for name, ratio in ratios.items()
    ]
    return Section(
        title="callbacks' cost",
        header={
            "network": f"784 to {width} to 10, BatchNorm, SGD; batch {BATCH_SIZE}; the width of 1 ms in a plain loop",
            "device": "cpu, one process",
            "threads": threads,
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds in turn of {steps} micro-batches, after 1 round that does not count",
        },
        columns=[
            Column("microseconds an update", ".0f"),
            Column("added", "+.0f"),
            Column("ratio to bare", ".3f"),
        ],
        rows=rows,
        goals=goals,
        notes=[
            f"{OURS_4} is compared with the Trainer's own accumulate_grad_batches={ACCUMULATED}",
            f"{ALL}: GradientAccumulation, SeedControl, WarmupLR and SyncBN; SyncBN does nothing on one process",
            f"{EMPTY}: Lightning's own work to call four callbacks, which no callback can avoid",
        ],
        interrupted=timings.interrupted,
    )
