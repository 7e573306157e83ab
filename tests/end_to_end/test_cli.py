"""The command line as a user types it: on the bundled digits, offline, in an empty folder."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.command_lines import Typed, type_line, typed
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
QUICK = ["--dataset", "digits", "--max-epochs", "1", "--network", "default", "--batch-size", "128"]


def type_in(folder: Path, *args: str) -> Typed:
    """In a fresh process: what `python -m recipes.mnist ARGS` ends with and prints."""
    return run_ranks(type_line, 1, "recipes:MNISTClassifier", "datamodules:MNISTDataModule", list(args), str(folder))[0]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A folder in which one short run was made, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained")
    status, out, err = type_in(folder, *QUICK, "--name", "first", "--log-every-n-steps", "2")
    assert status == 0, err
    return folder, out


def test_a_run_leaves_its_settings_checkpoints_curves_and_results(trained):
    folder, _ = trained
    run_folder = folder / "runs" / "mnist" / "first"
    names = {path.name.split(".")[0] for path in run_folder.iterdir()}
    assert names >= {"config", "checkpoints", "events", "metrics", "results"}
    results = json.loads((run_folder / "results.json").read_text())
    assert results["data"]["sizes"] == {"train": 1322, "val": 115, "test": 360}
    assert 0.1 < results["scores"]["test/accuracy"] <= 1
    assert results["config"]["precision"] != "auto"
    with (run_folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "3", "5", "7", "9"]
    assert all(float(row["lr"]) > 0 for row in rows if row["lr"])


def test_the_table_names_data_parameters_scores_and_what_to_type_next(trained):
    _, out = trained
    joined = " ".join(out.split())
    for part in (
        "scikit-learn digits: 1,322 train, 115 val, 360 test",
        "trainable)",
        "test accuracy",
        "samples/s",
        "tensorboard --logdir runs/mnist",
        "predict --ckpt runs/mnist/first/checkpoints/best.ckpt",
    ):
        assert part in joined


def test_tensorboard_shows_pictures_and_the_hyperparameters(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    images, scalars = set(), set()
    for file in (trained[0] / "runs" / "mnist" / "first").glob("events*"):
        events = EventAccumulator(str(file))
        events.Reload()
        tags = events.Tags()
        images |= set(tags["images"])
        scalars |= set(tags["scalars"])
    assert images >= {f"test/{name}" for name in ("predictions", "mistakes", "confusion_matrix")}
    assert scalars >= {f"{part}/{score}" for score in ("accuracy", "loss") for part in ("test", "val")}
    assert scalars >= {"train/loss", "train/loss_epoch", "train/samples_per_second", "monitor/gradient_norm"}


def test_a_checkpoint_loads_without_code_and_knows_its_settings(trained):
    path = trained[0] / "runs" / "mnist" / "first" / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["config"]["batch_size"] == 128
    assert checkpoint["class_names"] == [str(i) for i in range(10)]


def test_a_second_run_of_the_same_name_touches_nothing_of_the_first(trained):
    folder, _ = trained
    first = folder / "runs" / "mnist" / "first"
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}
    status, _, err = type_in(folder, *QUICK, "--name", "first")
    assert status == 0, err
    assert (folder / "runs" / "mnist" / "first-2" / "results.json").is_file()
    assert before == {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}


def test_resuming_a_copied_checkpoint_leaves_the_folders_around_it_alone(trained, tmp_path):
    foreign = tmp_path / "home" / "project"
    foreign.mkdir(parents=True)
    (tmp_path / "home" / "precious").write_text("mine")
    source = trained[0] / "runs" / "mnist" / "first" / "checkpoints" / "last.ckpt"
    (foreign / "last.ckpt").write_bytes(source.read_bytes())
    resume = ["--resume", str(foreign / "last.ckpt")]
    assert type_in(tmp_path, *resume, "--batch-size", "5000")[0] == 2
    status, out, err = type_in(tmp_path, *resume, "--max-epochs", "2", "--name", "on")
    assert status == 0, err
    assert "is not in the folder of a run" in out
    assert (tmp_path / "runs" / "mnist" / "on" / "results.json").is_file()
    assert sorted(path.name for path in (tmp_path / "home").rglob("*")) == ["last.ckpt", "precious", "project"]


def test_a_checkpoint_of_another_network_or_another_kind_is_refused_in_a_line(trained):
    folder, _ = trained
    torch.save({"weight": torch.zeros(2)}, folder / "weights.pt")
    status, _, err = type_in(folder, "test", "--ckpt", "weights.pt")
    assert (status, err.count("\n")) == (2, 1)
    assert "is not a checkpoint of a run" in err
    status, _, err = type_in(folder, "test", "--ckpt", "runs/mnist/first/checkpoints/best.ckpt", "--network", "classic")
    assert (status, err.count("\n")) == (2, 1)
    assert "holds another network" in err


def test_test_scores_the_checkpoint_as_the_run_did(trained):
    folder, _ = trained
    run_folder = folder / "runs" / "mnist" / "first"
    checkpoint = str(run_folder / "checkpoints" / "best.ckpt")
    status, out, err = type_in(folder, "test", "--ckpt", checkpoint, "--output", "scores.json")
    assert status == 0, err
    assert "test/accuracy" in out
    scores = json.loads((folder / "scores.json").read_text())
    expected = json.loads((run_folder / "results.json").read_text())["scores"]
    assert scores == {name: expected[name] for name in scores}


def test_predict_reads_dark_and_light_pictures_and_writes_a_file(trained):
    from PIL import Image, ImageOps
    from sklearn.datasets import load_digits

    folder, _ = trained
    digit = Image.fromarray((load_digits().images[0] * 15).astype("uint8")).resize((90, 90), Image.Resampling.BILINEAR)
    light = Image.new("L", (140, 200), 0)
    light.paste(digit, (20, 60))
    light.save(folder / "light.png")
    ImageOps.invert(light).convert("RGB").save(folder / "dark.jpg")
    checkpoint = str(folder / "runs" / "mnist" / "first" / "checkpoints" / "best.ckpt")
    for name in ("out.json", "out.csv"):
        args = ["--ckpt", checkpoint, "--output", name, "light.png", "dark.jpg"]
        status, out, err = type_in(folder, "predict", *args)
        assert status == 0, err
    assert "light.png" in out
    assert "dark.jpg" in out
    rows = json.loads((folder / "out.json").read_text())
    assert rows[0]["class"] == rows[1]["class"]
    assert rows[0]["probability"] == pytest.approx(rows[1]["probability"], abs=0.05)
    with (folder / "out.csv").open() as file:
        assert [row["file"] for row in csv.DictReader(file)] == ["light.png", "dark.jpg"]


def test_a_mistake_ends_with_status_2_one_line_and_no_run_folder(tmp_path):
    mistakes = {
        "--max-epoch 3": "there is no flag --max-epoch; did you mean --max-epochs?",
        "go": "unknown command 'go'; expected one of fit, validate, test, predict, verify, export, or a flag",
        "fit test": "fit and test are two commands; pass one of them",
        "test": "test needs a checkpoint; pass --ckpt runs/mnist/NAME/checkpoints/best.ckpt",
        "test --barebones": "--barebones measures the speed of training, and keeps no scores; leave it out to test",
        "--ckpt some.ckpt": "fit begins with new weights; pass --resume FILE",
        "test --resume some.ckpt": "--resume continues training; pass --ckpt FILE to test",
        "test --ckpt a --output no/such.json": "--output no/such.json: there is no folder no",
        "--dataset mnist --no-download --data-dir no": "the folder no does not exist",
        "--dataset digits --data-dir no": "--dataset digits comes with scikit-learn, so --data-dir no",
        "--max-time 5s": "--max-time 5s is no time: write days, hours, minutes and seconds, such as 00:00:30:00",
        "--val-check-interval 00:30:00": "--val-check-interval 00:30:00 is no time: write days, hours, minutes and",
        "--val-check-interval 0": "--val-check-interval 0 is no interval; --limit-val-batches 0 leaves the validation",
        "--limit-train-batches 0": "--limit-train-batches 0 trains nothing; --max-epochs 0 scores the initial weights",
        "--num-nodes 0": "--num-nodes 0: expected a whole number, 1 or more",
        "--check-val-every-n-epoch 0": "--check-val-every-n-epoch 0: expected a whole number, 1 or more",
        "--gradient-clip-val -1": "--gradient-clip-val -1: expected 0 or more",
        "predict --ckpt a b.png --top-k 1 c.png": "pass all inputs beside each other, also c.png",
        f"--seed {10**20}": f"--seed {10**20}: expected a whole number, 0 or more and 9,223,372,036",
    }
    ended = typed(tmp_path, *mistakes, recipe="recipes:MNISTClassifier", data="datamodules:MNISTDataModule")
    for (args, message), (status, _, err) in zip(mistakes.items(), ended, strict=True):
        assert status == 2, args
        assert err.startswith(f"error: {message}"), args
        assert err.count("\n") == 1, args
    assert not list(tmp_path.glob("runs/mnist/*"))


def test_a_run_that_diverges_keeps_its_folder_and_its_curves(tmp_path):
    status, _, err = type_in(tmp_path, *QUICK, "--lr", "1e6", "--name", "div", "--log-every-n-steps", "1")
    assert status == 1
    assert "the run has diverged" in err
    assert {"config", "events"} <= {path.name.split(".")[0] for path in (tmp_path / "runs" / "mnist" / "div").iterdir()}


@pytest.mark.parametrize("flags", [["--resume"], ["test", "--ckpt"]])
def test_the_folder_of_a_run_in_place_of_a_checkpoint_is_an_error_that_names_one(trained, flags):
    status, _, err = type_in(trained[0], *flags, "runs/mnist/first")
    assert status == 2
    best, last = (f"runs/mnist/first/checkpoints/{name}.ckpt" for name in ("best", "last"))
    assert err in [f"error: runs/mnist/first is a folder; pass a checkpoint, such as {path}\n" for path in (best, last)]


def test_settings_in_a_checkpoint_have_no_module_imported(trained, tmp_path):
    folder, _ = trained
    checkpoint = torch.load(folder / "runs" / "mnist" / "first" / "checkpoints" / "best.ckpt", weights_only=True)
    (tmp_path / "evil.py").write_text("open('was_here', 'w').close()\nclass Thing: pass\n")
    for name in ("profiler", "optimizer"):
        checkpoint["config"] |= {name: {"class_path": "evil.Thing"}}
    torch.save(checkpoint, tmp_path / "evil.ckpt")
    environ = environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-m", "recipes.mnist", "test", "--ckpt", "evil.ckpt", "--accelerator", "cpu"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "was_here").exists()


def test_help_is_grouped_and_fits_two_screens(tmp_path):
    _, out, _ = type_in(tmp_path, "--help")
    assert len(out.splitlines()) <= 88
    for word in ("Run:", "Data:", "Recipe:", "Trainer:", "--devices", "--max-epochs", "--help-all", "--print-config"):
        assert word in out
    _, everything, _ = type_in(tmp_path, "--help-all")
    for rare in ("--check-val-every-n-epoch", "--schedule-args"):
        assert rare in everything
        assert rare not in out


def test_printed_settings_can_be_given_back(tmp_path):
    _, out, _ = type_in(tmp_path, "--print-config", "--lr", "0.02", "--batch-size", "64")
    (tmp_path / "settings.yaml").write_text(out)
    _, again, _ = type_in(tmp_path, "--config", "settings.yaml", "--print-config", "--batch-size", "32")
    changed = set(again.splitlines()) ^ set(out.splitlines())
    assert changed == {"batch_size: 64", "batch_size: 32"}


@pytest.mark.slow
def test_a_minimal_recipe_and_a_mistake_on_one_rank_only(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "support" / "minimal_recipe.py"), "--max-epochs", "2"]
    command += ["--accelerator", "cpu", "--name", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
    assert (tmp_path / "runs" / "line" / "run" / "results.json").is_file()
    command += ["--devices", "2", "--broken-rank", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert re.search(r"^error on rank 1 \(node 0, .*\): rank 1 found nothing$", done.stderr, re.MULTILINE)


@pytest.mark.slow
def test_ctrl_c_keeps_the_last_checkpoint_and_resuming_ends_where_the_whole_run_ends(tmp_path):
    command = [sys.executable, "-m", "recipes.mnist", "--dataset", "digits", "--max-epochs", "15"]
    command += ["--precision", "32", "--log-every-n-steps", "3", "--accelerator", "cpu", "--devices", "2"]
    subprocess.run([*command, "--name", "whole"], cwd=tmp_path, env=environment(), check=True)
    process = subprocess.Popen(
        [*command, "--name", "cut"],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 3/15"):
            break
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    rest = process.stdout.read()
    assert process.wait() == 130
    assert time.monotonic() - began < 120
    assert "Traceback" not in rest
    go_on = rest.strip().splitlines()[-1].split()
    assert go_on[:4] == ["python", "-m", "recipes.mnist", "--resume"]
    subprocess.run([sys.executable, *go_on[1:]], cwd=tmp_path, env=environment(), check=True)
    weights = [
        torch.load(tmp_path / "runs" / "mnist" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "cut")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    curves = []
    for name in ("whole", "cut"):
        with (tmp_path / "runs" / "mnist" / name / "metrics.csv").open() as file:
            curves.append([(row["step"], row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]])
    assert len(curves[0]) == 15
    assert curves[0] == curves[1]
