"""The record of a run's weights, and the part of the run that can be trained again."""

from pathlib import Path

import pytest

from datamodules.errors import UserError
from recipes.results.weights_record import Interval, Save, Start, WeightsRecord, interval_to_repeat, read_record


def record(folder: Path, resumed_from: int | None, *steps: int) -> Start:
    start = Start("mnist", resumed_from, {"threads": 1}, {"lr": 0.1})
    writer = WeightsRecord(folder, start)
    for step in steps:
        for _ in ("best.ckpt", "last.ckpt"):
            writer.add(Save(step, 1, f"{resumed_from}-{step}"))
    return start


def ends(folder: Path, *checkpoints: int) -> tuple[int, int, str] | None:
    """From where to where training would be repeated, and to which hash."""
    interval = interval_to_repeat(folder, {step: folder / f"{step}.ckpt" for step in checkpoints})
    return interval and (interval.from_step, interval.step, *interval.hashes)


def test_each_save_is_recorded_once_after_the_start_that_made_it(tmp_path: Path) -> None:
    first = record(tmp_path, None, 5, 10)
    second = record(tmp_path, 10, 15)
    assert read_record(tmp_path) == [
        (first, [Save(5, 1, "None-5"), Save(10, 1, "None-10")]),
        (second, [Save(15, 1, "10-15")]),
    ]


def test_the_interval_begins_at_a_checkpoint_with_a_next_save_else_at_the_beginning(tmp_path: Path) -> None:
    start = record(tmp_path, None, 5, 10, 12)
    assert ends(tmp_path, 5, 12) == (5, 10, "None-10")
    assert ends(tmp_path, 5, 10, 12) == (10, 12, "None-12"), "the shortest"
    assert ends(tmp_path, 12) == ends(tmp_path) == (0, 5, "None-5")
    assert interval_to_repeat(tmp_path, {5: tmp_path / "best.ckpt"}) == Interval(
        tmp_path, start, 10, 1, frozenset({"None-10"}), tmp_path / "best.ckpt", 5, frozenset({"None-5"})
    )


def test_weights_that_were_saved_before_the_first_update_are_no_interval(tmp_path: Path) -> None:
    record(tmp_path, None, 0)
    assert ends(tmp_path) is None
    record(tmp_path, 0, 5)
    assert ends(tmp_path, 0) == (0, 5, "0-5")


def test_what_was_abandoned_by_a_resume_from_an_earlier_checkpoint_is_not_compared(tmp_path: Path) -> None:
    record(tmp_path, None, 5, 10, 15)
    record(tmp_path, 5, 9, 14)
    assert ends(tmp_path, 5) == (5, 9, "5-9")
    assert ends(tmp_path, 9, 14) == (9, 14, "5-14")


def test_a_run_that_began_from_a_foreign_checkpoint_is_not_repeated_from_the_beginning(tmp_path: Path) -> None:
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
def test_a_damaged_record_is_refused_and_a_line_that_was_cut_off_is_left_out(
    tmp_path: Path, text: str, problem: str
) -> None:
    record(tmp_path, None, 5)
    with (tmp_path / "weights.jsonl").open("a") as file:
        file.write('{"save": {"st')
    assert len(read_record(tmp_path)[0][1]) == 1
    resumed = record(tmp_path, 5, 8)
    assert read_record(tmp_path)[1] == (resumed, [Save(8, 1, "5-8")]), "the process was killed, and the run resumed"
    assert ends(tmp_path, 5) == (5, 8, "5-8")
    (tmp_path / "weights.jsonl").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_record(tmp_path)
