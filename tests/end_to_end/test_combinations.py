"""Every two settings of a run together give the weights of a plain PyTorch loop.

Each row of the table trains three epochs in float64, with a value for each factor in `tests/support/combinations.py`.
The rows are a covering set: every two values of every two factors stand together in one of them, or have no meaning. A
row that stops is resumed from its last checkpoint. What it is compared with is `tests/support/plain_loop.py`: all
weights and buffers at the end, and where the run stopped, and the learning rate of each update.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.combinations import FACTORS, PLAIN, Life, cut_of, groups, live_all
from tests.support.pairs import Row, covering_rows
from tests.support.plain_loop import train_plainly
from tests.support.ranks import run_ranks
from tests.support.tables import equal

BOUND = 1e-12

WITHOUT_MEANING: list[Row] = [
    *({"stop": "to the end", "resumed": how} for how in FACTORS["resumed"][1:]),
    *({"stop": stop, "resumed": "no"} for stop in FACTORS["stop"][1:]),
    {"stop": "SIGTERM to one rank", "Preemption": "off"},  # It ends the process.
    {"split": "1x1", "resumed": "on another split"},  # Several processes cannot share its micro-batch.
    {"network": "tokens", "SyncBN": "on"},
]


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
