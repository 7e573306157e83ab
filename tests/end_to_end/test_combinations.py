"""Pairwise combinations of settings give the weights of a plain PyTorch loop.

Each row of the table trains three epochs in float64, with a value for each factor in `tests/support/combinations.py`.
The rows are a covering set: every two values of every two factors stand together in one of them, or have no meaning. A
row that stops is resumed from its last checkpoint. What it is compared with is `train_plainly`: all weights and
buffers at the end, and where the run stopped, and the learning rate of each update.
"""

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from datamodules.loading.sampling import epoch_order, range_of_rank
from tests.support.combinations import (
    EPOCHS,
    EVEN_SAMPLES,
    FACTORS,
    GLOBAL_BATCH,
    OPTIMIZERS,
    PLAIN,
    SAMPLES,
    WARMUP,
    Cut,
    Life,
    Settings,
    cut_of,
    groups,
    layers,
    live_all,
    samples,
    schedule_of,
)
from tests.support.ranks import run_ranks
from tests.support.tables import PADDING, equal, loss_of

BOUND = 1e-12

Row = dict[str, str]
"""A value for each factor."""

_CANDIDATES = 20
"""Rows that are built before the one is taken that covers most."""


def covering_rows(factors: Mapping[str, Sequence[str]], excluded: Sequence[Mapping[str, str]] = ()) -> list[Row]:
    """Rows that hold every pair of values and no excluded part; the same rows for the same arguments.

    Most faults of a configuration need two of its settings (Kuhn, Wallace and Gallo, 2004), and all pairs of a dozen
    factors fit into some dozens of rows, where all combinations would be millions.

    Greedy: each row starts from a pair that is missing, and each further value is the one that adds most pairs.

    Args:
        factors: the values of each.
        excluded: values that must not occur together.

    Raises:
        ValueError: a pair that is not excluded cannot occur in any row.

    Example:
        >>> rows = covering_rows({"a": "12", "b": "34", "c": "56"}, excluded=[{"a": "1", "b": "3"}])
        >>> len(rows), {(row["a"], row["b"]) for row in rows} == {("1", "4"), ("2", "3"), ("2", "4")}
        (5, True)
    """
    choices = random.Random(1)
    values = [(factor, value) for factor in factors for value in factors[factor]]
    pairs = [frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]]

    def allowed(row: Mapping[str, str]) -> bool:
        return not any(all(row.get(factor) == value for factor, value in part.items()) for part in excluded)

    missing = dict.fromkeys(pair for pair in pairs if allowed(dict(pair)))

    def complete(row: Row) -> Row | None:
        others = [factor for factor in factors if factor not in row]
        choices.shuffle(others)
        for factor in others:
            possible = [value for value in factors[factor] if allowed(row | {factor: value})]
            if not possible:
                return None
            gain = {v: sum(frozenset(((factor, v), other)) in missing for other in row.items()) for v in possible}
            row[factor] = max(possible, key=lambda value: (gain[value], choices.random()))
        return {factor: row[factor] for factor in factors}

    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        found = [row for _ in range(_CANDIDATES) if (row := complete(dict(sorted(first)))) is not None]
        if not found:
            raise ValueError(f"{dict(first)} cannot occur in a row: exclude it, too, with its reason")
        covered = [{frozenset(pair) for pair in itertools.combinations(row.items(), 2)} for row in found]
        best = max(range(len(found)), key=lambda number: len(covered[number] & missing.keys()))
        rows.append(found[best])
        for pair in covered[best]:
            missing.pop(pair, None)
    return rows


WITHOUT_MEANING: list[Row] = [
    *({"stop": "to the end", "resumed": how} for how in FACTORS["resumed"][1:]),
    *({"stop": stop, "resumed": "no"} for stop in FACTORS["stop"][1:]),
    {"stop": "SIGTERM to one rank", "Preemption": "off"},  # It ends the process.
    {"split": "1x1", "resumed": "on another split"},  # Several processes cannot share its micro-batch.
    {"network": "tokens", "SyncBN": "on"},
]


