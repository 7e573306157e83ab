import pickle
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.randomness import random_bits
from datamodules.loading.sampling import epoch_order
from datamodules.translation.loaders import (
    PackedPairs,
    PackedSentences,
    SentenceEvaluationLoader,
    SentenceTrainLoader,
    TranslationBatch,
    batches_within_memory,
    pack,
    shuffle_units,
)

N = 53


def _sentences(purpose: str, longest: int) -> PackedSentences:
    """Sentences of 1 to `longest` tokens and an end mark, no two alike."""
    lengths = random_bits(1, purpose, 0, torch.arange(2 * N)).squeeze(1) % longest + 2
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    tokens = torch.arange(4, 4 + int(offsets[-1]), dtype=torch.int32)
    tokens[offsets[1:] - 1] = 2
    return PackedSentences(tokens, offsets)


PAIRS = PackedPairs(_sentences("source", 12), _sentences("target", 9))
ROWS = torch.arange(0, 2 * N, 2)


def _loader(batch_size: int = 4, seed: int = 1, **options) -> SentenceTrainLoader:
    return SentenceTrainLoader(PAIRS, ROWS, batch_size, seed, **options)


def _numbers(batches: Iterable[TranslationBatch]) -> list[list[int]]:
    return [batch.numbers.tolist() for batch in batches if batch.numbers is not None]


