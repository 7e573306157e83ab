"""Measures weak scaling of a ResNet-18 by DDP on this machine.

In each round one process trains alone while the others wait, then all processes train independently, and then together
by DDP. The second form shows the cost of sharing the machine, and the third that of the all-reduce. A plain loop also
runs the last two forms: its loss is the limit of PyTorch's DDP on this machine.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.harness.bare_trainer import Again, bare_trainer, suppress_output
from benchmarks.harness.measurements import (
    Column,
    Goal,
    Options,
    Progress,
    Section,
    Spread,
    available_cores,
    pin_threads,
)
from benchmarks.harness.processes import free_port
from benchmarks.sections.fine_tuning import image_batch
from datamodules.errors import UserError
from recipes import ResNetFineTuner
from recipes.runner.machine import resolve_precision
from recipes.runner.settings import LeanDDPStrategy

__all__ = ["run"]

GOAL = 0.9
ALONE = "alone"
BESIDE = "side by side"
TOGETHER = "together"
PLAIN_BESIDE = "plain loop, side by side"
PLAIN_TOGETHER = "plain loop, together"
SETTLING = 4
"""Steps before the clock starts. DDP rebuilds its buckets in the second, and the first use of memory is slow."""
_TIMEOUT = timedelta(minutes=5)

Found = dict[str, list[float]]
"""Seconds of a step of the median rank, for each form and round."""


@dataclass(frozen=True)
class Job:
    """Measurement of one world: processes with `batch_size` images each, and the timed steps of each round."""

    world_size: int
    batch_size: int
    image_size: int
    steps: int
    rounds: int
    threads: int
    precision: str
    cuda: bool

    def measure(self, rank: int) -> Found:
        """Measure in a process of the world, and return its results."""
        return _measure(self, rank)

    def batches(self) -> Again:
        """Return a loader that repeats one batch of images."""
        return Again(image_batch(self.batch_size, self.image_size), SETTLING + self.steps)

    def recipe(self) -> ResNetFineTuner:
        """Return a recipe that trains all layers of a new network."""
        return ResNetFineTuner(num_classes=2, image_size=self.image_size, weights="none", freeze_until="none")


class _Clock:
    """Clock of the mean seconds of a step after the settling."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0
        self.times = list[float]()

    def step(self) -> None:
        """Record the end of a step."""
        self.done += 1
        if self.done in (SETTLING, SETTLING + self.job.steps):
            if self.job.cuda:
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return (self.times[1] - self.times[0]) / self.job.steps


