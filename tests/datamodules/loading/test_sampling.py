from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.errors import UserError
from datamodules.loading.sampling import UpdateDivision, epoch_order, number_draws, split_indices, weighted_order


@st.composite
def divisions(draw):
    """An epoch on one rank, and the numbers of ranks that can share its updates."""
    batch_size = draw(st.integers(1, 12))
    items, update_size = draw(st.integers(1, 200)), draw(st.integers(1, 12 * batch_size))
    alone = UpdateDivision(items, batch_size, update_size, 1)
    return alone, draw(st.lists(st.integers(1, min(9, alone.micro_batches)), min_size=2, max_size=2))


def _micro_batches(division):
    """The positions of each micro-batch, by update and place in it, from the definition."""
    updates = [
        range(start, min(start + division.update_size, division.items))
        for start in range(0, division.items, division.update_size)
    ]
    cuts = [
        [update[i : i + division.batch_size] for i in range(0, len(update), division.batch_size)] for update in updates
    ]
    return {
        number * division.micro_batches + place: (part.start, part.stop)
        for number, parts in enumerate(cuts)
        for place, part in enumerate(parts)
    }


@given(cut=divisions())
def test_ranks_compute_ranges_of_the_same_micro_batches(cut):
    alone, ranks = cut
    expected = _micro_batches(alone)
    assert sum(stop - start for start, stop in expected.values()) == alone.items
    for division in (replace(alone, world_size=world_size) for world_size in ranks):
        assert division.updates == alone.updates
        computed = {}
        for update in range(division.updates):
            shares = [division.rank_slice(update, rank) for rank in range(division.world_size)]
            real = [share for share in shares if not share.is_dummy]
            dealt = [(share.first + place, span) for share in real for place, span in enumerate(share.spans)]
            numbers = [number for number, _ in dealt]
            first = update * alone.micro_batches
            assert numbers == [*range(first, first + len(numbers))], "ranges, in the order of the ranks"
            sizes = [len(share.spans) for share in real]
            assert max(sizes) - min(sizes) <= 1
            assert {share.total for share in shares} == {len(dealt)}
            for share in shares[len(real) :]:
                assert (share.first, share.spans) == (first, shares[0].spans[:1]), "a stand-in is the first micro-batch"
            computed |= dict(dealt)
        assert computed == expected


@given(n=st.integers(1, 300), seed=st.integers(0, 2**31), data=st.data())
def test_a_split_divides_the_samples_by_the_seed(n, seed, data):
    held_out = data.draw(st.integers(0, n - 1))
    train, val = split_indices(n, held_out, seed)
    assert len(val) == held_out
    assert sorted(train.tolist() + val.tolist()) == list(range(n))
    assert train.tolist() == sorted(train.tolist())
    assert val.tolist() == sorted(val.tolist())
    torch.randn(3)
    again = split_indices(n, held_out, seed)
    assert torch.equal(train, again[0])
    assert torch.equal(val, again[1])


@pytest.mark.parametrize("held_out", [10, 11, -1])
def test_holding_out_everything_names_the_parameter_to_change(held_out):
    with pytest.raises(UserError, match=rf"cannot hold {held_out} of 10 samples out.*0 to 9.*`val_fraction`"):
        split_indices(10, held_out, seed=1)


def test_an_order_is_a_pure_function_of_its_arguments():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch).tolist()) for seed in (1, 2) for epoch in range(5)}
    assert len(set(orders.values())) == 10
    torch.manual_seed(99)
    assert all(tuple(epoch_order(50, *key).tolist()) == order for key, order in orders.items())


def test_weighted_draws_have_the_frequencies_of_the_weights():
    weights = torch.tensor([1.0, 0.0, 3.0, 0.0, 6.0]).repeat(2_000)
    drawn = torch.cat([weighted_order(weights, seed=1, epoch=epoch) % 5 for epoch in range(10)])
    frequencies = drawn.bincount(minlength=5) / len(drawn)
    # Four standard deviations of a mean over 100,000 draws.
    assert torch.allclose(frequencies, torch.tensor([0.1, 0.0, 0.3, 0.0, 0.6]), rtol=0, atol=4 * 0.5 / 100_000**0.5)


def test_weighted_draws_are_a_pure_function_of_their_arguments():
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))
    orders = {(seed, epoch): weighted_order(weights, seed, epoch).tolist() for seed in (1, 2) for epoch in range(5)}
    assert len(set(map(tuple, orders.values()))) == 10
    torch.manual_seed(99)
    assert all(weighted_order(weights, *key).tolist() == order for key, order in orders.items())


@given(rows=st.lists(st.integers(0, 9), max_size=40))
def test_each_draw_has_a_number_of_its_own_that_tells_its_sample(rows):
    numbers = number_draws(torch.tensor(rows, dtype=torch.int64), count=10).tolist()
    assert numbers == [row + 10 * rows[:place].count(row) for place, row in enumerate(rows)]