def _on_ranks(world_size: int, items: int, state: dict | None = None, **options) -> list[SentenceTrainLoader]:
    """Loaders of all ranks, with updates of so many items, from a state on."""
    loaders = [_loader(rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for loader in loaders:
        loader.divide_updates(items)
        if state is not None:
            loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loaders


def _numbered(loaders: list[SentenceTrainLoader]) -> dict[int, list[int]]:
    """The sentences of each micro-batch of the next epoch, or of the rest of the present one, by number."""
    found: dict[int, list[int]] = {}
    for loader in loaders:
        for update in loader:
            for number, batch in update:
                if not update.is_dummy:
                    assert number not in found
                    found[number] = batch.numbers.tolist()
    return dict(sorted(found.items()))


@cache
def _alone(items: int, **options: int) -> list[dict[int, list[int]]]:
    """Three epochs on one device."""
    loaders = _on_ranks(1, items, **options)
    return [_numbered(loaders) for _ in range(3)]


def test_sentences_are_packed_as_numbers_of_their_own_tokens() -> None:
    lines = ["a b a", "c", "b <eos> a"]
    for start in (False, True):
        packed, tokens = pack(lines, start=start)
        assert len(packed) == 3
        first, last = (1, 2)
        for row, line in enumerate(lines):
            *rest, end = packed[row]
            if start:
                assert rest.pop(0) == first
            assert end == last
            assert [tokens[number] for number in rest] == line.split()
    # The text's own word "<eos>" is no end mark.
    assert tokens[4:] == ["a", "b", "c", "<eos>"]


def test_a_batch_pads_the_sentences_of_its_rows_with_zeros() -> None:
    rows = torch.tensor([7, 0, 2 * N - 1, 7])
    batch = PAIRS.batch(rows)
    sides = zip(
        (PAIRS.source, PAIRS.target), (batch.source, batch.target), (batch.source_lengths, batch.target_lengths)
    )
    for side, ids, lengths in sides:
        assert (ids.dtype, lengths.dtype) == (torch.int64, torch.int64)
        assert ids.shape == (4, int(lengths.max()))
        assert [row[:length].tolist() for row, length in zip(ids, lengths)] == [side[int(row)] for row in rows]
        assert int(ids.count_nonzero()) == int(lengths.sum())
    assert batch.numbers is rows


def test_an_empty_batch_has_the_shape_of_a_batch() -> None:
    batch = PAIRS.batch(ROWS[:0])
    assert batch.source.shape == batch.target.shape == (0, 2)
    assert batch.source_lengths.shape == (0,)
    assert batch.source.dtype == batch.target_lengths.dtype == torch.int64


@given(n=st.integers(0, 40), unit=st.integers(1, 12), epoch=st.integers(0, 3))
def test_shuffled_units_keep_the_short_one_last(n: int, unit: int, epoch: int) -> None:
    numbers = shuffle_units(n, unit, 1, epoch).tolist()
    assert sorted(numbers) == list(range(n))
    units = [numbers[i : i + unit] for i in range(0, n, unit)]
    short = units.pop() if n % unit else []
    gap = short[0] if short else n
    assert short == list(range(gap, gap + n % unit))
    # But for the gap that the short one leaves.
    others = [i for i in range(n) if i not in short]
    assert all(others[others.index(u[0]) :][:unit] == u for u in units)


SIZES = [(24, {"batch_size": 5}), (10, {"batch_size": 3}), (5, {"batch_size": 1})]
CUTS = st.sampled_from([*SIZES, (4, {"max_tokens": 90}), (7, {"max_tokens": 40})])
"""Sentences, or batches limited by tokens, of an update; and the options of the loader. Up to 4 ranks can share it."""
RANKS = st.integers(1, 4)


@given(cut=CUTS, world_size=RANKS)
def test_numbered_micro_batches_equal_one_devices(cut: tuple[int, dict], world_size: int) -> None:
    items, options = cut
    loaders, epochs = _on_ranks(world_size, items, **options), _alone(items, **options)[:2]
    assert [_numbered(loaders) for _ in epochs] == epochs
    assert len({len(loader) for loader in loaders}) == 1
    for batches in epochs:
        assert sorted(sum(batches.values(), [])) == ROWS.tolist()
    assert epochs[0] != epochs[1]


@given(batch_size=st.integers(1, 24))
def test_an_update_has_the_same_sentences_at_any_batch_size(batch_size: int) -> None:
    def updates(batch_size: int) -> list[list[int]]:
        loaders = _on_ranks(1, 24, batch_size=batch_size)
        found: dict[int, list[int]] = {}
        for number, batch in _numbered(loaders).items():
            found.setdefault(number // loaders[0].division.micro_batches, []).extend(batch)
        return [*found.values()]

    assert updates(batch_size) == updates(24)


@given(max_tokens=st.integers(23, 300), world_size=st.integers(1, 4))
def test_a_batch_by_tokens_never_exceeds_them(max_tokens, world_size):
    loaders = [_loader(max_tokens=max_tokens, rank=rank, world_size=world_size) for rank in range(world_size)]
    lengths = []
    for _ in range(3):
        for loader in loaders:
            loader.divide_updates(world_size)
        updates = [update for loader in loaders for update in loader if not update.is_dummy]
        batches = [batch for update in updates for batch in update.batches]
        assert all(batch.source.numel() + batch.target.numel() <= max_tokens for batch in batches if len(batch.source))
        lengths.append(len(batches))
        assert sorted(sum(_numbers(batches), [])) == ROWS.tolist()
    assert len(set(lengths)) == 1
    mean = 15
    assert lengths[0] <= 2 * N * mean / max_tokens + world_size + 12


@given(unit=st.sampled_from([1, 3, 5, 12]), epoch=st.integers(0, 2))
def test_updates_of_a_pool_are_neighbors_by_length(unit: int, epoch: int) -> None:
    loader, pool = _loader(unit), 8
    updates = [_numbers(loader) for _ in range(epoch + 1)][epoch]
    order = ROWS[epoch_order(len(ROWS), 1, epoch)].tolist()
    whole = len(order) - len(order) % unit
    for start in range(0, whole, pool * unit):
        of_pool = set(order[start : min(start + pool * unit, whole)])
        units = [update for update in updates if of_pool.issuperset(update)]
        assert sorted(sum(units, [])) == sorted(of_pool)
        longest = torch.maximum(PAIRS.source.lengths, PAIRS.target.lengths)
        spans = sorted((int(longest[update].min()), int(longest[update].max())) for update in units)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    if whole < len(order):
        assert updates[-1] == order[whole:]


@given(cut=CUTS, before=RANKS, after=RANKS, epoch=st.integers(0, 1), data=st.data())
def test_a_resume_after_any_update_on_other_ranks_makes_the_rest(
    cut: tuple[int, dict], before: int, after: int, epoch: int, data: st.DataObject
) -> None:
    items, options = cut
    epochs = _alone(items, **options)
    old = _on_ranks(before, items, **options)[-1]
    old.set_epoch(epoch)
    steps, batches = data.draw(st.integers(1, len(old))), iter(old)
    for _ in range(steps):
        next(batches)
    state = old.state_dict()
    new = _on_ranks(after, items, state, **options)
    done = steps if steps < len(old) else 0
    first = done * old.division.micro_batches
    rest = {number: batch for number, batch in epochs[state["epoch"]].items() if number >= first}
    assert _numbered(new) == rest
    if state["epoch"] == epoch:
        assert _numbered(new) == epochs[epoch + 1]


def test_the_epoch_may_be_set_after_the_iterator_is_created() -> None:
    loader, other = _loader(), _loader()
    iterator = iter(loader)
    loader.set_epoch(2)
    assert _numbers(iterator) == [_numbers(other) for _ in range(3)][2] != _numbers(_loader())


def test_a_position_in_other_data_is_rejected() -> None:
    state = _loader().state_dict()
    _loader(seed=2, world_size=2).load_state_dict(state)
    others = (ROWS[:-1], f"found {N - 1}; resume"), (ROWS.flip(0), f"found {N}, others or in another order")
    for rows, found in others:
        with pytest.raises(UserError, match=f"of a run on {N} samples, {found}"):
            SentenceTrainLoader(PAIRS, rows, 4, 1).load_state_dict(state)
    with pytest.raises(UserError, match=r"epoch of 99 .*, found 53 sentences; resume with the same data"):
        _loader().load_state_dict({"epoch": 0, "consumed": 8, "items": 99, "unit": 4})


def test_what_cannot_be_trained_on_is_rejected_with_what_to_type() -> None:
    with pytest.raises(UserError, match="the training set is empty"):
        SentenceTrainLoader(PAIRS, ROWS[:0], 4, 1)
    with pytest.raises(UserError, match="max_tokens=10 is less than the longest pair of sentences has, 2. tokens"):
        _loader(max_tokens=10)


def test_an_update_by_tokens_knows_its_size_on_the_mean() -> None:
    loader = _loader(max_tokens=100)
    loader.divide_updates(loader.items_of(4))
    mean = float((PAIRS.source.lengths + PAIRS.target.lengths)[ROWS].double().mean())
    assert loader.samples_per_update == 4 * int(100 / mean)
    with pytest.raises(UserError, match="global_batch_size=64 is a number of sentences, .* pass .* as in accumulate=4"):
        loader.items_of_samples(64)


@settings(max_examples=60)
@given(n=st.integers(0, N), batch_size=st.integers(1, 9), world_size=st.integers(1, 6), bucket=st.booleans())
def test_evaluation_has_the_same_batches_on_any_rank_count(n, batch_size, world_size, bucket):
    def batches(rank: int, world_size: int) -> list[list[int]]:
        loader = SentenceEvaluationLoader(PAIRS, ROWS[:n], batch_size, rank, world_size, bucket)
        found = _numbers(loader)
        assert len(loader) == len(found) >= 1
        return [batch for batch in found if batch]

    alone = batches(0, 1)
    assert sorted(sum(alone, [])) == ROWS[:n].tolist()
    if not bucket:
        assert sum(alone, []) == ROWS[:n].tolist()
    dealt = [batches(rank, world_size) for rank in range(world_size)]
    assert [dealt[i % world_size][i // world_size] for i in range(len(alone))] == alone


@given(lengths=st.lists(st.sampled_from([2, 100, 128, 129, 300, 8000]), max_size=40), batch_size=st.integers(1, 20))
def test_long_sentences_are_evaluated_apart(lengths, batch_size):
    batches = [batch.tolist() for batch in batches_within_memory(torch.tensor(lengths), batch_size)]
    neighbors = [batch.tolist() for batch in torch.arange(len(lengths)).split(batch_size)]
    neighbors = neighbors if lengths else []
    assert sorted(sum(batches, [])) == list(range(len(lengths)))
    if max(lengths, default=0) <= 128:
        assert batches == neighbors
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) <= 1 or len(batch) * longest**2 <= batch_size * 128**2
    assert all(any(set(batch) <= set(of) for of in neighbors) for batch in batches)


def test_the_first_evaluation_batches_are_not_the_shortest() -> None:
    loader = SentenceEvaluationLoader(PAIRS, ROWS, 4)
    lengths: list[Tensor] = [batch.source_lengths.double().mean() for batch in loader]
    middle = float(torch.stack(lengths).mean())
    assert abs(float(torch.stack(lengths[:6]).mean()) - middle) < 2


def test_a_loader_that_keeps_the_order_repeats_its_first_epoch():
    loader = SentenceTrainLoader(PAIRS, ROWS, 4, 1)
    first = [batch.source.tolist() for batch in loader]
    loader.set_epoch(1)
    assert [batch.source.tolist() for batch in loader] != first
    loader.keeps_order = True
    loader.set_epoch(2)
    assert [batch.source.tolist() for batch in loader] == first
