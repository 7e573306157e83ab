"""Runs and checkpoints from somebody else: their links, values, code and optimizers are rejected in one line."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.test_weights import Runs
from tests.support.command_lines import typed

TRAIN = "--max-epochs 1 --name theirs"


def changed(path: Path, target: Path, *places: tuple[str, Any]) -> Path:
    """A copy of a checkpoint with other values, each at the end of a path of keys."""
    checkpoint = torch.load(path, weights_only=True)
    for place, value in places:
        inner = checkpoint
        *keys, last = place.split("/")
        for key in keys:
            inner = inner[next(name for name in inner if str(name).startswith(key))]
        inner[last] = value
    torch.save(checkpoint, target)
    return target


@pytest.mark.slow
def test_a_received_run_writes_nowhere_else(tmp_path: Path) -> None:
    (trained,) = typed(tmp_path, TRAIN)
    assert trained.status == 0, trained.err
    run = tmp_path / "runs" / "quadrants" / "theirs"
    last = run / "checkpoints" / "last.ckpt"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "notes").write_text("precious")

    links = ("weights.jsonl", ".lock")
    for name in links:
        moved = run / "moved"
        if exists := (run / name).exists():
            (run / name).rename(moved)
        (run / name).symlink_to(outside / "notes")
        (line,) = typed(tmp_path, "--resume auto --name theirs --max-epochs 2")
        assert line.status == 2, line
        assert f"{name} is a link to {outside / 'notes'}" in line.err
        (run / name).unlink()
        if exists:
            moved.rename(run / name)
    assert (outside / "notes").read_text() == "precious"
    (run / "checkpoints").rename(outside / "checkpoints")
    (run / "checkpoints").symlink_to(outside / "checkpoints")
    (line,) = typed(tmp_path, "--resume auto --name theirs --max-epochs 2")
    assert line.status == 2
    assert "checkpoints is a link to" in line.err
    (run / "checkpoints").unlink()
    (outside / "checkpoints").rename(run / "checkpoints")

    a = tmp_path / "a.ckpt"
    cases = (
        ("callbacks/SeedControl", 3, r"cannot be restored: it holds other values than were expected \(TypeError"),
        ("callbacks/WarmupLR/updates", ["many"], r"cannot be restored: .*\(ValueError"),
        ("loops/fit_loop/epoch_progress/current/processed", "two", "processed is 'two', expected a number"),
        ("global_step", float("nan"), "global_step is 'nan', expected a number"),
        ("config", ["a"] * 3, "is not a checkpoint of a run"),
        ("config/lr", Runs(tmp_path / "ran"), r"holds code \(getattr\) and not only weights"),
    )
    for number, (place, value, _) in enumerate(cases):
        changed(last, tmp_path / f"{number}.ckpt", (place, value))
    lines = typed(tmp_path, *(f"--resume {n}.ckpt --max-epochs 2" for n in range(len(cases))))
    for (place, _, message), line in zip(cases, lines, strict=True):
        assert line.status == 2, (place, line)
        assert line.err.count("\n") == 1, line.err
        assert re.search(message, line.err), line.err
    a.write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    lines = typed(tmp_path, f"--resume {a}", *(f"{c} --ckpt {a}" for c in ("validate", "predict")))
    assert all("is not a checkpoint" in line.err and "weights_only" not in line.err for line in lines)
    assert not (tmp_path / "ran").exists()


OWN = "--optimizer tests.support.optimizers.Counting"


@pytest.mark.slow
def test_a_received_run_imports_no_optimizer(tmp_path: Path) -> None:
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
