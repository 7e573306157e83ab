"""Every two settings of a run together give the weights of a plain PyTorch loop, or are refused with a reason.

Each row of the table trains three epochs in float64, with a value for each factor in `tests/support/combinations.py`.
The rows are a covering set: every two values of every two factors stand together in one of them, or are listed as
refused, or as without meaning. A row that stops is resumed from its last checkpoint. What it is compared with is
`tests/support/plain_loop.py`: all weights and buffers at the end, and where the run stopped, and the learning rate of
each update.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.combinations import FACTORS, ON_OFF, PLAIN, Life, cut_of, groups, live_all
from tests.support.pairs import Row, covering_rows, holds, pairs_of_factors, pairs_of_row
from tests.support.plain_loop import train_plainly
from tests.support.ranks import run_ranks

BOUND = 1e-12

WITHOUT_MEANING: list[tuple[Row, str]] = [
    *(({"stop": "to the end", "resumed": how}, "nothing is left to resume") for how in FACTORS["resumed"][1:]),
    *(({"stop": stop, "resumed": "no"}, "what stops is resumed") for stop in FACTORS["stop"][1:]),
    ({"stop": "SIGTERM to one rank", "Preemption": "off"}, "it ends the process"),
    ({"split": "1x1", "resumed": "on another split"}, "several processes cannot share its micro-batch"),
    ({"optimizer": "LBFGS", "resumed": "on another split"}, "it takes one micro-batch"),
    ({"network": "tokens", "SyncBN": "on"}, "there is no BatchNorm"),
]
CLOSURES = "calls its closure several times per update"
OTHER_DEVICES = "saves no position that another number of devices can use"
WITHIN_EPOCH = "cannot be repeated, only that of one stock DataLoader"
REFUSED: list[tuple[Row, Row | None, str]] = [
    *(
        ({"optimizer": "LBFGS", **where}, more, CLOSURES)
        for where, more in (
            ({"split": "1x4"}, {}),
            ({"split": "2x1"}, {}),
            ({"split": "2x2"}, {}),
        )
    ),
    *(
        ({"loader": loader, "resumed": "on another split", "stop": stop}, shown, OTHER_DEVICES)
        for loader in (
            "DataLoader with DistributedSampler",
            "DataLoader with Lightning's sampler",
        )
        for stop in FACTORS["stop"][1:]
        if stop != "max_steps at an epoch's end"
        for shown in ({"split": "2x1"} if stop == "an exception" else None,)
    ),
    *(
        ({"loader": "iterable data set", "stop": stop}, shown, WITHIN_EPOCH)
        for stop in FACTORS["stop"][1:]
        if stop != "max_steps at an epoch's end"
        for shown in ({"resumed": FACTORS["resumed"][1]} if stop == "an exception" else None,)
    ),
    ({"loader": "dict of TrainLoaders", "accumulate": "global_batch_size"}, {}, "cannot tell the batch size"),
    *(
        ({"Lightning's": name, "WeightAveraging": "on"}, {}, "a run has one average")
        for name in FACTORS["Lightning's"]
        if "Averaging" in name
    ),
    ({"Lightning's": "GradientAccumulationScheduler"}, {}, "would both accumulate: keep one GradientAccumulation"),
    (
        {"Lightning's": "BackboneFinetuning", "split": "2x1", "RankConsistency": "on"},
        {},
        "BackboneFinetuning unfreezes, so each rank would train",
    ),
    (
        {"Lightning's": "BackboneFinetuning", "resumed": "as before"},
        {"stop": "an exception"},
        "BackboneFinetuning freezes its layers again where a run resumes",
    ),
]
"""Values that are refused together, what else a run needs to show it (None where another one does), and the reason."""

REFUSALS = (
    "LBFGS on several devices or micro-batches; a DataLoader that resumes within an epoch on another number of"
    " devices; an iterable data set that resumes within an epoch; `global_batch_size` with several"
    " loaders; WeightAveraging beside Lightning's averages;"
    " GradientAccumulationScheduler;"
    " BackboneFinetuning on several devices, or resumed"
)


def statement() -> str:
    """What the page of reproducibility says of splits and stops: what the table shows, from its own values."""

    def every(factor: str) -> str:
        return ", ".join(value for value in FACTORS[factor] if value not in ("none", "no", "to the end"))

    ours = ", ".join(name for name, values in FACTORS.items() if values == ON_OFF)
    by = f"GradientAccumulation by {every('accumulate')}"
    rows = {
        "processes x micro-batches": every("split"),
        "stops": every("stop"),
        "resumes, with ExactCheckpoint": every("resumed"),
        "optimisers": every("optimizer"),
        "schedules": every("schedule"),
        "gradient clipping": every("clipping"),
        "loaders": every("loader"),
        "networks": every("network"),
        "callbacks": f"{by}, {ours}",
        "Lightning's callbacks": every("Lightning's"),
        "**refused**": REFUSALS,
    }
    return (
        "However a run is split, stopped and resumed, its weights, buffers and learning rates are those of a plain"
        f" PyTorch loop, to within {BOUND:.0e} in float64, or it is refused with the reason. Every two of these have"
        " run together:\n\n| | |\n|---|---|\n" + "\n".join(f"| {name} | {values} |" for name, values in rows.items())
    )


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
    errors = [differences(last.weights, reference.end)]
    if len(lives) == 2:
        if not 0 < min(last.rates, default=0) <= first.updates < len(reference.rates):
            problems.append(f"stopped after {first.updates} updates, resumed after {min(last.rates, default=0)}")
        # Averages change the weights as a run ends.
        if "Averaging" not in row["Lightning's"] and row["WeightAveraging"] == "off":
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


def test_the_documentation_states_what_the_table_shows() -> None:
    page = Path(__file__).parents[2].joinpath("docs/scaling/reproducibility.md").read_text()
    assert " ".join(statement().split()) in " ".join(page.split())


@pytest.mark.slow
def test_every_two_settings_together_equal_a_plain_loop_or_are_refused(tmp_path: Path) -> None:
    excluded = [part for part, _ in WITHOUT_MEANING] + [part for part, _, _ in REFUSED]
    rows = covering_rows(FACTORS, [part for part in excluded if part.keys() <= FACTORS.keys()])
    shown = [(part, more, reason) for part, more, reason in REFUSED if more is not None]
    lives = run(dict(enumerate(rows + [PLAIN | part | more for part, more, _ in shown])), tmp_path)
    covered = set().union(*map(pairs_of_row, rows))
    assert [pair for pair in pairs_of_factors(FACTORS, excluded) if pair not in covered] == []
    assert not any(holds(row, part) for row in rows for part in excluded)

    print(f"\n{statement()}\n\nLargest relative difference from the plain loop, of {len(rows)} runs")
    wrong = []
    for number, row in enumerate(rows):
        outcome = judge(row, lives[number])
        print(f"{outcome!s:>8}  {settings_of(row) or 'one process, SGD'}")
        if not outcome.is_equal:
            wrong.append(f"{outcome}: {settings_of(row)}")
    print("\nRefused")
    for number, (part, _, reason) in enumerate(shown, start=len(rows)):
        found = lives[number][-1][0]
        print(f"{settings_of(part)}: {found.refused or 'NOT REFUSED'}")
        if not re.search(reason, found.refused):
            wrong.append(f"expected {reason!r}, found {found.refused!r} {found.failed}: {settings_of(part)}")
    print("\nWithout meaning")
    for part, reason in WITHOUT_MEANING:
        print(f"{settings_of(part)}: {reason}")
    assert not wrong, "\n".join(wrong)
