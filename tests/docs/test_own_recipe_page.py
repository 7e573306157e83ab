"""The recipe of "Your own recipe" keeps the promise: splits and kills change nothing that it learns."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.code_blocks import ROOT, blocks_of
from tests.support.ranks import run_ranks
from tests.support.tables import equal

# 322 rows in updates of 64, twice over: the sixth update of an epoch holds two rows.
COMMON = {"max_epochs": 2, "precision": "64-true", "accelerator": "cpu", "verbose": False}
FIT = "fit(Progress, Patients, name={name!r}, resume={resume!r}, callbacks={callbacks}, **{settings!r})"
# Accumulated windows of 64 rows, in one process and in two, of micro-batches of 64, 32, 16 and 8 rows.
SPLITS = {1: [64, 16], 2: [32, 8]}

SCRIPT = """
import os, signal
import lightning.pytorch as pl
from diabetes import Patients, Progress
from recipes import fit

class Kill(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

"""


def code() -> str:
    page = (ROOT / "docs/start/own-recipe.md").read_text()
    return "".join(block.text for block in blocks_of(page) if block.title == "diabetes.py")


def trained(devices: int, batch_size: int) -> str:
    """A line that trains with a global batch of 64 rows."""
    settings = COMMON | {"devices": devices, "batch_size": batch_size, "global_batch_size": 64}
    return FIT.format(name=f"{devices}x{batch_size}", resume=None, callbacks=[], settings=settings)


def execute(folder: Path, *lines: str) -> None:
    """Run the lines in this process."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    exec(SCRIPT + "\n".join(lines), {"__name__": "__main__"})


def last(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / "runs/diabetes" / name / "checkpoints/last.ckpt", weights_only=True)


@pytest.mark.slow
def test_it_learns_the_same_on_any_split_or_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "diabetes.py").write_text(code())
    killed = {"name": "killed", "settings": COMMON | {"batch_size": 64, "save_every": "3 steps"}}
    with pytest.raises(AssertionError, match="died with exit status -9"):
        run_ranks(execute, 1, tmp_path, FIT.format(resume=None, callbacks="[Kill()]", **killed))
    assert last(tmp_path, "killed")["global_step"] == 6
    alone = [trained(1, batch_size) for batch_size in SPLITS[1]]
    run_ranks(execute, 1, tmp_path, *alone, FIT.format(resume="auto", callbacks=[], **killed))
    run_ranks(execute, 2, tmp_path, *(trained(2, batch_size) for batch_size in SPLITS[2]))

    expected = last(tmp_path, "1x64")["state_dict"]
    for devices, batch_size in [(1, 16), (2, 32), (2, 8)]:
        found = last(tmp_path, f"{devices}x{batch_size}")["state_dict"]
        error = max(float((found[name] - value).abs().max()) for name, value in expected.items())
        print(f"{devices} x {batch_size}: {error:.0e}")
        assert error < 1e-12, (devices, batch_size)
    assert equal(last(tmp_path, "killed")["state_dict"], expected)
