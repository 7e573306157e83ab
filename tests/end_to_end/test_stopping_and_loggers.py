"""--patience and --logger on the command line, in files of settings and after a resume; and a full disk.

The disk is a small tmpfs in a namespace of its own, which needs root and Linux.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from recipes import fit
from recipes.runner import loggers
from recipes.runner.loggers import logger_names
from tests.support.command_lines import typed
from tests.support.tables import equal

RUNS = Path("runs/quadrants")
COMMON = "--num-classes 2 --precision 32 --schedule constant"


def test_a_resumed_run_stops_early_where_an_unstopped_one_does(tmp_path):
    stops = "--dataset digits --precision 32 --schedule constant --lr 0.5 --limit-train-batches 2 --logger none"
    last = "runs/plain/cut/checkpoints/last.ckpt"
    ended = typed(
        tmp_path,
        f"{stops} --max-epochs 30 --patience 1 --name whole",
        f"{stops} --max-epochs 1 --patience 1 --name cut",
        f"--resume {last} --max-epochs 30",
        f"{stops} --max-epochs 30 --name cut --resume auto",
        f"{stops} --max-epochs 30 --patience 3 --name cut --resume auto",
        f"{stops} --max-epochs 30 --patience 3 --name patient",
        "test --ckpt runs/plain/patient/checkpoints/best.ckpt --limit-val-batches 0",
        recipe="tests.support.plain_recipe:Plain",
        data="datamodules:MNISTDataModule",
    )
    assert [each.status for each in ended] == [0] * 7, ended
    assert "stopped early  " in ended[2].out
    assert "has finished" in ended[3].out
    assert "resuming from" in ended[4].out
    cut, patient = (tmp_path / "runs/plain" / name for name in ("cut", "patient"))
    lines = [json.loads((run / "results.json").read_text())["stopped_early"] for run in (cut, patient)]
    assert lines[0] == lines[1]
    assert "val/accuracy did not improve in the last 3 records" in lines[0]
    one, other = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (cut, patient))
    assert one["global_step"] == other["global_step"]
    assert equal(one["state_dict"], other["state_dict"])


def test_a_mistake_is_answered_with_what_to_type(tmp_path):
    mistakes = {
        "--patience 2 --limit-val-batches 0": (2, "--patience counts validations, and this run has none"),
        "--logger tensorbord": (2, "--logger tensorbord: expected some of tensorboard, csv, wandb"),
    }
    ended = typed(tmp_path, *(f"{COMMON} --max-epochs 1 {args}" for args in mistakes))
    for (status, message), line in zip(mistakes.values(), ended, strict=True):
        assert line.status == status
        assert message in line.err
        assert line.err.count("\n") == 1


def test_loggers_are_chosen_by_name(tmp_path):
    chosen = (("csv", "table"), ("none", "nothing"))
    ended = typed(tmp_path, *(f"{COMMON} --max-epochs 1 --logger {logger} --name {name}" for logger, name in chosen))
    assert [status for status, _, _ in ended] == [0, 0], ended
    written = {name: {path.name for path in (tmp_path / RUNS / name).iterdir()} for name in ("table", "nothing")}
    tables = {"val_per_class.csv", "val_mistakes.csv", "report.html", "figures"}
    assert written["nothing"] == {".lock", "config.yaml", "checkpoints", "results.json", "weights.jsonl"} | tables
    assert written["table"] == written["nothing"] | {"metrics.csv", "summary.csv"}
    assert "TensorBoard" not in ended[0][1]


def test_a_logger_names_the_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="logger='wandb' needs another package: pip install wandb"):
        logger_names("csv,wandb")


class Recorded(DummyLogger):
    """Stands for `WandbLogger`: keeps the arguments that it was made with."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, name: str, save_dir: Path, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.made.append(options | {"name": name})

    @property
    def version(self) -> str:
        return str(self.options["id"])


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "WandbLogger", Recorded)
    monkeypatch.setattr(loggers, "find_spec", str)
    monkeypatch.chdir(tmp_path)
    Recorded.made.clear()
    common = {"data": None, "dataset": "digits", "verbose": False, "logger": "wandb", "limit_train_batches": 1}
    for epochs, name, resume in ((1, "run", "none"), (2, "run", "auto"), (1, "other", "none")):
        fit("mnist", **common, max_epochs=epochs, name=name, resume=resume)
    first, resumed, other = Recorded.made
    assert first == resumed == {"name": "run", "id": first["id"], "project": "mnist", "resume": "allow"}
    assert other["id"] != first["id"]


ROOT = Path(__file__).parents[2]
DIGITS = "--dataset digits --accelerator cpu --precision 32-true --no-enable-progress-bar"


def _own_mounts() -> bool:
    return (
        bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    )


@pytest.mark.slow
@pytest.mark.skipif(not _own_mounts(), reason="only root may mount a small disk (unshare -m)")
def test_a_run_trains_to_its_end_though_its_disk_fills(tmp_path: Path) -> None:
    script = f"""
mount -t tmpfs -o size=40m tmpfs . && cd $PWD
while [ ! -e runs/mnist/f/checkpoints/last.ckpt ]; do sleep .1; done && head -c 100m /dev/zero > fill &
{sys.executable} -m recipes.mnist {DIGITS} --max-epochs 8 --name f > log 2>&1
echo "status $?"; rm fill; sed s/^/log:/ log"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["unshare", "-m", "bash", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    # The weights of the last epochs are not saved, and nothing is left that could say so.
    assert "status 1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