class Reference(NamedTuple):
    """What a run is to be.

    Attributes:
        after: parameters and buffers after each number of updates.
        rates: the learning rate of each update.
    """

    after: list[dict[str, Tensor]]
    rates: list[float]


def _order(settings: Settings, epoch: int) -> Tensor:
    """The samples of an epoch in their order; `DistributedSampler` documents its own."""
    if settings["loader"] == "DataLoader":
        return torch.arange(EVEN_SAMPLES)
    if settings["loader"] == "DataLoader with DistributedSampler":
        return torch.randperm(EVEN_SAMPLES, generator=torch.Generator().manual_seed(1 + epoch))
    return epoch_order(SAMPLES, seed=1, epoch=epoch)


def _forward_passes(settings: Settings, update: Tensor, cut: Cut) -> list[Tensor]:
    """The forward passes of an update in the order of their numbers."""
    numbered = update.split(GLOBAL_BATCH // cut.micro_batches // cut.processes)
    ranges = [range_of_rank(len(numbered), rank, cut.processes) for rank in range(cut.processes)]
    by_rank = [list(numbered[first:stop]) for first, stop in ranges]
    if settings["SyncBN"] == "on":
        return [
            torch.cat([part for part in at_once if part is not None]) for at_once in itertools.zip_longest(*by_rank)
        ]
    return [part for parts in by_rank for part in parts if len(part)]


def train_plainly(settings: Settings, cut_at: Callable[[int], Cut]) -> Reference:
    """Train a row in one process by plain PyTorch, without Trainer and callbacks.

    Each update is one backward pass of the loss summed over the update's targets and divided by their number. Only the
    statistics of batch normalization are those of a forward pass: the samples of one micro-batch, or those that all
    processes see at once with `SyncBN`. So the update's forward pass is cut as the row's are.

    Args:
        cut_at: how the forward passes of an update are cut, by its number.
    """
    inputs, targets = samples(settings)
    backbone, head = layers(settings)
    network = nn.Sequential(OrderedDict(backbone=backbone, head=head))
    optimizer = OPTIMIZERS[settings["optimizer"]](network.parameters())
    scheduler, interval = schedule_of(settings["schedule"], optimizer)
    after, rates = [_state(network)], []

    def validate(epoch: int) -> float:
        network.eval()
        with torch.no_grad():
            loss = float(loss_of(network(inputs[-6:]), targets[-6:]))
        network.train()
        if epoch < 1 and settings["FreezeLayers"] == "on":
            backbone.eval()
        return loss

    loss = math.nan
    for epoch in range(EPOCHS):
        if settings["FreezeLayers"] == "on":
            backbone.train(epoch >= 1).requires_grad_(epoch >= 1)
        order = _order(settings, epoch)
        updates = order.split(GLOBAL_BATCH)
        for number, rows in enumerate(updates):
            cut = cut_at(len(rates))
            passes = _forward_passes(settings, rows, cut)
            count = sum((targets[part] != PADDING).sum() for part in passes)
            total = torch.zeros((), dtype=torch.float64)
            for part in passes:
                total = total + loss_of(network(inputs[part]), targets[part], reduction="sum")
            optimizer.zero_grad()
            (total / count).backward()
            if settings["clipping"] == "norm":
                nn.utils.clip_grad_norm_(network.parameters(), 0.3)
            rate = optimizer.param_groups[0]["lr"]
            if settings["WarmupLR"] == "on" and len(rates) < WARMUP:
                optimizer.param_groups[0]["lr"] = rate * (0.01 + 0.99 * len(rates) / WARMUP)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
            if scheduler and interval == "step":
                scheduler.step()
            last = number + 1 == len(updates)
            if last or settings["stop"] == "EarlyStopping":
                loss = validate(epoch)
            after.append(_state(network))
        if scheduler and interval == "epoch":
            scheduler.step(*((loss,) if settings["schedule"] == "ReduceLROnPlateau" else ()))
    return Reference(after, rates)


def _state(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[float]:
    """The largest of each parameter and buffer, relative to its largest value; NaN where something is not finite."""
    pairs = [(found[name].double(), value.double()) for name, value in expected.items()]
    return [float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)) for ours, wanted in pairs]


