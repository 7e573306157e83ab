"""Measures a training step of the recipe at its defaults, a plain PyTorch loop, Lightning and other libraries.

There are two networks: that of the recipe, where arithmetic takes the time, and a tiny one of 0.8 ms per step, where
the framework does, as with a small model on a fast GPU. All contenders train the same network with AdamW on the same
images and batch size. The time is that of training steps after the first few, without validation and without saving
(see ``checkpoint_cost``). Only the recipe and stock Lightning log, compute scores and draw a progress bar.
"""

import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.contenders.loops import Job, Laps, bare_loop, fabric_loop, plain_loop
from benchmarks.contenders.peers import absent_peers, peer_loops
from benchmarks.contenders.recipe_loops import recipe_loop, stock_loop
from benchmarks.harness.bare_trainer import suppress_output
from benchmarks.harness.measurements import (
    Column,
    Goal,
    Options,
    Progress,
    Section,
    Spread,
    Timings,
    alternate,
    available_cores,
    pin_threads,
)
from benchmarks.sections.input_pipeline import find_images, write_files
from recipes.mnist.network import MNISTNet
from recipes.runner.machine import resolve_precision

__all__ = ["run"]

BATCH_SIZE = 256
PLAIN = "plain PyTorch loop"
OURS = "recipe, not augmented"
AUGMENTED = "recipe, augmented"
BARE = "bare Trainer"
STOCK = "stock Lightning"
FABRIC = "Fabric"
TINY = "tiny"
DEFAULT = "default"

Loop = Callable[[Job], Laps]


