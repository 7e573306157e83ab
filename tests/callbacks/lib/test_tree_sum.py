import itertools

import pytest
import torch
from torch import Tensor

from callbacks.lib.tree_sum import TreeSum, tree_nodes
from datamodules.loading.sampling import range_of_rank

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
