"""Durations carry their unit, and are rejected where they cannot be read or have no length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callbacks.lib.updates import Duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 steps", Duration(500, "steps")),
        ("1 step", Duration(1, "steps")),
        (500, Duration(500, "steps")),
        ("500", Duration(500, "steps")),
        (0, Duration(0, "steps")),
        ("2 epochs", Duration(2, "epochs")),
        ("1 epochs", Duration(1, "epochs")),
        ("1 Epoch", Duration(1, "epochs")),
        (" 0.5epochs ", Duration(0.5, "epochs")),
        ("5%", Duration(5, "%")),
        ("2.5 %", Duration(2.5, "%")),
    ],
)
def test_a_duration_is_a_number_with_a_unit_or_an_int_of_steps(text: int | str, expected: Duration) -> None:
    assert Duration.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "steps", "-1 steps", "5 minutes", "5 %%", "1e3", 2.5, -1, True, None, "nan epochs"]
)
def test_what_is_no_duration_is_rejected_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match=r'write "500 steps", "2 epochs", "5%" or 500 \(steps\)'):
        Duration.parse(text)  # type: ignore[arg-type]


def test_a_part_of_a_step_is_rejected() -> None:
    with pytest.raises(ValueError, match='write "3 steps"'):
        Duration.parse("2.5 steps")


def test_a_duration_longer_than_the_run_is_rejected() -> None:
    with pytest.raises(ValueError, match="longer than the run"):
        Duration.parse("101%")


@given(st.integers(0, 100), st.integers(0, 100_000))
def test_a_percentage_is_rounded_up_without_float_error(percent: int, total: int) -> None:
    assert Duration.parse(f"{percent}%").to_steps(math.inf, total) == -(-percent * total // 100)


@given(st.integers(0, 1000), st.integers(1, 10_000))
def test_a_number_of_epochs_or_steps_is_exact(number: int, per_epoch: int) -> None:
    assert Duration.parse(f"{number} epochs").to_steps(per_epoch, math.inf) == number * per_epoch
    assert Duration.parse(f"{number} steps").to_steps(math.inf, math.inf) == number


def test_a_duration_without_length_in_a_run_asks_for_steps() -> None:
    with pytest.raises(ValueError, match='"2 epochs" is unknown because the loader has no length: write'):
        Duration.parse("2 epochs").to_steps(math.inf, 100)
    with pytest.raises(ValueError, match='"5%" is unknown because the run has no end'):
        Duration.parse("5%").to_steps(10, math.inf)
    assert Duration.parse("0%").to_steps(math.inf, math.inf) == 0
