"""--callbacks, --early-stopping and --logger on the command line, in files of settings and after a resume."""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import DummyLogger

from recipes import fit
from recipes.cli import run_folder
from recipes.cli.run_folder import logger_names
from tests.support.command_lines import in_tensorboard, typed

RUNS = Path("runs/quadrants")
COMMON = "--num-classes 2 --precision 32 --schedule constant"
CALLBACKS = "--callbacks+=LearningRateMonitor --callbacks.log-momentum=true --callbacks+=EarlyStopping"
CALLBACKS += " --callbacks.monitor=val/loss --callbacks.patience=1"


def results(folder: Path, name: str) -> dict:
    return json.loads((folder / RUNS / name / "results.json").read_text())


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / RUNS / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def test_callbacks_by_name_run_and_are_in_all_four_places_and_taken_back_from_the_file(tmp_path):
    config = RUNS / "run/config.yaml"
    ended = typed(
        tmp_path,
        f"{COMMON} {CALLBACKS} --lr 1 --max-epochs 30 --name run",
        f"--config {config} --name again",
        f"--resume {RUNS}/run/checkpoints/last.ckpt --max-epochs 31",
        f"--config {config} --resume {RUNS}/run/checkpoints/last.ckpt --max-epochs 31",
    )
    assert [status for status, _, _ in ended] == [0, 0, 2, 0], ended
    settings = yaml.safe_load((tmp_path / config).read_text())
    monitor, stopping = settings["callbacks"]
    assert monitor["class_path"] == "lightning.pytorch.callbacks.LearningRateMonitor"
    assert monitor["init_args"]["log_momentum"] is True
    assert stopping["init_args"]["patience"] == 1
    checkpoint = torch.load(tmp_path / RUNS / "again/checkpoints/last.ckpt", weights_only=True)
    for name in ("run", "again"):
        saved = yaml.safe_load((tmp_path / RUNS / name / "config.yaml").read_text())["callbacks"]
        shown = json.loads(in_tensorboard(tmp_path / RUNS / name)["callbacks"])
        assert saved == results(tmp_path, name)["config"]["callbacks"] == shown == settings["callbacks"]
        assert "val/loss did not improve" in results(tmp_path, name)["stopped_early"]
    assert checkpoint["config"]["callbacks"] == settings["callbacks"]
    assert all(torch.equal(value, checkpoint["state_dict"][name]) for name, value in weights(tmp_path, "again").items())
    assert "was trained with --callbacks (LearningRateMonitor, EarlyStopping)" in ended[2][2]


def test_early_stopping_ends_a_resumed_run_where_it_ends_one_that_was_not_interrupted(tmp_path):
    stops = "--dataset digits --precision 32 --schedule constant --lr 0.5 --limit-train-batches 2 --logger none"
    stops += " --early-stopping val/loss"
    last = "runs/plain/cut/checkpoints/last.ckpt"
    ended = typed(
        tmp_path,
        f"{stops} --max-epochs 30 --patience 1 --name whole",
        f"{stops} --max-epochs 1 --patience 1 --name cut",
        f"--resume {last} --max-epochs 30",
        f"{stops} --max-epochs 30 --name cut --resume auto",
        f"{stops} --max-epochs 30 --patience 3 --name cut --resume auto",
        f"{stops} --max-epochs 30 --patience 3 --name patient",
        recipe="tests.support.plain_recipe:Plain",
        data="datamodules:MNISTDataModule",
    )
    assert [each.status for each in ended] == [0] * 6, ended
    assert "stopped early  " in ended[2].out
    assert "has finished" in ended[3].out
    assert "resuming from" in ended[4].out
    cut, patient = (tmp_path / "runs/plain" / name for name in ("cut", "patient"))
    lines = [json.loads((run / "results.json").read_text())["stopped_early"] for run in (cut, patient)]
    assert lines[0] == lines[1]
    assert "val/loss did not improve in the last 3 records" in lines[0]
    one, other = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (cut, patient))
    assert one["global_step"] == other["global_step"]
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())


def test_a_mistake_is_answered_with_what_to_type(tmp_path):
    mistakes = {
        "--early-stopping val/acc": (1, "--early-stopping val/acc is no score of this run, whose scores are train/"),
        "--patience 2": (2, "--patience is a number of validations, 1 or more, for --early-stopping SCORE"),
        "--callbacks+=EarlyStoping": (2, "--callbacks EarlyStoping is not the name of a class; did you mean EarlySt"),
        "--callbacks+=EarlyStopping": (2, "--callbacks: the following arguments are required: monitor"),
        "--logger tensorbord": (2, "--logger tensorbord: expected some of tensorboard, csv, wandb"),
    }
    ended = typed(tmp_path, *(f"{COMMON} --max-epochs 1 {args}" for args in mistakes))
    for (status, message), line in zip(mistakes.values(), ended, strict=True):
        assert line.status == status
        assert message in line.err
        assert line.err.count("\n") == 1


def test_loggers_are_chosen_by_name_and_a_missing_package_is_named(tmp_path, monkeypatch):
    ended = typed(
        tmp_path,
        f"{COMMON} --max-epochs 1 --logger csv --name table",
        f"{COMMON} --max-epochs 1 --logger none --name nothing",
    )
    assert [status for status, _, _ in ended] == [0, 0], ended
    written = {name: {path.name for path in (tmp_path / RUNS / name).iterdir()} for name in ("table", "nothing")}
    tables = {"val_per_class.csv", "val_mistakes.csv", "report.html"}
    assert written["nothing"] == {".lock", "config.yaml", "checkpoints", "results.json", "weights.jsonl"} | tables
    assert written["table"] == written["nothing"] | {"metrics.csv"}
    assert "TensorBoard" not in ended[0][1]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--logger wandb needs another package: pip install wandb"):
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
    monkeypatch.setattr(run_folder, "WandbLogger", Recorded)
    monkeypatch.setattr(run_folder, "_LOGGERS", {"wandb": ()})
    monkeypatch.chdir(tmp_path)
    Recorded.made.clear()
    common = {"data": None, "dataset": "digits", "verbose": False, "logger": "wandb", "limit_train_batches": 1}
    for epochs, name, resume in ((1, "run", "none"), (2, "run", "auto"), (1, "other", "none")):
        fit("mnist", **common, max_epochs=epochs, name=name, resume=resume)
    first, resumed, other = Recorded.made
    assert first == resumed == {"name": "run", "id": first["id"], "project": "mnist", "resume": "allow"}
    assert other["id"] != first["id"]
