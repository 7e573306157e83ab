import os

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def _sum_of_ranks() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def _fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")


def test_ranks_really_talk_to_each_other():
    assert run_ranks(_sum_of_ranks, 2) == [3.0, 3.0]


def test_a_failing_rank_fails_the_test_with_its_traceback():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised.*ValueError: boom"):
        run_ranks(_fail_on_rank_1, 2)
