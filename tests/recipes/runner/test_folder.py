"""Which checkpoint a run resumes from, and whether it is the same experiment."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from callbacks.checkpointing.verified_io import write_checkpoint
from datamodules import MNISTDataModule, UserError
from recipes.mnist import MNISTClassifier
from recipes.runner import folder as rule
from recipes.runner import settings as merging
from recipes.runner.flags import RunClasses, marks_of
from recipes.runner.folder import ResumePoint, locked, start_from
from recipes.runner.saved_run import newest_valid_checkpoint, read_run
from recipes.runner.variables import job_name
from recipes.runner.worker import RankZeroFailed
from tests.support.ranks import run_ranks

FREE = marks_of(RunClasses(MNISTClassifier, MNISTDataModule).parser()).changeable
describe_differences = partial(merging.describe_differences, changeable=FREE)
CONFIG = {"seed": 1, "lr": 0.1, "dataset": "digits", "batch_size": 64, "accumulate": 1, "max_epochs": 4}


def find_resume_point(*args: Any, **options: Any) -> ResumePoint:
    rule._used.clear()  # As in a process that has made no run.
    return rule.find_resume_point(*args, **options, changeable=FREE)


def save(path: Path, updates: int, epochs: int = 0, config: dict = CONFIG, items: Any = 64, **more: Any) -> Path:
    """A file with what `read_run` looks at."""
    loops = {"fit_loop": {"epoch_progress": {"current": {"processed": epochs}}}}
    content = {"state_dict": {"w": torch.ones(500)}, "loops": loops, "global_step": updates, "config": config}
    content |= {"devices": 1, "callbacks": {"GradientAccumulation": {"items": items}}}
    write_checkpoint(content | {"pytorch-lightning_version": "2.6.6"} | more, path)
    return path


def make_run(parent: Path, name: str, updates: int = 5, epochs: int = 1, config: dict = CONFIG) -> Path:
    path = save(parent / name / "checkpoints" / "last.ckpt", updates, epochs, config)
    (parent / name / "config.yaml").write_text(json.dumps(config))
    return path


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "bit-flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"\x80\x3f", b"\x81\x3f")),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_last_checkpoint_is_skipped(damage, tmp_path, caplog):
    best, last = save(tmp_path / "best.ckpt", 10), save(tmp_path / "last.ckpt", 12)
    assert newest_valid_checkpoint(tmp_path) == last
    DAMAGES[damage](last)
    caplog.clear()
    assert newest_valid_checkpoint(tmp_path) == best
    if damage != "missing":
        assert f"a checkpoint is skipped: {last}" in caplog.text


class TouchesFile:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_run_code_is_rejected(zipped: bool, tmp_path: Path):
    content = torch.load(save(tmp_path / "last.ckpt", 5), weights_only=True)
    content["config"] = content["config"] | {"lr": TouchesFile(tmp_path / "ran")}
    torch.save(content, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"evil\.ckpt holds code \(getattr\) and not only weights"):
        read_run(tmp_path / "evil.ckpt")
    assert newest_valid_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    assert not (tmp_path / "ran").exists()


def test_the_newest_checkpoint_has_made_the_most_progress(tmp_path):
    save(tmp_path / "best.ckpt", 10)
    last = save(tmp_path / "last.ckpt", 12)
    os.utime(last, (0, 0))
    assert newest_valid_checkpoint(tmp_path) == last
    save(tmp_path / "top.ckpt", 12)
    torch.save({"weights": torch.ones(2)}, tmp_path / "zzz.ckpt")
    assert newest_valid_checkpoint(tmp_path) == last, "of two at the same update the last, and no foreign file"
    assert newest_valid_checkpoint(tmp_path / "nothing") is None


def test_differences_name_each_setting_of_the_experiment():
    config = {"seed": 2, "lr": 0.1, "dataset": "auto", "batch_size": 8, "max_epochs": 9, "new_flag": 1}
    assert describe_differences(CONFIG, config) == ["`seed` is 2, and 1 in the checkpoint"]
    assert describe_differences({"sizes": (1, 2), "path": "data"}, {"sizes": [1, 2], "path": "./data/"}) == []
    assert describe_differences({"val_file": ["a/x.gz", "y"]}, {"val_file": ["~/b/x.gz", "/y"]}) == []
    assert len(describe_differences({"val_file": "a/x.gz"}, {"val_file": "a/y.gz"})) == 1
    assert len(describe_differences(CONFIG, CONFIG | {"lr": 0.2, "dataset": "mnist"})) == 2
    assert describe_differences(CONFIG, CONFIG | {"accumulate": 2}) == ["`accumulate` is 2, and 1 in the checkpoint"]


def test_the_size_of_an_update_is_read_where_it_is_known(tmp_path):
    assert read_run(save(tmp_path / "one.ckpt", 3)).update_items == 64
    assert read_run(save(tmp_path / "one.ckpt", 3)).devices == 1
    assert read_run(save(tmp_path / "other.ckpt", 3, items=None)).update_items is None


def test_only_a_launch_that_restarts_has_a_name():
    slurm = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "3", "ENVIRONMENT": "BATCH"}
    assert job_name({}) is None
    assert job_name(slurm) == "slurm-17"
    assert job_name(slurm | {"SLURM_STEP_ID": "2"}) == "slurm-17-step2"
    assert job_name({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0"}) is None, "nothing says that it is one"
    elastic = {"TORCHELASTIC_RUN_ID": "a/b", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert job_name(elastic) == "elastic-a_b"
    assert job_name(elastic | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert job_name(elastic | {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "1"}) == "elastic-a_b"
    alone = job_name(elastic | {"TORCHELASTIC_RUN_ID": "none"})
    assert alone is not None
    assert alone.endswith(f"-{os.getppid()}")
    drawn = elastic | {"TORCHELASTIC_RUN_ID": "0f9b1c2e-93f4-4a1c-b9c6-5f7c0f0a8d11"}
    assert job_name(drawn) == f"elastic-{drawn['TORCHELASTIC_RUN_ID']}"
    assert job_name(drawn | slurm) == job_name(elastic | slurm) == "slurm-17"


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_nameless_job_of_several_nodes_cannot_restart(resume, outside, tmp_path):
    for name, value in (("RUN_ID", "none"), ("MAX_RESTARTS", "3")):
        outside.setenv(f"TORCHELASTIC_{name}", value)
    outside.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="add --rdzv-id NAME"):
        find_resume_point(resume, None, tmp_path, CONFIG, {})
    path = make_run(tmp_path, "two")
    assert find_resume_point(resume, "two", tmp_path, CONFIG, {}) == ResumePoint(str(tmp_path / "two"), str(path))
    assert find_resume_point("none", None, tmp_path, CONFIG, {}) == ResumePoint()
    outside.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert find_resume_point(None, None, tmp_path, CONFIG, {}) == ResumePoint()


@pytest.fixture
def outside(monkeypatch):
    """No launcher's variables, whatever runs the tests."""
    for name in [*os.environ]:
        if name.startswith(("SLURM", "TORCHELASTIC", "ENVIRONMENT")):
            monkeypatch.delenv(name)
    return monkeypatch