def run(rows: Mapping[int, Row], folder: Path) -> dict[int, list[list[Life]]]:
    """Each row's lives, one or two, by rank."""
    lives: dict[int, list[list[Life]]] = {number: [] for number in rows}
    for resumed in (False, True):
        ended = {n for n, found in lives.items() if found and (found[0][0].rejected or found[0][0].failed)}
        going_on = {n: row for n, row in rows.items() if not resumed or (row["resumed"] != "no" and n not in ended)}
        for processes, part in groups(going_on, resumed):
            ranks = run_ranks(live_all, processes, part, folder, resumed, timeout=600)
            for number in part:
                lives[number].append([rank[number] for rank in ranks])
    return lives


def judge(row: Row, lives: list[list[Life]]) -> tuple[float, list[str]]:
    """The largest difference of a weight, buffer or learning rate from the plain loop, and what else is wrong."""
    if ended := [life.rejected or life.failed for ranks in lives for life in ranks if life.rejected or life.failed]:
        return math.nan, ended[:1]
    first, last = lives[0][0], lives[-1][0]
    reference = train_plainly(row, lambda update: cut_of(row, resumed=update >= first.updates))
    problems = []
    if not all(equal(life.weights, ranks[0].weights) for ranks in lives for life in ranks):
        problems.append("the ranks hold different weights or buffers")
    errors = differences(last.weights, reference.after[-1])
    if len(lives) == 2:
        if not 0 < min(last.rates, default=0) <= first.updates < len(reference.rates):
            problems.append(f"stopped after {first.updates} updates, resumed after {min(last.rates, default=0)}")
        errors += differences(first.weights, reference.after[first.updates])
    rates = first.rates | last.rates
    if sorted(rates) == list(range(len(reference.rates))):
        used = torch.tensor([rates[update] for update in range(len(rates))], dtype=torch.float64)
        errors.append(float((used / torch.tensor(reference.rates, dtype=torch.float64) - 1).abs().max()))
    else:
        problems.append(f"made {len(rates)} updates of {len(reference.rates)}")
    return max(errors) if all(map(math.isfinite, errors)) else math.inf, problems


def settings_of(row: Mapping[str, str]) -> str:
    """What differs from the simplest run."""
    return ", ".join(
        f"{name}={value}" if value != "on" else name for name, value in row.items() if value != PLAIN[name]
    )


def test_the_documentation_names_what_the_table_combines() -> None:
    page = Path(__file__).parents[2].joinpath("docs/scaling/proofs.md").read_text()
    names = {value for values in FACTORS.values() for value in values} | FACTORS.keys()
    meant = {"none", "no", "off", "on", "to the end", "split", "stop", "optimizer", "accumulate", "clipping", "resumed"}
    assert [name for name in names - meant if name not in page] == []


@pytest.mark.slow
def test_every_two_settings_together_equal_a_plain_loop(tmp_path: Path) -> None:
    rows = covering_rows(FACTORS, WITHOUT_MEANING)
    lives = run(dict(enumerate(rows)), tmp_path)
    print(f"\nLargest relative difference from the plain loop, of {len(rows)} runs")
    wrong = []
    for number, row in enumerate(rows):
        error, problems = judge(row, lives[number])
        print(f"{error:8.0e}  {settings_of(row) or 'one process, SGD'}")
        if problems or not error <= BOUND:
            wrong.append(f"{error:.0e} {'; '.join(problems)}: {settings_of(row)}")
    assert not wrong, "\n".join(wrong)
