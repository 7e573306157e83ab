"""Every two settings of a run together give the weights of a plain PyTorch loop, or are refused with a reason.

Each row of the table trains three epochs in float64, with a value for each factor in `tests/support/combinations.py`.
The rows are a covering set: every two values of every two factors stand together in one of them, or are listed as
refused, or have no meaning. A row that stops is resumed from its last checkpoint. What it is compared with is
`tests/support/plain_loop.py`: all weights and buffers at the end, and where the run stopped, and the learning rate of
each update.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.combinations import FACTORS, PLAIN, Life, cut_of, groups, live_all
from tests.support.pairs import Row, covering_rows
from tests.support.plain_loop import train_plainly
from tests.support.ranks import run_ranks

BOUND = 1e-12

WITHOUT_MEANING: list[Row] = [
    *({"stop": "to the end", "resumed": how} for how in FACTORS["resumed"][1:]),
    *({"stop": stop, "resumed": "no"} for stop in FACTORS["stop"][1:]),
    {"stop": "SIGTERM to one rank", "Preemption": "off"},  # It ends the process.
    {"split": "1x1", "resumed": "on another split"},  # Several processes cannot share its micro-batch.
    {"network": "tokens", "SyncBN": "on"},
]
REFUSED = [{"loader": loader, "resumed": "on another split"} for loader in FACTORS["loader"][1:]]
REASON = "saves no position that another number of devices can use"


class Outcome(NamedTuple):
    """A row beside its reference.

    Attributes:
        error: the largest difference of a weight, buffer or learning rate, relative to the largest of its tensor.
        refused: why it was refused.
        problems: what else is wrong.
    """

    error: float
    refused: str
    problems: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether the row trained what the plain loop does."""
        return not self.refused and not self.problems and self.error <= BOUND

    def __str__(self) -> str:
        return "; ".join([self.refused or f"{self.error:.0e}", *self.problems])


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest value; infinite where something is not finite."""
    found, expected = found.double(), expected.double()
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest of all parameters and buffers."""
    return max(difference(found[name], value) for name, value in expected.items())


def run(rows: Mapping[int, Row], folder: Path) -> dict[int, list[list[Life]]]:
    """Each row's lives, one or two, by rank."""
    lives: dict[int, list[list[Life]]] = {number: [] for number in rows}
    for resumed in (False, True):
        ended = {n for n, found in lives.items() if found and (found[0][0].refused or found[0][0].failed)}
        going_on = {n: row for n, row in rows.items() if not resumed or (row["resumed"] != "no" and n not in ended)}
        for processes, part in groups(going_on, resumed):
            ranks = run_ranks(live_all, processes, part, folder, resumed, timeout=600)
            for number in part:
                lives[number].append([rank[number] for rank in ranks])
    return lives


def judge(row: Row, lives: list[list[Life]]) -> Outcome:
    """Compare a row with the plain loop."""
    for ranks in lives:
        for life in ranks:
            if life.refused or life.failed:
                return Outcome(float("nan"), life.refused, [life.failed] if life.failed else [])
    first, last = lives[0][0], lives[-1][0]
    reference = train_plainly(row, lambda update: cut_of(row, resumed=update >= first.updates))
    problems = []
    for ranks in lives:
        for life in ranks[1:]:
            if not all(torch.equal(life.weights[name], value) for name, value in ranks[0].weights.items()):
                problems.append("the ranks hold different weights or buffers")
    errors = [differences(last.weights, reference.after[-1])]
    if len(lives) == 2:
        if not 0 < min(last.rates, default=0) <= first.updates < len(reference.rates):
            problems.append(f"stopped after {first.updates} updates, resumed after {min(last.rates, default=0)}")
        errors.append(differences(first.weights, reference.after[first.updates]))
    rates = first.rates | last.rates
    if sorted(rates) == list(range(len(reference.rates))):
        used = torch.tensor([rates[update] for update in range(len(rates))], dtype=torch.float64)
        errors.append(float((used / torch.tensor(reference.rates, dtype=torch.float64) - 1).abs().max()))
    else:
        problems.append(f"made {len(rates)} updates of {len(reference.rates)}")
    return Outcome(max(errors), "", problems)


def settings_of(row: Mapping[str, str]) -> str:
    """What differs from the simplest run."""
    return ", ".join(
        f"{name}={value}" if value != "on" else name for name, value in row.items() if value != PLAIN[name]
    )


def test_the_documentation_names_what_the_table_combines() -> None:
    page = Path(__file__).parents[2].joinpath("docs/scaling/reproducibility.md").read_text()
    names = {value for values in FACTORS.values() for value in values} | FACTORS.keys()
    meant = {"none", "no", "off", "on", "to the end", "split", "stop", "optimizer", "accumulate", "clipping", "resumed"}
    assert [name for name in names - meant if name not in page] == []


@pytest.mark.slow
def test_every_two_settings_together_equal_a_plain_loop_or_are_refused(tmp_path: Path) -> None:
    rows = covering_rows(FACTORS, WITHOUT_MEANING + REFUSED)
    refused = [PLAIN | part | {"split": "2x1", "stop": "an exception"} for part in REFUSED]
    lives = run(dict(enumerate(rows + refused)), tmp_path)
    print(f"\nLargest relative difference from the plain loop, of {len(rows)} runs")
    wrong = []
    for number, row in enumerate(rows):
        outcome = judge(row, lives[number])
        print(f"{outcome!s:>8}  {settings_of(row) or 'one process, SGD'}")
        if not outcome.is_equal:
            wrong.append(f"{outcome}: {settings_of(row)}")
    for number, row in enumerate(refused, start=len(rows)):
        found = lives[number][-1][0]
        if REASON not in found.refused:
            wrong.append(f"expected {REASON!r}, found {found.refused!r} {found.failed}: {settings_of(row)}")
    assert not wrong, "\n".join(wrong)
