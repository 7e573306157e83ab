"""What each process of the scaling section does: train alone, side by side and together, and sum bytes."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.processes import free_port
from benchmarks.sections.fine_tuning import SameBatch
from datamodules.errors import UserError
from recipes import ResNetFineTuner
from recipes.launch.strategies import LeanDDPStrategy

__all__ = [
    "ALONE",
    "ALONE_ALL",
    "PLAIN_SIDE_BY_SIDE",
    "PLAIN_WEAK",
    "SETTLING",
    "SIDE_BY_SIDE",
    "STRONG",
    "WEAK",
    "Job",
    "Measured",
    "median_rank",
    "run_world",
]

ALONE, ALONE_ALL = "alone", "alone, the whole batch"
SIDE_BY_SIDE, WEAK, STRONG = "side by side", "together", "together, a share of the batch"
PLAIN_SIDE_BY_SIDE, PLAIN_WEAK = "plain loop, side by side", "plain loop, together"

SETTLING = 4
"""Steps before the clock starts: DDP makes new buckets in the second, whose memory is slow until it has been used."""

_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Job:
    """What one world measures.

    Args:
        devices: processes on this node.
        num_nodes: nodes, all with as many.
        batch_size: images of one process, and of all of them together where the batch is shared.
        global_batch_size: images of all processes together in the strong form.
        steps: that are timed.
        sizes: bytes to sum.
    """

    devices: int
    num_nodes: int
    batch_size: int
    global_batch_size: int
    image_size: int
    steps: int
    rounds: int
    sizes: tuple[int, ...]
    threads: int
    precision: str
    cuda: bool

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Measured:
    """What one world found.

    Args:
        steps: seconds of a step, by form, by round, by rank; of rank 0 only where it was alone.
        reductions: seconds of the slowest rank, by size, by round.
        gradient_bytes: what the ranks sum in each step.
    """

    steps: dict[str, list[list[float]]]
    reductions: dict[int, list[float]]
    gradient_bytes: int


class _StepClock(pl.Callback):
    """Seconds of the mean step, without the first ones."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seconds, self._start = steps, 0.0, 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 in (SETTLING, SETTLING + self.steps):
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
            self.seconds, self._start = (time.perf_counter() - self._start) / self.steps, time.perf_counter()


def _recipe(job: Job) -> ResNetFineTuner:
    return ResNetFineTuner(num_classes=10, image_size=job.image_size, weights="none", freeze_until="none")


def _train(job: Job, strategy: Strategy, devices: int, num_nodes: int, batch_size: int) -> float:
    clock = _StepClock(job.steps)
    trainer = bare_trainer(
        [clock],
        accelerator="gpu" if job.cuda else "cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        precision=job.precision,
        limit_val_batches=0,
    )
    trainer.fit(_recipe(job), SameBatch(batch_size, job.image_size, SETTLING + job.steps))
    return clock.seconds