def become_job(outside: pytest.MonkeyPatch, number: str) -> None:
    """Make this process one of a batch job of Slurm."""
    for name, value in (("SLURM_JOB_ID", number), ("SLURM_PROCID", "0"), ("ENVIRONMENT", "BATCH")):
        outside.setenv(name, value)


def test_auto_resumes_in_the_named_folder(outside, tmp_path):
    assert find_resume_point("auto", "a", tmp_path, CONFIG, {}) == ResumePoint(str(tmp_path / "a"))
    path = make_run(tmp_path, "a")
    assert find_resume_point("auto", "a", tmp_path, CONFIG, {}) == ResumePoint(str(tmp_path / "a"), str(path))
    assert find_resume_point(None, "a", tmp_path, CONFIG, {}) == ResumePoint()


def test_auto_takes_the_newest_unfinished_equal_run(outside, tmp_path):
    assert find_resume_point("auto", None, tmp_path, CONFIG, {}) == ResumePoint()
    path = make_run(tmp_path, "a")
    make_run(tmp_path, "finished", epochs=4).parents[1].joinpath("results.json").touch()
    make_run(tmp_path, "other", config=CONFIG | {"lr": 7})
    assert find_resume_point("auto", None, tmp_path, CONFIG, {}) == ResumePoint(str(tmp_path / "a"), str(path))


