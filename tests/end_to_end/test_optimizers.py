"""Optimisers on the command line: a user's own class, and received files."""

import json
from pathlib import Path

import pytest

from tests.support.command_lines import typed

OWN = "--optimizer tests.support.optimizers.Counting"


@pytest.mark.slow
def test_an_own_optimiser_is_resumed_where_it_is_typed_and_a_received_run_imports_none(tmp_path: Path) -> None:
    def own(*commands: str) -> list[tuple[int, str]]:
        return [(done.status, done.out + done.err) for done in typed(tmp_path, *commands)]

    # An epoch has seven updates.
    settings = (
        f"{OWN} --optimizer-args '{{scale: 0.5}}' --lr 0.01 --schedule multistep "
        "--schedule-args '{milestones: \"5 steps, 11 steps\"}'"
    )
    commands = [f"{settings} --name whole --max-epochs 2", f"{settings} --name stopped --max-epochs 2 --max-steps 9"]
    assert [status for status, _ in own(*commands)] == [0, 0]

    checkpoint = "runs/quadrants/stopped/checkpoints/last.ckpt"
    resume = "--name stopped --resume auto --max-steps=-1"
    inference, received, resumed = own(f"validate --ckpt {checkpoint}", resume, f"{resume} {OWN}")
    assert received[0] == 2
    assert "a checkpoint must not import tests.support.optimizers; if you trust it, pass --optimizer" in received[1]
    assert (inference[0], resumed[0]) == (0, 0)
    files = [tmp_path / f"runs/quadrants/{name}/weights.jsonl" for name in ("whole", "stopped")]
    whole, stopped = (json.loads(file.read_text().splitlines()[-1])["save"] for file in files)
    assert whole == stopped
