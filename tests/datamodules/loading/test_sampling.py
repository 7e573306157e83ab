from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.errors import UserError
from datamodules.loading.sampling import Division, epoch_order, split_indices


@st.composite
def divisions(draw):
    """An epoch on one rank, and the numbers of ranks that can share its updates."""
    batch_size = draw(st.integers(1, 12))
    items, update_size = draw(st.integers(1, 200)), draw(st.integers(1, 12 * batch_size))
    alone = Division(items, batch_size, update_size, 1)
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
def test_any_number_of_ranks_computes_the_same_numbered_micro_batches_in_ranges(cut):
    alone, ranks = cut
    expected = _micro_batches(alone)
    assert sum(stop - start for start, stop in expected.values()) == alone.items
    for division in (replace(alone, world_size=world_size) for world_size in ranks):
        steps = [list(division.steps(rank)) for rank in range(division.world_size)]
        assert {len(of_rank) for of_rank in steps} == {len(division)}
        computed = [step for of_rank in steps for step in of_rank if step.start < step.stop]
        assert {step.number: (step.start, step.stop) for step in computed} == expected
        assert len(computed) == len(expected)
        surplus = [step.number for of_rank in steps for step in of_rank if step.start == step.stop]
        assert len({*surplus} - {*range(division.updates * division.micro_batches)}) == len(surplus)
        size = division.steps_per_update
        for begin in range(0, len(division), size):
            update = [of_rank[begin : begin + size] for of_rank in steps]
            real = [[step.number for step in of_rank if step.start < step.stop] for of_rank in update]
            dealt = [number for numbers in real for number in numbers]
            assert dealt == [*range(dealt[0], dealt[0] + len(dealt))], (
                "each rank has a range, in the order of the ranks"
            )
            counts = [len(numbers) for numbers in real]
            assert counts == sorted(counts, reverse=True)
            assert max(counts) - min(counts) <= 1
            assert {len(of_rank) for of_rank in update} == {counts[0]}, "no more steps than rank 0 has micro-batches"
            for of_rank, count in zip(update, counts, strict=True):
                assert all(step.start == step.stop for step in of_rank[count:]), "surplus steps come last"
                assert {step.in_update for step in of_rank} == {len(dealt)}


@given(cut=divisions(), data=st.data())
def test_a_resume_at_any_update_goes_on_with_the_rest_under_the_same_numbers(cut, data):
    alone, ranks = cut
    before, after = (replace(alone, world_size=world_size) for world_size in ranks)
    update = data.draw(st.integers(0, alone.updates - 1))
    position, first = update * alone.update_size, update * alone.micro_batches
    assert before.steps_before(position) == update * before.steps_per_update
    assert before.steps_before(alone.items) == len(before)
    rest = [step for rank in range(after.world_size) for step in after.steps(rank, position)]
    found = {step.number: (step.start, step.stop) for step in rest if step.start < step.stop}
    assert found == {number: span for number, span in _micro_batches(alone).items() if number >= first}
    assert len(rest) == after.world_size * (len(after) - after.steps_before(position))


@given(n=st.integers(1, 300), seed=st.integers(0, 2**31), data=st.data())
def test_a_split_is_disjoint_complete_sorted_and_a_function_of_the_seed(n, seed, data):
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
def test_holding_out_everything_is_refused_with_the_parameter_to_change(held_out):
    with pytest.raises(UserError, match=rf"cannot hold {held_out} of 10 samples out.*0 to 9.*`val_fraction`"):
        split_indices(10, held_out, seed=1)


def test_an_epochs_order_is_a_pure_function_of_seed_and_epoch():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch).tolist()) for seed in (1, 2) for epoch in range(5)}
    assert len(set(orders.values())) == 10
    torch.manual_seed(99)
    assert all(tuple(epoch_order(50, *key).tolist()) == order for key, order in orders.items())
