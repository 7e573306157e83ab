"""Dropout addressed by sample, and torch's: one layer forward, and forward and backward."""

import time
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, pin_threads
from callbacks import sample_noise, stateless_dropout

__all__ = ["run"]

SHAPES = {
    "sentences (64, 10, 256)": (64, 10, 256),
    "sentences (16, 40, 256)": (16, 40, 256),
    "one token (64, 256)": (64, 256),
    "features (256, 128)": (256, 128),
    "images (64, 64, 12, 12)": (64, 64, 12, 12),
}
"""Inputs of the dropout layers of the recipes' networks."""

P, CALLS = 0.3, 4
GOAL = 1.0


def seconds(layer: nn.Module, inputs: Tensor, positions: Tensor, backward: bool, steps: int) -> float:
    """Seconds of a call of a layer, in steps of so many calls as the translator's step has."""
    gradient = torch.ones_like(inputs)
    start = time.perf_counter()
    for step in range(steps):
        with sample_noise(1, step, positions):
            for _ in range(CALLS):
                output = layer(inputs)
                if backward:
                    inputs.grad = None
                    output.backward(gradient)
    return (time.perf_counter() - start) / (steps * CALLS)


def run(options: Options, progress: Progress | None = None) -> Section:
    """Times both layers in turn at each shape."""
    threads = pin_threads(options.threads or 1)
    steps, repeats = (2, options.repeats or 1) if options.quick else (15, options.repeats or 15)
    ours, theirs = stateless_dropout(nn.Dropout(P)), nn.Dropout(P)
    contenders = {}
    for name, shape in SHAPES.items():
        inputs, positions = torch.randn(shape).requires_grad_(), torch.arange(shape[0])
        for kind, backward in (("forward", False), ("forward and backward", True)):
            for by, layer in (("torch", theirs), ("ours", ours)):
                contenders[f"{name}, {kind}, {by}"] = partial(seconds, layer, inputs, positions, backward, steps)
    timings = alternate(contenders, repeats, progress=progress)
    rows: dict[str, list[Spread | None]] = {}
    goals = []
    for row in dict.fromkeys(name.rpartition(", ")[0] for name in contenders):
        ratio = timings.ratio(f"{row}, ours", f"{row}, torch")
        rows[row] = [timings.spread(f"{row}, torch", 1e-6), timings.spread(f"{row}, ours", 1e-6), ratio]
        found = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        goals.append(Goal(f"{row}: at most {GOAL:g} times torch's", found, ratio.median <= GOAL))
    return Section(
        title="dropout: addressed by sample, and torch's",
        header={
            "layer": f"dropout of {P} on the CPU; the keys of the samples once for {CALLS} calls",
            "threads": threads,
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds of {steps * CALLS} calls in turn, after 1 that does not count",
        },
        columns=[Column("torch, microseconds", ".0f"), Column("ours, microseconds", ".0f"), Column("ratio", ".2f")],
        rows=rows,
        goals=goals,
        interrupted=timings.interrupted,
    )