class _Counts(pl.Callback):
    """Callback that calls a clock after each step of a Trainer."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.clock.step()


def _train(job: Job, strategy: Strategy, devices: int) -> float:
    clock = _Clock(job)
    trainer = bare_trainer(
        [_Counts(clock)],
        accelerator="gpu" if job.cuda else "cpu",
        devices=devices,
        strategy=strategy,
        precision=job.precision,
        limit_val_batches=0,
    )
    trainer.fit(job.recipe(), job.batches())
    return clock.seconds


def _plain_loop(job: Job, device: torch.device, together: bool) -> float:
    """Train the same network in a plain PyTorch loop, optionally under DDP, and return the seconds of a step."""
    network: nn.Module = job.recipe().network.to(device)
    if together:
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(job.precision)
    clock = _Clock(job)
    for images, labels in job.batches():
        with torch.autocast(device.type, low, enabled=low is not None):
            logits = network(images.to(device, memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
    return clock.seconds


def _measure(job: Job, rank: int) -> Found:
    device = torch.device("cuda", rank) if job.cuda else torch.device("cpu")
    forms: dict[str, Callable[[], float]] = {
        ALONE: lambda: _train(job, SingleDeviceStrategy(device), 1) if rank == 0 else 0.0,
        BESIDE: lambda: _train(job, SingleDeviceStrategy(device), 1),
        TOGETHER: lambda: _train(job, LeanDDPStrategy(timeout=_TIMEOUT), job.world_size),
        PLAIN_BESIDE: lambda: _plain_loop(job, device, together=False),
        PLAIN_TOGETHER: lambda: _plain_loop(job, device, together=True),
    }
    median_seconds: Found = {form: [] for form in forms}
    for number in range(job.rounds):
        # Every other round runs backwards, so that a machine that slows down favors no form.
        for form in list(forms)[:: 1 if number % 2 == 0 else -1]:
            dist.barrier()
            seconds: list[Any] = [None] * job.world_size
            dist.all_gather_object(seconds, forms[form]())
            median_seconds[form].append(seconds[0] if form == ALONE else statistics.median(seconds))
    return median_seconds


def _rank(pipe: Connection, job: Job, rank: int, port: int) -> None:
    # The parent handles Ctrl-C and kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    names = "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "OMP_NUM_THREADS"
    values = port, job.world_size, job.world_size, rank, rank, 0, job.threads
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **dict(zip(names, map(str, values), strict=True))}
    torch.set_num_threads(job.threads)
    if job.cuda:
        torch.cuda.set_device(rank)
    try:
        with suppress_output():
            backend = "nccl" if job.cuda else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=job.world_size, timeout=_TIMEOUT)
            pipe.send(job.measure(rank))
    except Exception as error:
        pipe.send(UserError(f"rank {rank} of {job.world_size}: {str(error).splitlines()[0]}"))
    pipe.close()
    # Lightning and gloo leave threads behind, which would delay a normal exit.
    os._exit(0)


def run_world(job: Job) -> Found:
    """Start the processes and return the results of rank 0.

    Raises:
        UserError: a process failed; the others are killed.
    """
    context: Any = get_context("spawn" if job.cuda else "forkserver")
    port = free_port()
    pipes = list[Connection]()
    processes = list[Any]()
    try:
        for rank in range(job.world_size):
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=_rank, args=(sender, job, rank, port)))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        answers = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise UserError("a process of the benchmark was killed, by a lack of memory perhaps") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    rank_zero: Found = answers[0]
    return rank_zero


def world_row(job: Job, seconds: Found) -> list[Spread | None]:
    """Return the figures of one world. Ratios are computed within each round."""

    def share(part: str, of: str) -> Spread:
        return Spread(tuple(100 * a / b for a, b in zip(seconds[part], seconds[of], strict=True)))

    rate = Spread(tuple(job.world_size * job.batch_size / step_seconds for step_seconds in seconds[TOGETHER]))
    return [rate, share(ALONE, TOGETHER), share(BESIDE, TOGETHER), share(PLAIN_BESIDE, PLAIN_TOGETHER)]


def _goals(row: Sequence[Spread | None]) -> list[Goal]:
    ours, plain = row[2:4]
    assert ours is not None
    assert plain is not None
    text = f"{ours.median:.0f} % ({ours.low:.0f} to {ours.high:.0f}), a plain loop {plain.median:.0f} %"
    what = "2 processes by DDP: at least {} of two independent ones' throughput"
    return [
        Goal(what.format(f"{GOAL:.0%}"), text, ours.median >= 100 * GOAL),
        Goal("2 processes by DDP: no more lost than by a plain loop", text, ours.median >= plain.median),
    ]


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure one world after the other."""
    cuda = torch.cuda.is_available()
    quick = options.quick
    most = torch.cuda.device_count() if cuda else available_cores()
    counts = options.devices or tuple(2**power for power in range(1 if quick else 0, max(2, most).bit_length()))
    counts = counts[:1] if quick else counts
    if cuda and max(counts) > most:
        raise UserError(f"--devices {max(counts)}: this node has {most} GPUs")
    threads = pin_threads(options.threads or 1)
    precision = resolve_precision("auto")[0]
    batch, size, steps = (2, 32, 1) if quick else (8, 224, 4)
    rounds = options.rounds(5)
    rows: dict[str, list[Spread | None]] = {}
    goals: list[Goal] = []
    for number, count in enumerate(counts, 1):
        job = Job(count, batch, size, steps, rounds, options.threads or 1, precision, cuda)
        row = rows[f"{count} process{'es' if count > 1 else ''}"] = world_row(job, run_world(job))
        goals += _goals(row) if count == 2 else []
        if progress is not None:
            progress(f"{count} processes", number, len(counts))
    return Section(
        title="scaling: processes that train together",
        header={
            "network": f"resnet18, {size} pixels, {batch} images a process",
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "threads": f"{threads}, in each process",
            "precision": precision,
            "repeats": f"{rounds} rounds in turn of {steps} steps, after {SETTLING} that do not count",
        },
        columns=[
            Column("samples a second", ",.1f"),
            Column("% of as many alone", ".0f"),
            Column("% of as many side by side", ".0f"),
            Column("the same, plain loop", ".0f"),
        ],
        rows=rows,
        goals=goals,
    )
