"""The command line as a user types it: on the bundled digits, offline, in an empty folder."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.support.agents import weights_of
from tests.support.command_lines import Typed, type_line, typed
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
CLASSES = {"recipe": "recipes:MNISTClassifier", "data": "datamodules:MNISTDataModule"}
QUICK = "--max-epochs 1 --network default --batch-size 128"
FIRST, BEST = "runs/mnist/first", "runs/mnist/first/checkpoints/best.ckpt"
# Data set and precision of the first run are left open; without MNIST's files the data set is the digits.
LATER = {
    "the same name": f"{QUICK} --dataset digits --name first",
    "test": f"test --ckpt {BEST} --output scores.json",
    "another kind": "test --ckpt weights.pt",
    "another network": f"test --ckpt {BEST} --network classic",
    "resume a folder": f"--resume {FIRST}",
    "test a folder": f"test --ckpt {FIRST}",
    "out.json": f"predict --ckpt {BEST} --output out.json light.png dark.jpg",
    "out.csv": f"predict --ckpt {BEST} --output out.csv --invert dark.jpg light.png",
    "diverges": f"{QUICK} --dataset digits --lr 1e6 --name div --log-every-n-steps 1",
    "settings": f"--config {FIRST}/config.yaml --print-config --batch-size 32",
}


class Session(NamedTuple):
    """A folder in which a run was made and more was typed; `touched` are the run's files that changed then."""

    folder: Path
    first: Typed
    later: dict[str, Typed]
    touched: list[Path]


def _write_pictures(folder: Path) -> None:
    digit = Image.fromarray((load_digits().images[0] * 15).astype("uint8")).resize((90, 90), Image.Resampling.BILINEAR)
    light = Image.new("L", (140, 200), 0)
    light.paste(digit, (20, 60))
    light.save(folder / "light.png")
    ImageOps.invert(light).convert("RGB").save(folder / "dark.jpg")


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def _times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("trained")
    (first,) = typed(folder, f"{QUICK} --no-download --name first --log-every-n-steps 2", **CLASSES)
    assert first.status == 0, first.err
    torch.save({"weight": torch.zeros(2)}, folder / "weights.pt")
    _write_pictures(folder)
    before = _times(folder / FIRST)
    later = dict(zip(LATER, typed(folder, *LATER.values(), **CLASSES), strict=True))
    touched = [path for path, when in _times(folder / FIRST).items() if before.get(path) != when]
    return Session(folder, first, later, touched)


def test_a_run_leaves_its_files_in_one_folder(session: Session) -> None:
    run = session.folder / FIRST
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names >= {"config", "checkpoints", "events", "metrics", "results"}
    results = json.loads((run / "results.json").read_text())
    assert results["data"]["sizes"] == {"train": 1322, "val": 115, "test": 360}
    assert 0.1 < results["scores"]["test/accuracy"] <= 1
    rows = rows_of(run)
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "3", "5", "7", "9"]
    assert all(float(row["lr"]) > 0 for row in rows if row["lr"])


def _in_tensorboard(folder: Path) -> dict[str, Any]:
    """The hyper-parameters that a run has logged."""
    events = EventAccumulator(str(folder)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = HParamsPluginData.FromString(content).session_start_info
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in info.hparams.items()}


def test_the_four_places_that_hold_a_runs_settings_hold_the_same(session: Session) -> None:
    run = session.folder / FIRST
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["dataset"] == "digits"
    assert settings["precision"] in ("bf16-mixed", "32-true")
    assert settings["batch_size"] == 128
    for name in ("best", "last"):
        checkpoint = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
        assert checkpoint["config"] == settings
        assert checkpoint["class_names"] == [str(i) for i in range(10)]
    assert json.loads((run / "results.json").read_text())["config"] == settings
    shown = _in_tensorboard(run)
    assert shown.keys() == settings.keys()
    for name, value in settings.items():
        if isinstance(value, (bool, int, float, str)):
            assert shown[name] == value
    assert not (run / "hparams.yaml").exists()
    printed = yaml.safe_load(session.later["settings"].out)
    assert {name for name in settings if printed.get(name) != settings[name]} == {"batch_size"}


def test_the_last_table_summarizes_the_run(session: Session) -> None:
    joined = " ".join(session.first.out.split())
    parts = ["scikit-learn digits: 1,322 train, 115 val, 360 test", "trainable)", "test accuracy", "samples/s"]
    parts += ["tensorboard --logdir runs/mnist", f"predict --ckpt {BEST}"]
    assert [part for part in parts if part not in joined] == []


