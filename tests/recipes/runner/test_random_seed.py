import json
import re
from pathlib import Path

from tests.support.command_lines import typed

FIT = "--threads 1 --logger none --schedule constant --precision 32-true"


def _hash(run: Path) -> str:
    last = json.loads((run / "weights.jsonl").read_text().splitlines()[-1])
    return str(last["save"]["sha256"])


def test_a_drawn_seed_repeats_the_run(tmp_path: Path) -> None:
    first, *others = typed(
        tmp_path,
        f"{FIT} --name drawn --seed random --max-steps 3",
        f"{FIT} --name drawn --seed random --resume auto --max-steps 6",
        f"{FIT} --name other --seed random --resume auto --max-steps 6",
    )
    seed = re.search(r", seed (\d+) \(drawn\)", first.out)
    assert seed, first
    (again, kept) = typed(
        tmp_path,
        f"{FIT} --name again --seed {seed[1]} --max-steps 6",
        f"{FIT} --name again --seed random --resume auto --max-steps 9",
    )
    assert [run.status for run in (first, *others, again)] == [0, 0, 0, 0], (first, others, again)
    runs = tmp_path / "runs" / "quadrants"
    assert _hash(runs / "drawn") == _hash(runs / "again") != _hash(runs / "other")
    assert "nothing to resume in runs/quadrants/other: the run starts fresh" in others[1].out + others[1].err
    assert "nothing to resume" not in others[0].out + others[0].err + kept.err
    assert f"--seed is random, and {seed[1]} in the checkpoint" in kept.err