def tiny_network(width: int) -> nn.Module:
    """Return a network of two linear layers with BatchNorm between them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))


def loops(root: Path) -> dict[str, Loop]:
    """Return the contenders by name, with the peers that are installed."""
    return {
        PLAIN: plain_loop,
        OURS: partial(recipe_loop, root=root, augment=False),
        AUGMENTED: partial(recipe_loop, root=root, augment=True),
        BARE: bare_loop,
        STOCK: partial(stock_loop, root=root),
        FABRIC: fabric_loop,
        **peer_loops(),
    }


class Network:
    """Contenders of one network and their measurements."""

    def __init__(self, name: str, job: Job, root: Path, threads: int) -> None:
        self.name = name
        self.job = job
        self.threads = threads
        self.loops = loops(root)
        if name == TINY:
            del self.loops[AUGMENTED]  # Augmentation takes as long as a tiny step.
        self.lower_quartiles: dict[str, list[float]] = {loop: [] for loop in self.loops}
        self.timings = Timings({})

    def measure(self, repeats: int, progress: Progress | None) -> None:
        """Measure all contenders in turn."""
        torch.set_num_threads(self.threads)
        contenders = {name: partial(self._time, name) for name in self.loops}
        self.timings = alternate(contenders, repeats, progress=progress)

    def _time(self, name: str) -> float:
        # A command line that ran before has seeded all generators. Without a new seed each round had the same order.
        torch.manual_seed(random.SystemRandom().randrange(2**32))
        laps = self.loops[name](self.job)
        self.lower_quartiles[name].append(laps.lower_quartile)
        return laps.seconds

    def lower_quartile_ratio(self, name: str, to: str = PLAIN) -> Spread:
        """Return the ratio of the lower quartiles of the steps, in the rounds that count."""
        counted = slice(1, 1 + self.timings.rounds)
        pairs = zip(self.lower_quartiles[name][counted], self.lower_quartiles[to][counted])
        return Spread(tuple(a / b for a, b in pairs))

    def rows(self) -> dict[str, list[Spread | None]]:
        """Return a row for each contender."""
        rows = {}
        for name in self.loops:
            spread = self.timings.spread(name)
            is_compared = name != PLAIN
            rows[f"{self.name}, {name}"] = [
                Spread(tuple(self.job.batch_size / seconds for seconds in spread.values)),
                self.timings.spread(name, 1e-6),
                self.timings.added(name, PLAIN, 1e-6) if is_compared else None,
                self.timings.ratio(name, PLAIN) if is_compared else None,
                self.lower_quartile_ratio(name) if is_compared else None,
            ]
        return rows


def width_for(seconds: float, job: Callable[[int], Job], widths: range = range(32, 1025, 32)) -> int:
    """Return the smallest width whose step in a plain PyTorch loop takes `seconds`, or the largest width."""
    return next(
        (w for w in widths if statistics.median(plain_loop(job(w)).lower_quartile for _ in range(3)) >= seconds),
        widths[-1],
    )


def goals(networks: dict[str, Network], precision: str) -> list[Goal]:
    """Return the goals for the recipe compared with other contenders."""

    def goal(text: str, ratio: Spread, most: float, form: str = ".2f") -> Goal:
        shown = f"{ratio.median:{form}} ({ratio.low:{form}} to {ratio.high:{form}})"
        return Goal(text, shown, ratio.median <= most)

    default = networks[DEFAULT]
    tiny = networks[TINY]
    faster = Spread(tuple(-v for v in default.timings.ratio(STOCK, OURS).values))
    goal_list = [
        goal(
            "default network, recipe: at most 1.03 times the plain PyTorch loop",
            default.timings.ratio(OURS, PLAIN),
            1.03,
        ),
        goal("tiny network, recipe: at most 1.15 times the plain PyTorch loop", tiny.timings.ratio(OURS, PLAIN), 1.15),
        goal(
            "tiny network, recipe: at most 150 microseconds over the bare Trainer",
            tiny.timings.added(OURS, BARE, 1e-6),
            150,
            ".0f",
        ),
    ]
    if precision == "bf16-mixed":
        text = "default network, recipe: at least 3 times faster than stock Lightning (shown negative)"
        goal_list.append(goal(text, faster, -3.0))
    return goal_list


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measure both networks."""
    quick = options.quick
    images, labels, source = find_images(options.data_dir, 12_800 if quick else 60_000)
    precision, reason = resolve_precision("auto", "cpu")
    cores = options.threads or available_cores()
    settling = 5 if quick else 20
    repeats = options.rounds(7)
    pixels = images.unsqueeze(1)
    targets = labels.long()

    def job(network: Callable[[], nn.Module], steps: int, precision: str) -> Job:
        return Job(network, pixels, targets, BATCH_SIZE, settling + steps, settling, precision)

    def tiny(width: int) -> Job:
        return job(partial(tiny_network, width), 20 if quick else 180, "32-true")

    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, suppress_output():
        root = Path(folder)
        write_files(root, images, labels)
        torch.set_num_threads(1)
        width = 32 if quick else width_for(0.8e-3, tiny)
        networks = {
            DEFAULT: Network(DEFAULT, job(MNISTNet, 5 if quick else 60, precision), root, cores),
            TINY: Network(TINY, tiny(width), root, 1),
        }
        rows: dict[str, list[Spread | None]] = {}
        for network in networks.values():
            network.measure(repeats, progress)
            rows |= network.rows()
    return Section(
        title="training loop: a step of the recipe and of others",
        header={
            "data": f"{source}; batch {BATCH_SIZE}, AdamW",
            "threads": f"{pin_threads(cores)} for the default network, 1 for the tiny one",
            "precision": f"{precision} ({reason}); float32 for the tiny network and stock Lightning",
            "networks": f"the recipe's; 784 to {width} to 10 with BatchNorm, of about 0.8 ms a step in a plain loop",
            "repeats": f"{networks[DEFAULT].timings.rounds} rounds in turn of {networks[DEFAULT].job.steps - settling} "
            f"and {networks[TINY].job.steps - settling} steps, after {settling} steps and 1 round that do not count",
        },
        columns=[
            Column("samples/s", ",.0f"),
            Column("us a step", ",.0f"),
            Column("over plain loop", "+,.0f"),
            Column("times plain loop", ".2f"),
            Column("times, lower quartile", ".2f"),
        ],
        rows=rows,
        goals=goals(networks, precision),
        notes=_notes(absent_peers(), quick),
        interrupted=any(network.timings.interrupted for network in networks.values()),
    )


def _notes(absent: list[str], quick: bool) -> list[str]:
    notes = [
        "lower quartile: the time that three quarters of the steps exceed, which other programs disturb less",
        "stock Lightning also reads images one by one; its optimizer is not fused",
    ]
    if absent:
        notes.append(f"not installed, so not compared: {', '.join(absent)}; pip install -e '.[peers]'")
    return [*notes, "few steps: of no meaning"] if quick else notes
