import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.errors import UserError
from datamodules.loading.sampling import (
    epoch_order,
    evaluation_spans,
    num_training_steps,
    split_indices,
    systematic_draws,
    training_spans,
    weighted_order,
)

sizes = st.integers(1, 200)
batch_sizes = st.integers(1, 40)
worlds = st.integers(1, 9)


def _steps(n, batch_size, world_size, **options):
    """The samples of each step, by step and rank."""
    ranks = [list(training_spans(n, batch_size, rank, world_size, **options)) for rank in range(world_size)]
    return [[list(range(*span)) for span in step] for step in zip(*ranks, strict=True)]


def _joined(step):
    return [sample for part in step for sample in part]


@given(n=sizes, batch_size=batch_sizes, world_size=worlds)
def test_every_sample_is_trained_on_exactly_once(n, batch_size, world_size):
    steps = _steps(n, batch_size, world_size)
    assert [sample for step in steps for sample in _joined(step)] == list(range(n))
    assert len(steps) == num_training_steps(n, batch_size, world_size)


@given(n=sizes, batch_size=batch_sizes, world_size=worlds)
def test_only_the_last_step_is_shared_unevenly_and_then_by_one_sample_at_most(n, batch_size, world_size):
    *full, last = _steps(n, batch_size, world_size)
    assert all(len(part) == batch_size for step in full for part in step)
    counts = [len(part) for part in last]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert max(counts) <= batch_size
    assert counts[0] >= 1, "rank 0 is never empty: its buffers are what gets saved"


@given(n=sizes, batch_size=st.integers(1, 12), splits=st.lists(st.tuples(worlds, st.integers(1, 6)), min_size=1))
def test_an_update_consumes_the_same_slice_however_it_is_split(n, batch_size, splits):
    for world_size, accumulation in splits:
        steps = _steps(n, batch_size, world_size)
        updates = [steps[i : i + accumulation] for i in range(0, len(steps), accumulation)]
        update_size = batch_size * world_size * accumulation
        expected = [list(range(start, min(n, start + update_size))) for start in range(0, n, update_size)]
        assert [[sample for step in update for sample in _joined(step)] for update in updates] == expected


@given(data=st.data(), n=sizes, before=st.tuples(batch_sizes, worlds), after=st.tuples(batch_sizes, worlds))
def test_a_resume_sees_the_rest_exactly_once_on_any_number_of_ranks(data, n, before, after):
    first = _steps(n, *before)
    done = data.draw(st.integers(0, len(first) - 1))
    seen = [sample for step in first[:done] for sample in _joined(step)]
    rest = _steps(n, *after, consumed=done * before[0] * before[1])
    assert seen + [sample for step in rest for sample in _joined(step)] == list(range(n))
    if before == after:
        assert rest == first[done:]


@given(n=st.integers(0, 200), batch_size=batch_sizes, world_size=worlds)
def test_evaluation_visits_every_sample_once_in_batches_that_no_world_size_changes(n, batch_size, world_size):
    ranks = [list(evaluation_spans(n, batch_size, rank, world_size)) for rank in range(world_size)]
    assert all(ranks), "a rank without any batch would be missing in the reductions"
    spans = sorted(span for spans in ranks for span in spans if span[0] < span[1])
    alone = [span for span in evaluation_spans(n, batch_size, 0, 1) if span[0] < span[1]]
    assert spans == alone == [(start, min(start + batch_size, n)) for start in range(0, n, batch_size)]


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


def test_another_seed_holds_out_others_and_chance_decides_which():
    first, second = (set(split_indices(10_000, 1_000, seed)[1].tolist()) for seed in (1, 2))
    assert 50 < len(first & second) < 150  # 100 expected, standard deviation 9
    assert abs(sum(first) / 1_000 - 4_999.5) < 5 * 2_887 / 1_000**0.5


@pytest.mark.parametrize("held_out", [10, 11, -1])
def test_holding_out_everything_is_refused_with_the_parameter_to_change(held_out):
    with pytest.raises(UserError, match=rf"cannot hold {held_out} of 10 samples out.*0 to 9.*`val_fraction`"):
        split_indices(10, held_out, seed=1)


weighted = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=60).filter(
    lambda pairs: any(weight for weight, _ in pairs)
)


@given(pairs=weighted, seed=st.integers(0, 9), epoch=st.integers(0, 99), grouped=st.booleans())
def test_each_sample_and_class_is_drawn_its_expected_number_of_times_rounded_up_or_down(pairs, seed, epoch, grouped):
    weights, groups = (torch.tensor(part) for part in zip(*pairs, strict=True))
    draws = systematic_draws(weights, seed, epoch, groups if grouped else None)
    expected = weights.double() * len(pairs) / weights.sum()
    assert draws.sum() == len(pairs)
    assert not draws[weights == 0].any()
    assert bool(((draws - expected).abs() < 1 + 1e-9).all())
    for group in groups.unique() if grouped else ():
        assert abs(float((draws - expected)[groups == group].sum())) < 1 + 1e-9
    samples, repeats = weighted_order(weights, seed, epoch, groups if grouped else None)
    assert torch.equal(samples.bincount(minlength=len(pairs)), draws)
    assert len(set(zip(samples.tolist(), repeats.tolist()))) == len(pairs)
    assert not repeats.numel() or int(repeats.max()) == int(draws.max()) - 1
    torch.manual_seed(epoch)
    assert torch.equal(samples, weighted_order(weights, seed, epoch, groups if grouped else None)[0])


def test_equal_weights_draw_each_sample_once_and_seeds_draw_each_in_proportion():
    assert systematic_draws(torch.full((1000,), 0.1), 1, 0).eq(1).all()
    weights = torch.tensor([1.0, 2.0, 4.0, 0.0, 0.5, 3.5])
    mean = sum(systematic_draws(weights, seed, 0) for seed in range(1000)) / 1000
    assert torch.allclose(mean.double(), weights.double() * 6 / 11, atol=0.06)  # Standard deviation 0.016 at most.


def test_over_epochs_a_large_class_is_seen_as_evenly_as_a_small_one():
    classes = torch.arange(1_000).clamp(max=990) // 990  # 990 and 10 samples, 500 draws of each.
    weights = 1 / classes.bincount()[classes]
    seen = sum(systematic_draws(weights, 1, epoch, classes) for epoch in range(20))
    assert (int(seen[:990].min()), int(seen[:990].max())) == (9, 11)  # 10.1 expected; of independent draws 1 to 21.
    assert (int(seen[990:].min()), int(seen[990:].max())) == (1000, 1000)


def test_an_epochs_order_is_a_pure_function_of_seed_and_epoch():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch).tolist()) for seed in (1, 2) for epoch in range(5)}
    assert len(set(orders.values())) == 10
    torch.manual_seed(99)
    assert all(tuple(epoch_order(50, *key).tolist()) == order for key, order in orders.items())