def test_a_run_has_finished_unless_a_longer_one_is_typed(outside, tmp_path):
    make_run(tmp_path, "a", epochs=4)
    assert not find_resume_point("auto", "a", tmp_path, CONFIG, {}).finished, "it was killed in the test"
    (tmp_path / "a" / "results.json").write_text('{"scores": {}}')

    def finished(name: str | None = "a", **typed: Any) -> bool:
        return find_resume_point("auto", name, tmp_path, CONFIG | {"max_epochs": 9} | typed, typed).finished

    assert finished(), "the default of the recipe is longer than the run was to be"
    assert finished(max_epochs=4)
    assert finished(max_epochs=2)
    assert finished(max_steps=3)
    assert not finished(max_epochs=5)
    assert find_resume_point("auto", None, tmp_path, CONFIG | {"max_epochs": 9}, {}) == ResumePoint(), "none to resume"


def test_a_run_stopped_early_stays_finished(outside, tmp_path):
    for name, length in (("stopped", {"patience": 2}), ("timed", {"max_time": "1:0:0"})):
        make_run(tmp_path, name, config=CONFIG | length)
        (tmp_path / name / "results.json").write_text(
            json.dumps({"scores": {}, "stopped_early": "no better" if name == "stopped" else None})
        )

    def finished(name: str, **typed: Any) -> bool:
        return find_resume_point("auto", name, tmp_path, CONFIG | typed, typed).finished

    assert finished("stopped")
    assert finished("stopped", max_epochs=9)
    assert finished("stopped", patience=2)
    assert not finished("stopped", patience=5)
    assert finished("timed", max_time="1:0:0")
    assert not finished("timed", max_time="2:0:0")
    assert not finished("timed", max_epochs=9)


def test_a_requeued_slurm_job_finds_its_own_runs(outside, tmp_path):
    other = CONFIG | {"seed": 2}
    for job in ("7", "8"):
        become_job(outside, job)
        for config, name in ((CONFIG, f"slurm-{job}"), (other, f"slurm-{job}-2")):
            moved = config | {"data_dir": "/scratch/2"}
            assert find_resume_point(None, None, tmp_path, moved, {}) == ResumePoint(str(tmp_path / name))
            path = make_run(tmp_path, name, config=config | {"data_dir": "/scratch/1"})
            assert find_resume_point(None, None, tmp_path, moved, {}) == ResumePoint(str(tmp_path / name), str(path))
    assert find_resume_point("none", None, tmp_path, CONFIG, {}) == ResumePoint()


def test_a_run_with_a_setting_no_longer_typed_is_another(outside, tmp_path):
    become_job(outside, "7")
    save(make_run(tmp_path, "slurm-7"), 5, auto_settings=["dataset"])
    rule._used.clear()
    runs = ({"lr": None}, None), ({"dataset": "auto"}, None), ({"dataset": "auto"}, None), ({}, "slurm-7")
    points = [rule.find_resume_point(None, name, tmp_path, CONFIG | now, {}, FREE) for now, name in runs]
    assert [Path(point.folder).name for point in points] == ["slurm-7-2", "slurm-7", "slurm-7-3", "slurm-7-4"]


