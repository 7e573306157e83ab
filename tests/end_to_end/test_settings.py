"""The same resolved settings are in every place where a run keeps them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

ROOT = Path(__file__).parents[2]


def in_tensorboard(folder: Path) -> dict[str, Any]:
    """The hyper-parameters that a run has logged."""
    events = EventAccumulator(str(folder)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = HParamsPluginData.FromString(content).session_start_info
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in info.hparams.items()}


def test_the_four_places_that_hold_a_runs_settings_hold_the_same(tmp_path: Path) -> None:
    """Data set and precision are left open; without MNIST's files the data set is the digits."""
    args = [
        "--accelerator",
        "cpu",
        "--no-download",
        "--max-epochs",
        "1",
        "--name",
        "run",
        "--enable-progress-bar=false",
    ]
    program = [sys.executable, "-W", "ignore", "-m", "recipes.mnist"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*program, *args], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "mnist" / "run"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["dataset"] == "digits"
    assert settings["precision"] in ("bf16-mixed", "32-true")
    for name in ("best", "last"):
        checkpoint = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
        assert checkpoint["config"] == settings
    assert json.loads((run / "results.json").read_text())["config"] == settings
    shown = in_tensorboard(run)
    assert shown.keys() == settings.keys()
    for name, value in settings.items():
        if isinstance(value, (bool, int, float, str)):
            assert shown[name] == value
    assert not (run / "hparams.yaml").exists()
