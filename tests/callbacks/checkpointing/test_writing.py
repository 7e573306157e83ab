import logging
from collections.abc import Iterator

import pytest

from callbacks.checkpointing.writing import best_effort, forget_failures, unsaved


@pytest.fixture(autouse=True)
def nothing_failed_before() -> Iterator[None]:
    forget_failures()
    yield
    forget_failures()


def _fail(what: str = "") -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_write_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning_recipes"), "propagate", True)
    for _ in range(3):
        with best_effort("metrics.csv"):
            _fail()
    assert unsaved() == {"metrics.csv": "No space left on device"}
    # pytest also listens at loggers that did not propagate when the test began.
    assert [record.getMessage() for record in dict.fromkeys(caplog.records)] == [
        "warning: metrics.csv cannot be written (No space left on device); the run continues without it"
    ]
    forget_failures("metrics.csv")
    assert unsaved() == {}


def test_a_function_that_may_fail_returns_none_on_failure():
    assert best_effort("length")(len)([1, 2]) == 2
    assert best_effort("length")(_fail)() is None
    assert unsaved() == {"length": "No space left on device"}


def test_best_effort_suppresses_only_the_given_errors():
    with pytest.raises(ValueError, match="mine"), best_effort("x", OSError):
        raise ValueError("mine")
    with pytest.raises(SystemExit), best_effort("x"):
        raise SystemExit