def test_a_second_run_of_the_same_name_leaves_the_first_alone(session: Session) -> None:
    assert session.later["the same name"].status == 0, session.later["the same name"].err
    assert (session.folder / "runs/mnist/first-2/results.json").is_file()
    assert session.touched == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another kind", "is not a checkpoint of a run"),
        ("another network", "holds another network"),
        ("resume a folder", f"{FIRST} is a folder; pass a checkpoint, such as {FIRST}/checkpoints/"),
        ("test a folder", f"{FIRST} is a folder; pass a checkpoint, such as {FIRST}/checkpoints/"),
    ],
)
def test_what_is_no_checkpoint_is_rejected_in_a_line(session: Session, name: str, message: str) -> None:
    ended = session.later[name]
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert message in ended.err


def test_test_scores_the_checkpoint_as_the_run_did(session: Session) -> None:
    assert session.later["test"].status == 0, session.later["test"].err
    assert "test/accuracy" in session.later["test"].out
    scores = json.loads((session.folder / "scores.json").read_text())
    expected = json.loads((session.folder / FIRST / "results.json").read_text())["scores"]
    assert scores == {name: expected[name] for name in scores}


def test_predict_reads_inverted_pictures(session: Session) -> None:
    for name in ("out.json", "out.csv"):
        assert session.later[name].status == 0, session.later[name].err
        assert "light.png" in session.later[name].out
        assert "dark.jpg" in session.later[name].out
    as_trained = {row["file"]: row for row in json.loads((session.folder / "out.json").read_text())}
    with (session.folder / "out.csv").open() as file:
        inverted = {row["file"]: row for row in csv.DictReader(file)}
    assert list(inverted) == ["dark.jpg", "light.png"]
    # Each of both pictures is the other one, inverted.
    for name, other in (("light.png", "dark.jpg"), ("dark.jpg", "light.png")):
        assert as_trained[name]["class"] == inverted[other]["class"]
        assert as_trained[name]["probability"] == pytest.approx(float(inverted[other]["probability"]), abs=0.05)
    assert "if light and dark are exchanged" in session.later["out.json"].out + session.later["out.json"].err


def test_a_run_that_diverges_keeps_its_folder(session: Session) -> None:
    assert session.later["diverges"].status == 1
    assert "the run has diverged" in session.later["diverges"].err
    names = {path.name.split(".")[0] for path in (session.folder / "runs/mnist/div").iterdir()}
    assert {"config", "events"} <= names


def test_resuming_a_copied_checkpoint_leaves_other_folders_alone(session: Session, tmp_path: Path) -> None:
    foreign = tmp_path / "home" / "project"
    foreign.mkdir(parents=True)
    (tmp_path / "home" / "precious").write_text("mine")
    source = session.folder / FIRST / "checkpoints" / "last.ckpt"
    (foreign / "last.ckpt").write_bytes(source.read_bytes())
    resume = f"--resume {foreign / 'last.ckpt'}"
    rejected, done = typed(tmp_path, f"{resume} --batch-size 5000", f"{resume} --max-epochs 2 --name on", **CLASSES)
    assert (rejected.status, done.status) == (2, 0), done.err
    assert "is not in the folder of a run" in done.out
    assert (tmp_path / "runs" / "mnist" / "on" / "results.json").is_file()
    assert sorted(path.name for path in (tmp_path / "home").rglob("*")) == ["last.ckpt", "precious", "project"]


def test_no_epochs_leave_the_initial_weights(tmp_path: Path) -> None:
    zero = "--dataset digits --max-epochs 0 --name zero --precision 32-true"
    (none,) = typed(tmp_path, zero, **CLASSES)
    assert none.status == 0, none.err
    assert "nothing is trained in 0 epochs or steps: the initial weights are saved and scored" in none.out + none.err
    found = json.loads((tmp_path / "runs/mnist/zero/results.json").read_text())
    assert found["epochs"] == 0
    assert found["trainable_parameters"] == found["parameters"]
    assert 0 < found["scores"]["test/accuracy"] < 0.4
    assert (tmp_path / "runs/mnist/zero/checkpoints/last.ckpt").is_file()


def _test_beside_a_module(folder: str) -> Typed:
    sys.path.insert(0, folder)
    return type_line(*CLASSES.values(), ["test", "--ckpt", "evil.ckpt", "--accelerator", "cpu"], folder)


def test_settings_in_a_checkpoint_have_no_module_imported(session: Session, tmp_path: Path) -> None:
    checkpoint = torch.load(session.folder / BEST, weights_only=True)
    (tmp_path / "evil.py").write_text("open('was_here', 'w').close()\nclass Thing: pass\n")
    for name in ("profiler", "optimizer"):
        checkpoint["config"] |= {name: {"class_path": "evil.Thing"}}
    torch.save(checkpoint, tmp_path / "evil.ckpt")
    (ended,) = run_ranks(_test_beside_a_module, 1, str(tmp_path))
    assert ended.status == 2
    assert ended.err == "error: the saved settings: optimizer: {'class_path': 'evil.Thing'}: expected TEXT\n"
    assert not (tmp_path / "was_here").exists()


