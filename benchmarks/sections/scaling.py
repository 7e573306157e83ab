"""What more processes give: weak and strong scaling of a ResNet-18, and a prediction for larger worlds.

In each round of a world one process trains alone while the others wait, then all of them train, each for itself, then
all together by DDP. The second shows the cost of sharing the machine, the third that of the gradients' all-reduce. A
loop by hand does the last two as well: what it loses is the limit of PyTorch's DDP on this machine.
All-reduces of other sizes give the link's latency and bandwidth.
"""

import os
import statistics

import torch

from benchmarks.contenders.scaling_ranks import (
    ALONE,
    ALONE_ALL,
    PLAIN_SIDE_BY_SIDE,
    PLAIN_WEAK,
    SETTLING,
    SIDE_BY_SIDE,
    STRONG,
    WEAK,
    Job,
    Measured,
    median_rank,
    run_world,
)
from benchmarks.harness.measurements import (
    Column,
    Curve,
    Goal,
    Options,
    Progress,
    Section,
    Spread,
    available_cores,
    pin_threads,
)
from benchmarks.harness.ring import Link, Reduction, fit_link, relative_errors
from datamodules.errors import UserError
from recipes.launch.precision import resolve_precision

__all__ = ["run"]

GOAL = 0.9
PREDICTED = (32, 1000)
"""Worlds to predict: 4 nodes of 8, and many."""
_SIZES = tuple(2**power for power in range(12, 27, 2))
"""Bytes, 4 kB to 64 MB: the link is fitted to every other one and checked on the rest."""


def default_devices(limit: int) -> tuple[int, ...]:
    """Powers of two up to what the machine has, two at least: one process scales to nothing.

    Example:
        >>> default_devices(2), default_devices(6)
        ((1, 2), (1, 2, 4))
    """
    return tuple(2**power for power in range(max(2, limit).bit_length()))