def _plain_loop(job: Job, device: torch.device, together: bool) -> float:
    """Seconds of a step of the same network and optimiser in a loop by hand, under PyTorch's own DDP."""
    network: nn.Module = _recipe(job).network.to(device)
    if together:
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(job.precision)
    seconds = start = 0.0
    batches = SameBatch(job.batch_size, job.image_size, SETTLING + job.steps)
    for number, (images, labels) in enumerate(batches, 1):
        with torch.autocast(device.type, low, enabled=low is not None):
            logits = network(images.to(device, memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number in (SETTLING, SETTLING + job.steps):
            if job.cuda:
                torch.cuda.synchronize(device)
            seconds, start = (time.perf_counter() - start) / job.steps, time.perf_counter()
    return seconds


def _all_reduce(size: int, device: torch.device, repeats: int) -> float:
    values = torch.ones(max(1, size // 4), device=device)
    for _ in range(2):
        dist.all_reduce(values)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _everybody(value: float) -> list[float]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _measure(job: Job, local_rank: int) -> Measured:
    device = torch.device("cuda", local_rank) if job.cuda else torch.device("cpu")

    def alone(batch_size: int) -> float:
        return _train(job, SingleDeviceStrategy(device), 1, 1, batch_size)

    def together(batch_size: int) -> float:
        return _train(job, LeanDDPStrategy(timeout=_TIMEOUT), job.devices, job.num_nodes, batch_size)

    rank_zero = dist.get_rank() == 0
    forms: dict[str, Callable[[], float]] = {
        ALONE: lambda: alone(job.batch_size) if rank_zero else 0.0,
        ALONE_ALL: lambda: alone(job.global_batch_size) if rank_zero else 0.0,
        SIDE_BY_SIDE: lambda: alone(job.batch_size),
        WEAK: lambda: together(job.batch_size),
        STRONG: lambda: together(max(1, job.global_batch_size // job.world_size)),
        PLAIN_SIDE_BY_SIDE: lambda: _plain_loop(job, device, together=False),
        PLAIN_WEAK: lambda: _plain_loop(job, device, together=True),
    }
    steps: dict[str, list[list[float]]] = {form: [] for form in forms}
    reductions: dict[int, list[float]] = {size: [] for size in job.sizes}
    for number in range(job.rounds):
        # Every other round backwards, as in all sections.
        for form in list(forms)[:: 1 if number % 2 == 0 else -1]:
            dist.barrier()
            found = _everybody(forms[form]())
            steps[form].append(found[:1] if form in (ALONE, ALONE_ALL) else found)
        for size in job.sizes:
            repeats = max(2, min(50, 2**24 // size))
            reductions[size].append(max(_everybody(_all_reduce(size, device, repeats))))
    trained = sum(p.numel() * 4 for p in _recipe(job).parameters() if p.requires_grad)
    return Measured(steps, reductions, trained)


def _rank(pipe: Connection, job: Job, local_rank: int, node_rank: int, address: str, port: int) -> None:
    # Ctrl-C is the parent's to answer, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = node_rank * job.devices + local_rank
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.devices),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node_rank),
        # Otherwise Lightning's DDP gives a process the cores of the node divided by its processes.
        "OMP_NUM_THREADS": str(job.threads),
    }
    torch.set_num_threads(job.threads)
    if job.cuda:
        torch.cuda.set_device(local_rank)
    try:
        with suppress_output():
            dist.init_process_group(
                "nccl" if job.cuda else "gloo", rank=rank, world_size=job.world_size, timeout=_TIMEOUT
            )
            pipe.send(_measure(job, local_rank))
    except Exception as error:
        pipe.send(UserError(f"rank {rank} of {job.world_size}: {str(error).splitlines()[0]}"))
    pipe.close()
    # Lightning and gloo leave threads behind that need not be waited for.
    os._exit(0)


def run_world(job: Job, node_rank: int = 0, address: str = "127.0.0.1", port: int | None = None) -> Measured:
    """Start this node's processes and return what they all found.

    Raises:
        UserError: a process failed; the others are ended.
    """
    context: Any = get_context("spawn" if job.cuda else "forkserver")
    port = free_port() if port is None else port
    pipes: list[Connection] = []
    processes = []
    try:
        for local_rank in range(job.devices):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(sender, job, local_rank, node_rank, address, port))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        return _first_answer(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _first_answer(pipes: Sequence[Connection]) -> Measured:
    """All ranks find the same; the first that fails reports the cause."""
    open_pipes = list(pipes)
    answers: list[Measured] = []
    while open_pipes:
        for ready in wait(open_pipes):
            assert isinstance(ready, Connection)
            open_pipes.remove(ready)
            try:
                answer = ready.recv()
            except EOFError:
                raise UserError(
                    "a process of the benchmark was killed, by a lack of memory perhaps; pass fewer --devices"
                ) from None
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
    return answers[0]


def median_rank(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Of each round the seconds of the median rank."""
    return [statistics.median(ranks) for ranks in rounds]
