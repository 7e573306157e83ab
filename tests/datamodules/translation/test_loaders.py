import pickle
from collections.abc import Callable, Iterable
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
    SentenceEvaluationLoader,
    SentenceTrainLoader,
    batches_within_memory,
    shuffle_units,
)
from datamodules.translation.packed_sentences import PackedPairs, PackedSentences, TranslationBatch, pack

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


def _updates(world_size: int, micro_batches: int, epochs: int = 2, **options) -> list[list[int]]:
    """The sentences of each update, sorted, in real order of updates."""
    loaders = [
        _loader(rank=rank, world_size=world_size, micro_batches=lambda: micro_batches, **options)
        for rank in range(world_size)
    ]
    found = []
    for _ in range(epochs):
        steps = [sum(parts, []) for parts in zip(*(_numbers(loader) for loader in loaders), strict=True)]
        assert {len(loader) for loader in loaders} == {len(steps)}
        assert sorted(sum(steps, [])) == ROWS.tolist()
        found += [sorted(sum(steps[i : i + micro_batches], [])) for i in range(0, len(steps), micro_batches)]
    return found


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


def test_a_batch_holds_the_sentences_of_its_rows_and_zeros() -> None:
    rows = torch.tensor([7, 0, 2 * N - 1, 7])
    batch = PAIRS.batch(rows)
    for side, ids, lengths in (
        (PAIRS.source, batch.source, batch.source_lengths),
        (PAIRS.target, batch.target, batch.target_lengths),
    ):
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
def test_units_are_neighbours_and_the_short_one_comes_last(n: int, unit: int, epoch: int) -> None:
    numbers = shuffle_units(n, unit, 1, epoch).tolist()
    assert sorted(numbers) == list(range(n))
    units = [numbers[i : i + unit] for i in range(0, n, unit)]
    short = units.pop() if n % unit else []
    gap = short[0] if short else n
    assert short == list(range(gap, gap + n % unit))
    # But for the gap that the short one leaves.
    assert all(u == [i for i in range(n) if i not in short][units_start(u, short) :][:unit] for u in units)


def units_start(unit: list[int], short: list[int]) -> int:
    return unit[0] - sum(i < unit[0] for i in short)


@given(
    split=st.sampled_from([(24, 1, 1), (12, 2, 1), (12, 1, 2), (6, 2, 2), (3, 4, 2), (1, 3, 8), (8, 3, 1), (2, 1, 12)])
)
def test_any_split_of_a_global_batch_sees_the_same_sentences_per_update(split: tuple[int, int, int]) -> None:
    batch_size, world_size, micro_batches = split
    for bucket in (True, False, 1, 2, 100):
        whole = _updates(1, 1, batch_size=24, bucket=bucket)
        assert _updates(world_size, micro_batches, batch_size=batch_size, bucket=bucket) == whole
        assert whole[: len(whole) // 2] != whole[len(whole) // 2 :]


@given(split=st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]), max_tokens=st.integers(30, 200))
def test_batches_by_tokens_see_the_same_sentences_per_update_on_any_split(
    split: tuple[int, int], max_tokens: int
) -> None:
    assert _updates(*split, max_tokens=max_tokens) == _updates(1, 6, max_tokens=max_tokens)


@given(max_tokens=st.integers(23, 300), world_size=st.integers(1, 4))
def test_a_batch_by_tokens_never_exceeds_them_and_could_not_take_another_sentence(
    max_tokens: int, world_size: int
) -> None:
    loaders = [_loader(max_tokens=max_tokens, rank=rank, world_size=world_size) for rank in range(world_size)]
    lengths = []
    for _ in range(3):
        batches = [batch for loader in loaders for batch in loader]
        assert all(batch.source.numel() + batch.target.numel() <= max_tokens for batch in batches if len(batch.source))
        lengths.append(len(batches))
        assert sorted(sum(_numbers(batches), [])) == ROWS.tolist()
    assert len(set(lengths)) == 1
    mean = 15
    assert lengths[0] <= 2 * N * mean / max_tokens + world_size + 12