def test_a_mistake_ends_in_one_line_without_a_run_folder(tmp_path: Path) -> None:
    mistakes = {
        "--max-epoch 3": "there is no flag --max-epoch; did you mean --max-epochs?",
        "go": "unknown command 'go'; expected one of fit, validate, test, predict, verify, export, or a flag",
        "fit test": "fit and test are two commands; pass one of them",
        "test": "test needs a checkpoint; pass --ckpt runs/mnist/NAME/checkpoints/best.ckpt",
        "--ckpt some.ckpt": "fit begins with new weights; pass --resume FILE",
        "test --resume some.ckpt": "--resume continues training; pass --ckpt FILE to test",
        "test --ckpt a --output no/such.json": "--output no/such.json: there is no folder no",
        "--dataset mnist --no-download --data-dir no": "the folder no does not exist",
        "--dataset digits --data-dir no": "--dataset digits comes with this package, so --data-dir no",
        "--max-time soon": '--max-time soon: expected a time, as in "90 minutes", 1h or 00:01:30:00',
        "--val-check-interval 00:30:00": "--val-check-interval 00:30:00: expected a time, as in",
        "--val-check-interval 0": "--val-check-interval 0 is no interval; --limit-val-batches 0 leaves the validation",
        "--limit-train-batches 0": "--limit-train-batches 0 trains nothing; --max-epochs 0 scores the initial weights",
        "--num-nodes 0": "--num-nodes 0: expected a number of nodes, or MIN:MAX as in 1:4",
        "--check-val-every-n-epoch 0": "--check-val-every-n-epoch 0: expected a whole number, 1 or more",
        "--max-epochs -5": "--max-epochs -5: expected a whole number, -1 or more",
        "--gradient-clip-val -1": "--gradient-clip-val -1: expected 0 or more",
        "predict --ckpt a b.png --top-k 1 c.png": "pass all inputs beside each other, also c.png",
        f"--seed {10**20}": f"--seed {10**20}: expected a whole number from 0 to 9,223,372,036",
    }
    ended = typed(tmp_path, *mistakes, **CLASSES)
    for (args, message), (status, _, err) in zip(mistakes.items(), ended, strict=True):
        assert status == 2, args
        assert err.startswith(f"error: {message}"), args
        assert err.count("\n") == 1, args
    assert not list(tmp_path.glob("runs/mnist/*"))


@pytest.mark.slow
def test_a_run_resumed_after_ctrl_c_ends_as_an_unstopped_one(tmp_path: Path) -> None:
    flags = "--dataset digits --max-epochs 6 --precision 32 --log-every-n-steps 3 --accelerator cpu --devices 2"
    for ended in run_ranks(type_line, 2, *CLASSES.values(), [*flags.split(), "--name", "whole"], str(tmp_path)):
        assert ended.status == 0, ended.err
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.mnist", *flags.split(), "--name", "cut"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 2/6"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait() == 130
    assert "Traceback" not in rest
    go_on = rest.strip().splitlines()[-1].split()
    assert go_on[:4] == ["python", "-m", "recipes.mnist", "--resume"]
    for ended in run_ranks(type_line, 2, *CLASSES.values(), go_on[3:], str(tmp_path)):
        assert ended.status == 0, ended.err
    whole, cut = (tmp_path / "runs/mnist" / name for name in ("whole", "cut"))
    assert weights_of(cut / "checkpoints/last.ckpt") == weights_of(whole / "checkpoints/last.ckpt")
    curves = [[(row["step"], row["val/loss"]) for row in rows_of(run) if row["val/loss"]] for run in (whole, cut)]
    assert len(curves[0]) == 6
    assert curves[0] == curves[1]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_whose_reader_has_gone_ends_quietly(tmp_path: Path, devices: int) -> None:
    options = f"--dataset digits --max-epochs 2 --limit-train-batches 2 --threads 1 --devices {devices} --name one"
    command = [sys.executable, "-m", "recipes.mnist", *options.split(), "--accelerator", "cpu"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes) as process:
        assert process.stdout is not None
        # As head does, after the line of the first epoch.
        next(line for line in process.stdout if line.startswith("epoch 1/2"))
        process.stdout.close()
        _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in err
    assert "rror" not in err
    (resumed,) = typed(tmp_path, f"{options} --devices 1 --resume auto", **CLASSES)
    assert resumed.status == 0, resumed.err
    assert "resuming from" in resumed.out
    assert (tmp_path / "runs/mnist/one/results.json").is_file()