def _node() -> tuple[int, str, int | None]:
    """This node's rank and where rank 0 listens, from the variables that a manual launch sets."""
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"several nodes need {', '.join(missing)} in the environment; on each node type NODE_RANK=0 "
            "MASTER_ADDR=first-node MASTER_PORT=29500 python -m benchmarks scaling ..., with its own NODE_RANK"
        )
    return int(os.environ["NODE_RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _spread(values: list[float]) -> Spread:
    return Spread(tuple(values))


def world_row(job: Job, found: Measured, link: Link | None) -> list[Spread | None]:
    """The figures of one world, each formed within a round."""
    world = job.world_size
    forms = ALONE, ALONE_ALL, SIDE_BY_SIDE, WEAK, STRONG, PLAIN_SIDE_BY_SIDE, PLAIN_WEAK
    alone, alone_all, beside, weak, strong, plain_beside, plain_weak = (
        median_rank(found.steps[form]) for form in forms
    )
    summed = found.reductions.get(found.gradient_bytes)
    share = 100.0
    return [
        _spread([world * job.batch_size / seconds for seconds in weak]),
        _spread([share * one / all_ for one, all_ in zip(alone, weak, strict=True)]),
        _spread([share * each / all_ for each, all_ in zip(beside, weak, strict=True)]),
        _spread([share * each / all_ for each, all_ in zip(plain_beside, plain_weak, strict=True)]),
        _spread([one / all_ for one, all_ in zip(alone_all, strong, strict=True)]),
        _spread([seconds * 1e3 for seconds in summed]) if summed and world > 1 else None,
        _spread([link.bound_seconds(world, found.gradient_bytes) * 1e3]) if link and world > 1 else None,
    ]


def exposed_share(found: Measured) -> float:
    """The part of the gradients' all-reduce that the backward pass does not hide, of 0 to 1 and rarely more."""
    beside, weak = median_rank(found.steps[SIDE_BY_SIDE]), median_rank(found.steps[WEAK])
    summed = found.reductions[found.gradient_bytes]
    shares = [(all_ - each) / seconds for each, all_, seconds in zip(beside, weak, summed, strict=True)]
    return max(0.0, statistics.median(shares))


def _reductions(job: Job, found: Measured) -> list[Reduction]:
    return [Reduction(job.world_size, size, statistics.median(times)) for size, times in found.reductions.items()]


def run(options: Options, progress: Progress | None = None) -> Section:
    """Measures one world after the other, then fits and predicts."""
    cuda, quick = torch.cuda.is_available(), options.quick
    num_nodes = options.num_nodes
    most = torch.cuda.device_count() if cuda else available_cores()
    counts = options.devices or ((1, 2) if quick else default_devices(most))
    if cuda and max(counts) > most:
        raise UserError(f"--devices {max(counts)}: this node has {most} GPUs")
    node_rank, address, port = _node() if num_nodes > 1 else (0, "127.0.0.1", None)
    threads = pin_threads(options.threads or 1)
    precision = resolve_precision("auto")[0]
    # The recipe's size, and a quarter of its batch: with smaller images the all-reduce would be half the step.
    batch_size, image_size = (2, 64) if quick else (8, 224)
    if cuda:
        batch_size, image_size = 64, 224
    worlds: list[tuple[Job, Measured]] = []
    gradient_bytes = 4 * 11_181_642  # ResNet-18 with ten classes.
    sizes = tuple(sorted({*(_SIZES[:4] if quick else _SIZES), gradient_bytes}))
    for index, devices in enumerate(counts):
        job = Job(
            devices=devices,
            num_nodes=num_nodes,
            batch_size=batch_size,
            global_batch_size=batch_size * max(counts) * num_nodes,
            image_size=image_size,
            steps=2 if quick else 4,
            rounds=options.repeats or (1 if quick else 5),
            sizes=sizes,
            threads=options.threads or 1,
            precision=precision,
            cuda=cuda,
        )
        found = run_world(job, node_rank, address, None if port is None else port + index)
        worlds.append((job, found))
        if progress is not None:
            progress(f"{job.world_size} processes", index + 1, len(counts))
    return _section(worlds, threads, quick)


def _section(worlds: list[tuple[Job, Measured]], threads: str, quick: bool) -> Section:
    job = worlds[-1][0]
    several = [(j, found) for j, found in worlds if j.world_size > 1]
    notes, link = [], None
    rows: dict[str, list[Spread | None]] = {}
    if several:
        # What the fit does not see: every other size, and the largest world where there are three.
        seen_worlds = several[:-1] if len(several) > 1 else several
        points = [point for j, found in several for point in _reductions(j, found)]
        fitted = [
            point
            for j, found in seen_worlds
            for number, point in enumerate(_reductions(j, found))
            if number % 2 == 0 or point.size == found.gradient_bytes
        ]
        link = fit_link(fitted)
        notes += _fit_notes(link, fitted, points, several)
    for j, found in worlds:
        rows[f"{j.world_size} process{'es' * (j.world_size > 1)}"] = world_row(j, found, link)
    if link is not None:
        rows |= _predictions(link, *several[-1])
    kind = "GPUs" if job.cuda else "CPU processes, gloo on loopback or the network"
    return Section(
        title="scaling: ResNet-18 on more processes",
        header={
            "network": f"ResNet-18, all layers, {job.batch_size} images of {job.image_size} px a process (weak), "
            f"{job.global_batch_size} in all (strong), {worlds[0][1].gradient_bytes / 1e6:.1f} MB of gradients",
            "processes": f"{kind}; {job.num_nodes} node{'s' * (job.num_nodes > 1)}",
            "threads": threads,
            "precision": job.precision,
            "repeats": f"{job.rounds} rounds of {job.steps} steps after {SETTLING} that do not count",
        },
        columns=[
            Column("samples a second, weak", ",.1f"),
            Column("% of as many alone", ".0f"),
            Column("% of as many side by side", ".0f"),
            Column("the same, plain loop", ".0f"),
            Column("times faster, strong", ".2f"),
            Column("all-reduce of gradients, ms", ".1f"),
            Column("ring bound, ms", ".1f"),
        ],
        rows=rows,
        goals=_goals(worlds),
        curves=_curves(link, worlds) if link is not None else [],
        notes=[*notes, "small images and few steps: of no meaning"] if quick else notes,
    )


def _curves(link: Link, worlds: list[tuple[Job, Measured]]) -> list[Curve]:
    """The measured sums and the fit, and the efficiency of worlds up to the largest that is predicted."""
    several = [(job, found) for job, found in worlds if job.world_size > 1]
    measured: dict[str, tuple[list[float], list[float]]] = {}
    fits: dict[str, tuple[list[float], list[float]]] = {}
    for job, found in several:
        sizes = sorted(found.reductions)
        kilobytes, world = [size / 1e3 for size in sizes], job.world_size
        measured[f"{world} processes"] = kilobytes, [statistics.median(found.reductions[s]) * 1e3 for s in sizes]
        fits[f"{world} processes, fit"] = kilobytes, [link.all_reduce_seconds(world, size) * 1e3 for size in sizes]
        bounds = [link.bound_seconds(world, size) * 1e3 for size in sizes]
        fits[f"{world} processes, ring bound"] = kilobytes, bounds
    _, largest = several[-1]
    alone = statistics.median(median_rank(largest.steps[ALONE]))
    grid = [2**power for power in range(11)]
    efficiencies = [100 * alone / predicted_step(link, largest, world) for world in grid]
    shares: dict[str, list[float]] = {"of as many alone": [], "of as many side by side": []}
    for job, found in worlds:
        row = world_row(job, found, None)
        for name, spread in zip(shares, row[1:3], strict=True):
            shares[name].append(spread.median if spread else 100.0)
    counts = [float(job.world_size) for job, _ in worlds]
    return [
        Curve("all-reduce", "kilobytes", "milliseconds", fits, measured, log=True),
        Curve(
            "weak scaling",
            "processes",
            "efficiency, %",
            {"predicted, a core or a GPU each": (grid, efficiencies)},
            {f"% {name}": (counts, values) for name, values in shares.items()},
        ),
    ]


def _goals(worlds: list[tuple[Job, Measured]]) -> list[Goal]:
    for job, found in worlds:
        if job.world_size == 2:
            share, plain = world_row(job, found, None)[2:4]
            assert share is not None
            assert plain is not None
            text = f"{share.median:.0f} % ({share.low:.0f} to {share.high:.0f})"
            return [
                Goal(
                    f"2 processes by DDP: at least {GOAL:.0%} of two independent ones' throughput",
                    text,
                    share.median >= 100 * GOAL,
                ),
                Goal(
                    "2 processes by DDP: no more lost than by a plain loop",
                    f"{text} and {plain.median:.0f} % ({plain.low:.0f} to {plain.high:.0f})",
                    share.median >= plain.median,
                ),
            ]
    return []


def _fit_notes(
    link: Link, fitted: list[Reduction], points: list[Reduction], several: list[tuple[Job, Measured]]
) -> list[str]:
    seen = {(point.world_size, point.size) for point in fitted}
    unseen = [point for point in points if (point.world_size, point.size) not in seen]
    errors = relative_errors(link, unseen)
    job, found = several[-1]
    exposed = exposed_share(several[0][1])
    beside, weak = (statistics.median(median_rank(found.steps[form])) for form in (SIDE_BY_SIDE, WEAK))
    step = beside + exposed * link.all_reduce_seconds(job.world_size, found.gradient_bytes)
    bandwidth = f"{link.bandwidth / 1e9:.2f} GB/s" if link.bandwidth < float("inf") else "no limit found"
    notes = [
        f"link: latency {link.latency * 1e6:.0f} us a message, bandwidth {bandwidth}, from {len(fitted)} sums; on "
        f"{len(unseen)} that it did not see it is {statistics.median(errors):.0%} off in the median, "
        f"{max(errors):.0%} at worst",
        f"{exposed:.0%} of the gradients' all-reduce is not hidden behind the backward pass, measured with "
        f"{several[0][0].world_size} processes",
    ]
    if len(several) > 1:
        notes.append(
            f"a step of {job.world_size} processes was predicted from the smaller worlds' sums as "
            f"{step * 1e3:.0f} ms and took {weak * 1e3:.0f} ms"
        )
    return notes


def predicted_step(link: Link, found: Measured, world_size: int) -> float:
    """Seconds of a step where each process has a core or a GPU to itself and the link is the one measured."""
    alone = statistics.median(median_rank(found.steps[ALONE]))
    return alone + exposed_share(found) * link.all_reduce_seconds(world_size, found.gradient_bytes)


def _predictions(link: Link, job: Job, found: Measured) -> dict[str, list[Spread | None]]:
    """Worlds in which each process has a core or a GPU to itself and the link is the one measured."""
    alone = statistics.median(median_rank(found.steps[ALONE]))
    rows: dict[str, list[Spread | None]] = {}
    for world in PREDICTED:
        summed = link.all_reduce_seconds(world, found.gradient_bytes)
        step = predicted_step(link, found, world)
        rows[f"{world:,} predicted"] = [
            _spread([world * job.batch_size / step]),
            _spread([100 * alone / step]),
            None,
            None,
            None,
            _spread([summed * 1e3]),
            _spread([link.bound_seconds(world, found.gradient_bytes) * 1e3]),
        ]
    return rows
