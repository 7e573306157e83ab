import os

import pytest

from tests.support.ranks import run_ranks


def _fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")


def test_a_failing_rank_fails_the_test_with_its_traceback():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised.*ValueError: boom"):
        run_ranks(_fail_on_rank_1, 2)
