"""The record of a run's weights, their hashes, and the part of the run that can be trained again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from datamodules.errors import UserError
from recipes.runner.saved_run import SavedRun
from recipes.runner.verify import Interval, RecordedCheckpointIO, find_interval, read_saves, weights_hash


def sha(resumed_from: int | None, step: int) -> str:
    return str(weights_hash({"w": torch.tensor([resumed_from or 0, step])}))


def saved(folder: Path, updates: int) -> SavedRun:
    return SavedRun(folder / f"{updates}.ckpt", {}, updates, 0)


def save(resumed_from: int | None, step: int) -> Interval:
    return Interval("mnist", resumed_from, {}, {"lr": 0.1}, step, 1, frozenset({sha(resumed_from, step)}))


def record(folder: Path, resumed_from: int | None, *steps: int) -> None:
    resumed = None if resumed_from is None else saved(folder, resumed_from)
    recorder = RecordedCheckpointIO(folder, "mnist", resumed, {"lr": 0.1})
    for step in steps:
        for _ in ("best.ckpt", "last.ckpt"):
            weights = {"w": torch.tensor([resumed_from or 0, step])}
            recorder.save_checkpoint({"state_dict": weights, "global_step": step, "epoch": 0}, folder / "saved.ckpt")


def ends(folder: Path, *checkpoints: int) -> tuple[int, int, str] | None:
    """From where to where training would be repeated, and to which hash."""
    interval = find_interval(folder, [saved(folder, step) for step in checkpoints])
    return interval and (interval.begin.updates if interval.begin else 0, interval.step, *interval.hashes)


def test_each_save_is_recorded_once_after_the_start_that_made_it(tmp_path: Path) -> None:
    record(tmp_path, None, 5, 10)
    record(tmp_path, 10, 15)
    assert len((tmp_path / "weights.jsonl").read_text().splitlines()) == 5
    assert read_saves(tmp_path) == {5: save(None, 5), 10: save(None, 10), 15: save(10, 15)}


def test_the_interval_begins_at_a_checkpoint_with_a_next_save(tmp_path: Path) -> None:
    record(tmp_path, None, 5, 10, 12)
    assert ends(tmp_path, 5, 12) == (5, 10, sha(None, 10))
    assert ends(tmp_path, 5, 10, 12) == (10, 12, sha(None, 12)), "the shortest"
    assert ends(tmp_path, 12) == ends(tmp_path) == (0, 5, sha(None, 5))
    begin = saved(tmp_path, 5)
    interval = replace(save(None, 10), begin=begin, begin_hashes=frozenset({sha(None, 5)}))
    assert find_interval(tmp_path, [begin]) == interval


def test_weights_saved_before_the_first_update_are_no_interval(tmp_path: Path) -> None:
    record(tmp_path, None, 0)
    assert ends(tmp_path) is None
    record(tmp_path, 0, 5)
    assert ends(tmp_path, 0) == (0, 5, sha(0, 5))


def test_saves_abandoned_by_a_resume_are_not_compared(tmp_path: Path) -> None:
    record(tmp_path, None, 5, 10, 15)
    record(tmp_path, 5, 9, 14)
    assert ends(tmp_path, 5) == (5, 9, sha(5, 9))
    assert ends(tmp_path, 9, 14) == (9, 14, sha(5, 14))


def test_a_run_from_a_foreign_checkpoint_is_not_repeated(tmp_path: Path) -> None:
    record(tmp_path, 100, 105)
    assert ends(tmp_path, 105) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}\n", "line 1 of .* cannot be read"),
        ('{"save": {"step": 1, "epoch": 1, "sha256": "a"}}\n', "line 1 of .* cannot be read"),
        ("[" * 100_000 + "\n", "line 1 of .* cannot be read"),
    ],
)
def test_a_damaged_record_is_rejected(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "weights.jsonl").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_saves(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_bit_of_every_type_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3).to(dtype)
    changed = tensor.clone()
    changed.view(torch.uint8).flatten()[-1] ^= 1
    assert weights_hash({"w": tensor}) == weights_hash({"w": tensor.T.contiguous().T})
    assert weights_hash({"w": tensor}) != weights_hash({"w": changed})
    assert weights_hash({"w": tensor}) != weights_hash({"w": tensor.reshape(3, 2)})
    assert weights_hash({"w": tensor}) != weights_hash({"v": tensor})


def test_a_conjugated_view_has_the_hash_of_its_values() -> None:
    value = torch.tensor([1 + 2j])
    assert weights_hash({"w": value.conj()}) == weights_hash({"w": torch.tensor([1 - 2j])})
