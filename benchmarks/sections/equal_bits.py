"""Measures the cost of sums in the order of the micro-batches, by `GradientSum` and `OrderedStatistics`.

They are compared with PyTorch's sums, which divide each loss by the number of micro-batches and let DDP all-reduce the
gradients. Both train the same network on the same batches in one process, or in two under DDP, and alternate by update.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.gpu import Workload, images, mnist, translator
from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, pin_threads
from benchmarks.sections import scaling
from callbacks import GradientSum, OrderedStatistics
from callbacks.lib.exact_sums import tree_nodes
from datamodules.loading.sampling import range_of_rank
from recipes import ResNetFineTuner
from recipes.optim import optimizer_by_name, parameter_groups
from recipes.runner.machine import resolve_precision

__all__ = ["bytes_sent", "run"]

PLAIN = "PyTorch's sums"
ORDERED = "sums in order"
CPU = ", processor time"
HELD = "bytes held"
SPLITS = {1: (1, 2, 4), 2: (2, 4)}
"""Micro-batches of an update on all processes, by the number of processes."""


def resnet(quick: bool) -> Workload:
    """Return the workload of a ResNet-18 at 64 pixels, all layers."""
    count = 2 if quick else 16
    build = partial(ResNetFineTuner, num_classes=10, image_size=64, weights="none", freeze_until="none")
    return images("ResNet-18, all layers", build, count, 3, 64, 10)


WORKLOADS: dict[str, Callable[[bool], Workload]] = {"MNIST": mnist, "ResNet-18": resnet, "translator": translator}


@dataclass(frozen=True)
class Job(scaling.Job):
    """Measurement of one world, whose `steps` are updates of `micro_batches` micro-batches on all processes."""

    workload: str = "MNIST"
    micro_batches: int = 1
    quick: bool = False

    @override
    def measure(self, rank: int) -> scaling.Found:
        workload = WORKLOADS[self.workload](self.quick)
        trainings = {PLAIN: _Way(self, workload, ordered=False), ORDERED: _Way(self, workload, ordered=True)}
        seconds = {part: list[float]() for part in (PLAIN, ORDERED, PLAIN + CPU, ORDERED + CPU)}
        for number in range(scaling.SETTLING + self.rounds * self.steps):
            for name in list(trainings)[:: 1 if number % 2 == 0 else -1]:
                dist.barrier()
                start = time.perf_counter(), time.process_time()
                trainings[name].update()
                end = time.perf_counter(), time.process_time()
                if number >= scaling.SETTLING:
                    for part, begin, stop in zip((name, name + CPU), start, end, strict=True):
                        seconds[part].append(stop - begin)
        return seconds | {HELD: [float(trainings[ORDERED].held)]}

    def ratio(self, seconds: scaling.Found, suffix: str = "") -> Spread:
        """Return the ratio of the times of an update with ordered sums and with PyTorch's: the median of each round."""
        pairs = [a / b for a, b in zip(seconds[ORDERED + suffix], seconds[PLAIN + suffix], strict=True)]
        return Spread(tuple(statistics.median(pairs[i : i + self.steps]) for i in range(0, len(pairs), self.steps)))


