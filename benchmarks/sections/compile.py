"""A step of the recipes' networks, compiled and not, and how long the first compiled step takes in a new process."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, pin_threads
from callbacks.lib.sample_noise import number_layers, sample_noise
from recipes.compilation import compile_network
from recipes.mnist.network import MNISTNet
from recipes.optim import build_optimizer
from recipes.parameter_groups import parameter_groups
from recipes.resnet.network import build_resnet
from recipes.seq2seq.network import target_positions
from recipes.seq2seq.recurrent import Seq2SeqNet

__all__ = ["run"]

MNIST, RESNET, TRANSLATION = "MNIST, batch 256", "ResNet-18 of 32 px, batch 32", "translation, batch 64 of 10 tokens"


def _job(name: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """A network, a batch for it, and how many dimensions of its inputs vary."""
    torch.manual_seed(1)
    if name == MNIST:
        return MNISTNet(), (torch.randn(256, 1, 28, 28),), 1
    if name == RESNET:
        return build_resnet("resnet18", 10, small_images=True), (torch.randn(32, 3, 32, 32),), 1
    tokens, lengths = torch.randint(4, 4000, (2, 64, 10)), torch.full((64,), 10)
    batch = (tokens[0], lengths, tokens[1], target_positions(tokens[1], lengths))
    return Seq2SeqNet(4000, 4000), batch, 2


def step_of(name: str, compiled: bool) -> Callable[[], None]:
    """A step of training: forward, backward and AdamW, in float32."""
    network, batch, varying_dims = _job(name)
    network.to(memory_format=torch.channels_last)
    number_layers(network)
    if compiled:
        compile_network(network, varying_dims=varying_dims)
    optimizer = build_optimizer("adamw", parameter_groups(network, 0.01), 1e-3)
    places = torch.arange(len(batch[0]))

    def step() -> None:
        with sample_noise(1, 0, places):
            optimizer.zero_grad()
            network(*batch).square().mean().backward()
            optimizer.step()

    return step


def _seconds(step: Callable[[], Any], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _first_step(name: str, cache: str) -> float:
    """Seconds of the first compiled step in a new process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "benchmarks.sections.compile", name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def run(options: Options, progress: Progress | None = None) -> Section:
    """Times the first step with an empty and with a filled cache, then both kinds of steps in turn."""
    threads = pin_threads(options.threads or 1)
    steps, repeats = (2, options.repeats or 1) if options.quick else (10, options.repeats or 7)
    names = (MNIST,) if options.quick else (MNIST, RESNET, TRANSLATION)
    first: dict[str, tuple[float, float]] = {}
    contenders: dict[str, Callable[[], float]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as cache:
            first[name] = _first_step(name, cache), _first_step(name, cache)
        for kind, compiled in (("eager", False), ("compiled", True)):
            contenders[f"{name}, {kind}"] = partial(_seconds, step_of(name, compiled), steps)
    timings = alternate(contenders, repeats, progress=progress)
    rows: dict[str, list[Spread | None]] = {}
    for name in names:
        cold, warm = (Spread((seconds,)) for seconds in first[name])
        plain, faster = f"{name}, eager", f"{name}, compiled"
        spreads = [timings.spread(kind, 1e-3) for kind in (plain, faster)]
        rows[name] = [*spreads, timings.ratio(plain, faster), cold, warm]
    ratios = {name: ratio for name, (_, _, ratio, *_) in rows.items() if ratio is not None}
    goals = []
    if ratios:
        slowest = min(ratios, key=lambda name: ratios[name].median)
        found = ratios[slowest].median
        goals.append(Goal("compiled steps take at most the time of eager ones", f"{found:.2f}, {slowest}", found >= 1))
    return Section(
        title="compile: a step of the recipes' networks with and without torch.compile",
        header={
            "step": "forward, backward and AdamW in a plain loop; dropout addressed by sample",
            "threads": threads,
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds of {steps} steps in turn, after 1 that does not count",
        },
        columns=[
            Column("eager, ms", ".1f"),
            Column("compiled, ms", ".1f"),
            Column("times faster", ".2f"),
            Column("first step, s", ".1f"),
            Column("with a cache, s", ".1f"),
        ],
        rows=rows,
        goals=goals,
        notes=["the first step is the first compiled one of a new process, without imports; once each"],
        interrupted=timings.interrupted,
    )


if __name__ == "__main__":
    print(_seconds(step_of(sys.argv[1], True), 1))