def test_a_damaged_checkpoint_leads_to_the_newest_valid_one(outside, tmp_path):
    last = make_run(tmp_path, "a")
    best = save(last.with_name("best.ckpt"), 3)
    DAMAGES["truncated"](last)
    with pytest.raises(UserError, match=f"cut off.*the newest valid checkpoint is {best}: pass resume='auto'"):
        find_resume_point(str(last), None, tmp_path, CONFIG, {})


@pytest.mark.parametrize("name", [None, "two"])
def test_a_restarted_job_resumes_from_its_own_checkpoints(name, outside, tmp_path, caplog):
    file = str(save(tmp_path / "given.ckpt", 3))
    folder = tmp_path / "runs" / (name or "slurm-7")
    become_job(outside, "7")

    def begins() -> ResumePoint:
        return find_resume_point(file, name, tmp_path / "runs", CONFIG, {})

    assert begins() == ResumePoint(str(folder), file, given=True, job="slurm-7")
    folder.mkdir(parents=True)
    assert start_from(begins(), folder) == []
    assert begins() == ResumePoint(str(folder), file, given=True, job="slurm-7"), (
        "it was stopped before it saved anything"
    )
    own = make_run(tmp_path / "runs", folder.name, 4)
    assert begins() == ResumePoint(str(folder), str(own))
    Path(file).unlink()
    assert begins() == ResumePoint(str(folder), str(own)), "where it began need not last"
    outside.setenv("SLURM_JOB_ID", "8")
    save(Path(file), 3)
    new = f"{folder}-2" if name else str(folder.with_name("slurm-8"))
    assert begins() == ResumePoint(new, file, given=True, job="slurm-8")


def test_an_earlier_checkpoint_renames_the_later_ones(outside, tmp_path):
    last = make_run(tmp_path, "a", 14)
    home = last.parent
    best = str(save(home / "best.ckpt", 10))
    torch.save({"weights": torch.ones(2)}, home / "foreign.ckpt")
    assert start_from(find_resume_point(best, None, tmp_path, CONFIG, {}), tmp_path / "a") == [
        home / "last.ckpt-14.abandoned"
    ]
    assert find_resume_point("auto", "a", tmp_path, CONFIG, {}).checkpoint == best
    become_job(outside, "7")
    save(last, 12)
    again = ResumePoint(str(tmp_path / "a"), best, given=True, job="slurm-7")
    point = find_resume_point(best, None, tmp_path, CONFIG, {})
    assert point == again, "another job went there"
    assert start_from(point, tmp_path / "a") == [home / "last.ckpt-12.abandoned"]
    save(last, 11)
    assert find_resume_point(best, None, tmp_path, CONFIG, {}) == ResumePoint(str(tmp_path / "a"), str(last))
    kept = {path.name: read_run(path).updates for path in home.glob("*.abandoned")}
    assert kept == {"last.ckpt-14.abandoned": 14, "last.ckpt-12.abandoned": 12}
    assert (home / "foreign.ckpt").exists()


def _hold(path: str) -> str:
    from recipes.runner import folder

    folder._LOCK_TIMEOUT = 0.3
    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
    try:
        with locked(Path(path)):
            return "held"
    except UserError as error:
        return str(error)
    except RankZeroFailed as end:
        return f"ends with {end.code}"


def test_a_folder_in_which_another_process_trains_is_rejected(tmp_path):
    with locked(tmp_path):
        on_rank_0, on_rank_1 = run_ranks(_hold, 2, str(tmp_path))
    assert "another process is training in" in on_rank_0
    assert on_rank_1 == "ends with 2", "without a line of its own"
    assert run_ranks(_hold, 1, str(tmp_path)) == ["held"]


def test_a_checkpoint_is_read_again_after_it_has_changed(tmp_path):
    path = save(tmp_path / "last.ckpt", 3)
    assert read_run(path).updates == 3
    other = save(tmp_path / "other.ckpt", 44)
    shutil.move(other, path)
    assert read_run(path).updates == 44
