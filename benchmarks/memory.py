"""Measures the peak memory of a training on the CPU, with and without accumulation, beside stock Lightning.

    python -m benchmarks.memory               # a minute
    python -m benchmarks.memory --json memory.json

Each training has a process of its own: a network of 14 million parameters, AdamW, ten updates of 1 or 8 micro-batches
of 32 samples. The figure is the process's peak of resident memory above that before the Trainer, as the system counts
it, divided by the size of the weights. Weights, gradients and the two moments of AdamW are 4 of it.
"""

import argparse
import json
import resource
import sys
from pathlib import Path

import lightning.pytorch as pl
import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders.loops import Plain
from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.processes import answer_of
from callbacks import GradientAccumulation, SeedControl

__all__ = ["main", "measure"]

OURS = "GradientAccumulation and SeedControl"
STOCK = "stock Lightning"
WIDTH = 2048
BATCH_SIZE = 32
UPDATES = 10
MICRO_BATCHES = (1, 8)


class _Wide(Plain):
    """Five linear layers in the Trainer of the benchmarks."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        wide = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.network = nn.Sequential(nn.Linear(784, WIDTH), nn.ReLU(), *wide, nn.Linear(WIDTH, 10))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def measure(contender: str, micro_batches: int) -> float:
    """Train in this process, and return the peak memory above that before, in multiples of the size of the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    samples = UPDATES * micro_batches * BATCH_SIZE
    data = TensorDataset(torch.randn(samples, 784), torch.randint(10, (samples,)))
    loader = DataLoader(data, BATCH_SIZE)
    with suppress_output():
        if contender == OURS:
            trainer = bare_trainer([GradientAccumulation(micro_batches), SeedControl(1)])
        else:
            trainer = bare_trainer([], accumulate_grad_batches=micro_batches)
        before = psutil.Process().memory_info().rss
        module = _Wide()
        trainer.fit(module, loader)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return float(peak - before) / weights


def main(args: list[str] | None = None) -> None:
    """Measure each training in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--train", nargs=2, metavar=("CONTENDER", "MICRO_BATCHES"), help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.train:
        print(json.dumps(measure(options.train[0], int(options.train[1]))))
        return
    found = {}
    for micro_batches in MICRO_BATCHES:
        for contender in (STOCK, OURS):
            name = f"{contender}, micro-batches: {micro_batches}"
            found[name] = answer_of("-m", "benchmarks.memory", "--train", contender, str(micro_batches))
            print(f"{name:55} {found[name]:5.2f} times the weights", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
