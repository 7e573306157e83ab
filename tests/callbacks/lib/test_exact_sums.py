import math

import pytest
import torch

from callbacks.lib.exact_sums import from_whole_numbers, to_whole_numbers

FINITE = torch.randint(-(2**31), 2**31, (3000,), generator=torch.Generator().manual_seed(1)).int().view(torch.float32)
FINITE = torch.cat((FINITE[FINITE.isfinite()], torch.tensor([0.0, -0.0, 1e-45, -3.4028234663852886e38])))


def test_every_float32_becomes_whole_numbers_and_back():
    assert [from_whole_numbers(row) for row in to_whole_numbers(FINITE).tolist()] == FINITE.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_is_exact_and_has_the_same_bits_in_any_order_and_split(dtype: torch.dtype):
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