class _Way:
    """Training of a network with PyTorch's sums or with ordered sums."""

    def __init__(self, job: Job, workload: Workload, ordered: bool) -> None:
        torch.manual_seed(1)
        network: nn.Module = workload.build().network.to(memory_format=torch.channels_last)
        self.optimizer = optimizer_by_name("adamw", parameter_groups(network.parameters(), 0.01), 1e-3)
        self.workload = workload
        self.batch = workload.on(torch.device("cpu"))
        self.count = job.micro_batches
        self.steps = job.micro_batches // job.world_size
        self.low = torch.bfloat16 if job.precision == "bf16-mixed" else None
        self.model: Any = network
        if job.world_size > 1:
            self.model = DistributedDataParallel(network, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.gradients = GradientSum(self.model, workload.units) if ordered else None
        self.statistics = OrderedStatistics(network, job.world_size)
        self.held = 0

    def update(self) -> None:
        """Make one update."""
        self.optimizer.zero_grad()
        for step in range(self.steps):
            self._plain(step) if self.gradients is None else self._ordered(self.gradients)
        self.optimizer.step()

    def _loss(self) -> torch.Tensor:
        with torch.autocast("cpu", self.low, enabled=self.low is not None):
            return self.workload.loss(self.model, self.batch)

    def _plain(self, step: int) -> None:
        several = isinstance(self.model, DistributedDataParallel) and step < self.steps - 1
        with self.model.no_sync() if several else contextlib.nullcontext():
            (self._loss() / self.steps).backward()

    def _ordered(self, gradients: GradientSum) -> None:
        with gradients.micro_batch(self.count, self.statistics):
            loss = self._loss()
            gradients.scale_loss(loss, self.workload.units)
            loss.backward()
        held = (tensor for _, tensors in gradients.sums.nodes for tensor in tensors)
        self.held = max(self.held, sum(tensor.nbytes for tensor in held))


def bytes_sent(size: int, micro_batches: int, ranks: int) -> tuple[float, float]:
    """Return the greatest number of bytes that a rank sends per update, with ordered sums and in a ring all-reduce.

    With ordered sums a rank sends a slice of each of its nodes to each other rank, and then the slice of the sum.

    Example:
        >>> bytes_sent(100, micro_batches=8, ranks=4), bytes_sent(100, micro_batches=10, ranks=4)
        ((150.0, 150.0), (225.0, 150.0))
    """
    ranges = [range_of_rank(micro_batches, rank, ranks) for rank in range(ranks)]
    nodes = max(len(tree_nodes(start, stop, micro_batches)) for start, stop in ranges)
    to_others = (ranks - 1) / ranks * size
    return (nodes + 1) * to_others, 2 * to_others


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure each network, number of processes and number of micro-batches."""
    threads = pin_threads(options.threads or 1)
    precision = resolve_precision("auto")[0]
    quick = options.quick
    rounds = options.rounds(5)
    updates = 1 if quick else 8
    splits = {ranks: counts[-1:] if quick else counts for ranks, counts in SPLITS.items()}
    cases = [(name, ranks, count) for name in WORKLOADS for ranks, counts in splits.items() for count in counts]
    rows: dict[str, list[Spread | None]] = {}
    goals: list[Goal] = []
    for number, (name, ranks, count) in enumerate(cases, 1):
        job = Job(ranks, 0, 0, updates, rounds, options.threads or 1, precision, False, name, count, quick)
        seconds = scaling.run_world(job)
        ratio = job.ratio(seconds)
        row = f"{name}, {ranks} process{'es' if ranks > 1 else ''}, {count} micro-batch{'es' if count > 1 else ''}"
        held = Spread((seconds[HELD][0] / 2**20,)) if seconds[HELD][0] else None
        rows[row] = [Spread((1e3 * statistics.median(seconds[PLAIN]),)), ratio, job.ratio(seconds, CPU), held]
        limit = 1.03 if ranks > 1 else 1.02
        text = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        if count > 1:
            goals.append(Goal(f"{row}: at most {limit:.2f} times PyTorch's", text, ratio.median <= limit))
        if progress is not None:
            progress(row, number, len(cases))
    return Section(
        title="sums in the order of the micro-batches",
        header={
            "networks": "; ".join(WORKLOADS[name](quick).what for name in WORKLOADS),
            "threads": f"{threads}, in each process",
            "precision": precision,
            "repeats": f"{rounds} rounds of {updates} pairs of updates, after {scaling.SETTLING} that do not count",
        },
        columns=[
            Column("ms, PyTorch's sums", ",.1f"),
            Column("times PyTorch's", ".3f"),
            Column("processor time", ".3f"),
            Column("MiB of sums held", ".1f"),
        ],
        rows=rows,
        goals=goals,
        notes=[
            "an update includes the optimizer's step; GradientAccumulation leaves one micro-batch on one process to"
            " PyTorch, so its row costs nothing there",
        ],
    )
