import itertools
import math

import pytest
import torch
from torch import Tensor

from callbacks.lib.exact_sums import TreeSum, from_whole_numbers, to_whole_numbers, tree_nodes
from datamodules.loading.sampling import range_of_rank

FINITE = torch.randint(-(2**31), 2**31, (3000,), generator=torch.Generator().manual_seed(1)).int().view(torch.float32)
FINITE = torch.cat((FINITE[FINITE.isfinite()], torch.tensor([0.0, -0.0, 1e-45, -3.4028234663852886e38])))


def test_whole_numbers_give_back_every_float32():
    assert [from_whole_numbers(row) for row in to_whole_numbers(FINITE).tolist()] == FINITE.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_has_the_same_bits_in_any_order(dtype: torch.dtype):
    values = (FINITE.double() if dtype is torch.float32 else torch.rand(3000, dtype=torch.float64)).to(dtype)
    whole = to_whole_numbers(values)
    of_ranks = [whole[rank::3].flip(0).sum(0) for rank in (2, 0, 1)]
    assert torch.equal(sum(of_ranks), whole.sum(0))
    total = from_whole_numbers(sum(of_ranks).tolist())
    assert total == math.fsum(values.tolist()) or (dtype is torch.float64 and abs(total - values.sum()) < 1e-11)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_with_a_value_that_is_not_finite_is_nan(value: float, dtype: torch.dtype):
    whole = to_whole_numbers(torch.tensor([1.0, value, -value], dtype=dtype)).sum(0)
    assert math.isnan(from_whole_numbers(whole.tolist()))


def test_eight_million_values_fit():
    largest = torch.tensor(FINITE.abs().max().item(), dtype=torch.float64)
    assert int(to_whole_numbers(FINITE).abs().max()) * 2 * 2**23 < 2**63
    assert from_whole_numbers((to_whole_numbers(largest) * 2**23).tolist()) == largest.item() * 2**23


COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13)


def definition(values: Tensor, first: int, stop: int) -> Tensor:
    """S(a, b) = S(a, a + k) + S(a + k, b), where k is the largest power of two below b - a."""
    if stop == first + 1:
        return values[first]
    largest = max(2**power for power in range(10) if 2**power < stop - first)
    return definition(values, first, first + largest) + definition(values, first + largest, stop)


def leaves(count: int) -> Tensor:
    """Values of which each order of addition has other bits."""
    draws = torch.Generator().manual_seed(count)
    return torch.randn(count, 50, generator=draws) * 10 ** torch.randint(-3, 4, (count, 50), generator=draws).float()


def added(values: Tensor, first: int, stop: int, count: int | None) -> TreeSum:
    total = TreeSum(count)
    for number in range(first, stop):
        total.add((number, number + 1), [values[number].clone()])
    return total


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_ranks_has_the_bits_of_the_definition(count: int) -> None:
    values = leaves(count)
    expected = definition(values, 0, count)
    for ranks in range(1, count + 3):
        total = TreeSum(count)
        for rank in range(ranks):
            first, stop = range_of_rank(count, rank, ranks)
            part = added(values, first, stop, count)
            assert [node for node, _ in part.nodes] == tree_nodes(first, stop, count)
            for node, tensors in part.nodes:
                total.add(node, tensors)
        assert torch.equal(total.total[0], expected)
    if count > 3:
        assert not torch.equal(expected, sum(values[1:], values[0]))


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_that_is_known_at_the_end_gives_the_same_bits(count: int) -> None:
    total = added(leaves(count), 0, count, None)
    total.end(count)
    assert torch.equal(total.total[0], definition(leaves(count), 0, count))


def test_no_more_than_log2_sums_are_held() -> None:
    for count in (*COUNTS, 64):
        total, values = TreeSum(count), torch.ones(count, 1)
        for number in range(count):
            total.add((number, number + 1), [values[number]])
            assert len(total.nodes) <= count.bit_length()


def test_missing_micro_batches_are_an_error() -> None:
    for first, stop in itertools.combinations(range(4), 2):
        if (first, stop) != (0, 3):
            with pytest.raises(ValueError, match="expected all of 0 to 3"):
                _ = added(leaves(3), first, stop, 3).total
