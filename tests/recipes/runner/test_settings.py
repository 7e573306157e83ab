"""Settings are merged once: defaults, then those of a checkpoint, of files, and what was typed."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import MNISTDataModule, UserError
from recipes import MNISTClassifier
from recipes.runner.flags import RunClasses, marks_of
from recipes.runner.settings import (
    RunSettings,
    SettingMarks,
    TrainerSettings,
    as_plain,
    drop_epoch_limit,
    merge,
    resolve_auto,
)

MARKS = SettingMarks(
    changeable=frozenset({"logger"}),
    transient=frozenset({"name"}),
    machine_only=frozenset({"devices"}),
    null_disables=frozenset({"ema"}),
)
DEFAULTS = {"lr": 0.1, "dataset": "auto", "ema": None, "logger": "csv", "name": None, "devices": "auto"}
SAVED = {"lr": 0.2, "dataset": "mnist", "ema": 0.9, "logger": "none", "name": "a", "devices": 2, "gone": 1}


def test_each_layer_replaces_those_before_it():
    assert merge(MARKS, DEFAULTS, {"lr": 0.3}) == DEFAULTS | {"lr": 0.3}
    kept = {"lr": 0.2, "dataset": "mnist", "ema": 0.9, "logger": "none", "name": None, "devices": "auto"}
    assert merge(MARKS, DEFAULTS, {}, SAVED) == kept, "without those of one call and of the machine"
    assert merge(MARKS, DEFAULTS, {"lr": 0.3, "name": "b"}, SAVED) == kept | {"lr": 0.3, "name": "b"}
    assert merge(MARKS, DEFAULTS, {}, SAVED, keeps=("devices",)) == kept | {"devices": 2}


def test_a_null_stands_for_what_the_run_has_resolved():
    given = {"dataset": "auto", "ema": None, "lr": None, "logger": None}
    merged = merge(MARKS, DEFAULTS, given, SAVED, typed=given)
    assert (merged["dataset"], merged["lr"]) == ("mnist", 0.2)
    assert merged["ema"] is None, "its null ends the average"
    assert merge(MARKS, DEFAULTS, given, SAVED)["ema"] == 0.9, "a null in a file does not"
    assert merged["logger"] is None, "a free setting makes no other experiment"
    merged = merge(MARKS, DEFAULTS, given, SAVED, auto_settings=["dataset"])
    assert (merged["dataset"], merged["lr"]) == ("mnist", None), "the run had not left lr open"


def test_further_parameters_of_the_trainer_are_merged_by_name():
    defaults = {"trainer": None}
    saved = {"trainer": {"benchmark": True, "min_epochs": 1}}
    merged = merge(MARKS, defaults, {"trainer": {"min_epochs": 2}}, saved)
    assert merged == {"trainer": {"benchmark": True, "min_epochs": 2}}


def test_parameters_in_a_file_stay_beside_typed_ones(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("trainer: {benchmark: true, min_epochs: 1}\n")
    given = (
        RunClasses(MNISTClassifier, MNISTDataModule)
        .parser()
        .parse(["--config", str(file), "--trainer.detect_anomaly", "--trainer.min_epochs", "2"])
    )
    assert given.settings == {"trainer": {"benchmark": True, "min_epochs": 2, "detect_anomaly": True}}


def test_a_length_in_steps_replaces_the_recipes_epochs():
    defaults = {"max_epochs": 10, "max_steps": -1}
    assert drop_epoch_limit(defaults, {"max_steps": 5})["max_epochs"] == -1
    assert drop_epoch_limit(defaults, {"max_steps": 5, "max_epochs": 3})["max_epochs"] == 10
    assert drop_epoch_limit(defaults, {}) == defaults


def test_only_what_is_open_is_filled():
    settings = {"a": None, "b": "auto", "c": 1}
    assert resolve_auto(settings, {"a": 2, "b": None, "c": 3, "d": 4}) == {"a": 2, "b": "auto", "c": 1}


def test_values_are_saved_as_plain_ones():
    assert as_plain({"file": Path("a.csv"), "sizes": (1, 2), "of": range(2)}) == {
        "file": "a.csv",
        "sizes": [1, 2],
        "of": [0, 1],
    }
    plain = as_plain({"lr": np.float64(0.1), "name": np.str_("a"), "time": timedelta(days=1, minutes=61), "of": {3, 1}})
    assert plain == {"lr": 0.1, "name": "a", "time": "01:01:01:00", "of": [1, 3]}
    assert {type(value) for value in plain.values()} == {float, str, list}
    with pytest.raises(TypeError, match="found a object"):
        as_plain({"a": object()})


def test_what_is_special_about_a_setting_stands_at_its_field():
    marks = marks_of(RunClasses(MNISTClassifier, MNISTDataModule).parser())
    assert marks.machine_only == {"accelerator", "strategy", "devices"}
    assert marks.null_disables == {"ema"}
    assert {"resume", "ckpt", "node_rank", "predict_inputs", "profiler"} <= marks.transient
    assert {"max_epochs", "logger", "batch_size", "trainer"} <= marks.changeable
    assert not {"lr", "seed", "fast_dev_run", "gradient_clip_val"} & (marks.changeable | marks.transient)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bench_mark", "trainer.bench_mark: the Trainer has no such parameter; did you mean benchmark?"),
        ("inference_mode", "trainer.inference_mode is 'maybe': expected BOOL"),
        ("devices", "trainer.devices: `devices` has its own flag; pass it without trainer"),
        ("sync_batchnorm", "trainer.sync_batchnorm: pass `sync_bn`, which works on CPUs"),
    ],
)
def test_the_trainer_has_only_further_parameters_of_its_own(name: str, message: str):
    with pytest.raises(UserError) as rejected:
        TrainerSettings(trainer={name: "maybe"})
    assert str(rejected.value).startswith(message)
    assert TrainerSettings(max_epochs=2, trainer={"benchmark": True}).options()["benchmark"] is True


@pytest.mark.parametrize("name", ["max_time", "val_check_interval"])
def test_a_time_is_read_as_people_write_it(name: str) -> None:
    for text in ("90 minutes", "1.5h", "5400s"):
        assert TrainerSettings(**{name: text}).options()[name] == timedelta(minutes=90)
    assert TrainerSettings(**{name: "00:01:30:00"}).options()[name] == "00:01:30:00", "Lightning reads it"
    with pytest.raises(UserError, match=rf"^{name}='soon': expected a time, as in \"90 minutes\", 1h or 00:01:30:00"):
        TrainerSettings(**{name: "soon"})


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("seed", [-1, 0.5, 2**63], [0, "random"]),
        ("save_top_k", [-2, 0.5], [-1, 0]),
        ("threads", [0, 1.5, 4097], [1, None]),
        ("global_batch_size", [0, 1.5], [1, None]),
        ("patience", [0, 1.5], [1, None]),
        ("progress_interval", [-1], [0, 0.5]),
    ],
)
def test_a_setting_of_the_run_has_a_range(name: str, wrong: list[Any], right: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(UserError, match=f"{name}={re.escape(str(value))}: expected"):
            RunSettings(**{name: value})
    for value in right:
        assert getattr(RunSettings(**{name: value}), name) == value