def test_similar_lengths_are_together_and_the_epochs_differ() -> None:
    loader = _loader(batch_size=6, bucket=True)
    epochs = [_numbers(loader) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    for batches in epochs:
        spread = [int(PAIRS.source.lengths[batch].max() - PAIRS.source.lengths[batch].min()) for batch in batches]
        assert sum(spread) / len(spread) < 2.5
    assert _numbers(_loader(batch_size=6, bucket=True)) == epochs[0] != _numbers(_loader(batch_size=6, seed=2))


@given(unit=st.sampled_from([3, 5, 12]), pool=st.integers(1, 20), epoch=st.integers(0, 2))
def test_a_pool_is_a_part_of_the_shuffled_epoch_and_its_updates_are_neighbours_by_length(
    unit: int, pool: int, epoch: int
) -> None:
    loader = _loader(unit, bucket=pool)
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


OPTIONS = st.sampled_from(
    [
        {"batch_size": 4, "world_size": 1},
        {"batch_size": 3, "world_size": 2, "micro_batches": lambda: 2},
        {"batch_size": 4, "world_size": 1, "bucket": True},
        {"batch_size": 2, "world_size": 2, "bucket": 3},
        {"max_tokens": 90, "world_size": 1, "micro_batches": lambda: 3},
        {"max_tokens": 90, "world_size": 2},
        {"batch_size": 5, "world_size": 1, "bucket": False},
    ]
)


@given(stop=st.integers(1, 30), options=OPTIONS)
def test_a_fresh_loader_goes_on_where_the_state_was_saved(stop: int, options: dict) -> None:
    old = _loader(**options)
    stop = min(stop, 2 * len(old) - 1)
    whole = sum((_numbers(_loader_at(epoch, options)) for epoch in range(3)), [])
    seen: list[list[int]] = []
    while len(seen) < stop:
        for batch in old:
            seen += _numbers([batch])
            if len(seen) == stop:
                state = old.state_dict()
                break
    new = _loader(**options)
    new.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert seen + sum((_numbers(new) for _ in range(3 - stop // len(new))), []) == whole


def _loader_at(epoch: int, options: dict) -> SentenceTrainLoader:
    loader = _loader(**options)
    loader.set_epoch(epoch)
    return loader


@given(world_size=st.integers(1, 5), options=st.sampled_from([{"batch_size": 4}, {"max_tokens": 70}]))
def test_a_resume_on_other_ranks_trains_on_the_rest_exactly_once(world_size: int, options: dict) -> None:
    loaders = [_loader(world_size=2, rank=rank, **options) for rank in (0, 1)]
    iterators = [iter(loader) for loader in loaders]
    seen = sum((sum(_numbers([next(iterator)]), []) for iterator in iterators for _ in range(2)), [])
    state = loaders[0].state_dict()
    rest: list[int] = []
    for rank in range(world_size):
        # Micro-batches may change; the epoch's units do not.
        new = _loader(rank=rank, world_size=world_size, micro_batches=lambda: 7, **options)
        new.load_state_dict(state)
        new.set_epoch(0)
        rest += sum(_numbers(new), [])
    assert sorted(seen + rest) == ROWS.tolist()


@given(options=OPTIONS, rank=st.integers(0, 1))
def test_sentences_have_the_same_position_in_the_epoch_on_any_split(options: dict, rank: int) -> None:
    micro_batches = options.get("micro_batches", lambda: 1)() * options["world_size"]
    alone = _loader(**options | {"world_size": 1, "micro_batches": lambda: micro_batches})
    split = _loader(**options | {"rank": rank % options["world_size"]})
    for _ in range(2):
        order = sum(_numbers(alone), [])
        for number, sentences in enumerate(_numbers(split)):
            assert [order[position] for position in split.batch_positions(number)] == sentences


def test_the_epoch_and_the_micro_batches_may_be_set_after_the_iterator_is_created() -> None:
    factor = [1]
    loader = _loader(micro_batches=lambda: factor[0])
    iterator = iter(loader)
    loader.set_epoch(2)
    factor[0] = 3
    assert _numbers(iterator) == _numbers(_loader_at(2, {"micro_batches": lambda: 3})) != _numbers(_loader_at(2, {}))


def test_the_state_at_an_epochs_last_batch_is_the_next_epochs_start() -> None:
    loader = _loader()
    for _ in loader:
        state = loader.state_dict()
    assert state.items() > {"epoch": 1, "consumed": 0, "items": N, "unit": 0}.items()
    loader.load_state_dict({"epoch": 1, "consumed": 8, "items": N, "unit": 4})
    loader.set_epoch(2)
    assert loader.state_dict()["consumed"] == 0
    assert _numbers(loader) == _numbers(_loader_at(2, {}))


def test_a_position_in_other_data_is_refused() -> None:
    state = _loader().state_dict()
    _loader(seed=2, world_size=2).load_state_dict(state)
    for rows, found in (
        (ROWS[:-1], f"found {N - 1}; resume"),
        (ROWS.flip(0), f"found {N}, others or in another order"),
    ):
        with pytest.raises(UserError, match=f"of a run on {N} samples, {found}"):
            SentenceTrainLoader(PAIRS, rows, 4, 1).load_state_dict(state)
    with pytest.raises(UserError, match=r"epoch of 99 .*, found 53 sentences; resume with the same data"):
        _loader().load_state_dict({"epoch": 0, "consumed": 8, "items": 99, "unit": 4})


def _with(**options) -> Callable[[], SentenceTrainLoader]:
    return lambda: _loader(**options)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SentenceTrainLoader(PAIRS, ROWS[:0], 4, 1), "the training set is empty"),
        (_with(max_tokens=10), "max_tokens=10 is less than the longest pair of sentences has, 2. tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_what_to_type(make: Callable, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make()


def test_the_batch_size_by_tokens_does_not_depend_on_the_split() -> None:
    # Callbacks convert a position between numbers of devices with it.
    sizes = {
        _loader(max_tokens=100, world_size=w, micro_batches=lambda a=a: a).batch_size for w in (1, 2) for a in (1, 4)
    }
    mean = float((PAIRS.source.lengths + PAIRS.target.lengths)[ROWS].double().mean())
    assert sizes == {int(100 / mean)}


@settings(max_examples=60)
@given(n=st.integers(0, N), batch_size=st.integers(1, 9), world_size=st.integers(1, 6), bucket=st.booleans())
def test_evaluation_gives_every_row_once_in_the_same_batches_on_any_number_of_ranks(
    n: int, batch_size: int, world_size: int, bucket: bool
) -> None:
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
def test_long_sentences_are_evaluated_apart_and_batches_of_others_stay_as_they_are(
    lengths: list[int], batch_size: int
) -> None:
    batches = [batch.tolist() for batch in batches_within_memory(torch.tensor(lengths), batch_size)]
    neighbours = [batch.tolist() for batch in torch.arange(len(lengths)).split(batch_size)]
    neighbours = neighbours if lengths else []
    assert sorted(sum(batches, [])) == list(range(len(lengths)))
    if max(lengths, default=0) <= 128:
        assert batches == neighbours
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) <= 1 or len(batch) * longest**2 <= batch_size * 128**2
    assert all(any(set(batch) <= set(of) for of in neighbours) for batch in batches)


def test_the_first_batches_of_an_evaluation_are_not_the_shortest_sentences() -> None:
    loader = SentenceEvaluationLoader(PAIRS, ROWS, 4)
    lengths: list[Tensor] = [batch.source_lengths.double().mean() for batch in loader]
    middle = float(torch.stack(lengths).mean())
    assert abs(float(torch.stack(lengths[:6]).mean()) - middle) < 2
