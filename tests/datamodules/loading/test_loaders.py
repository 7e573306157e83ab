import logging
import pickle
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader, fingerprint
from datamodules.loading.sampling import epoch_order

N = 23
INPUTS = torch.arange(100.0).unsqueeze(1)
TARGETS = torch.arange(100)
ROWS = torch.arange(0, 2 * N, 2)


def _loader(batch_size: int = 4, **options) -> TrainLoader:
    return TrainLoader(INPUTS, TARGETS, ROWS, batch_size, seed=1, **options)


def _targets(loader) -> list[list[int]]:
    return [targets.tolist() for _, targets in loader]


def test_without_shuffling_each_epoch_keeps_the_rows_order():
    loader = _loader(shuffle=False)
    assert [sum(_targets(loader), []) for _ in range(2)] == [ROWS.tolist()] * 2


def _numbered(loader) -> dict[int, Any]:
    """The targets of the loader's next epoch, or of the rest of the present one, by number; stand-ins are left out."""
    updates = [update for update in loader if not update.is_dummy]
    return {number: targets.tolist() for update in updates for number, (_, targets) in update}


def _on_ranks(make, world_size: int, update_size: int, state: dict | None = None) -> list:
    """Loaders of all ranks, from a state on; `make` gets rank and world size."""
    loaders = [make(rank=rank, world_size=world_size) for rank in range(world_size)]
    for loader in loaders:
        loader.divide_updates(update_size)
        if state is not None:
            loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loaders


def _merged(parts: list[dict[int, Any]]) -> dict[int, Any]:
    merged = {number: batch for part in parts for number, batch in part.items()}
    assert len(merged) == sum(map(len, parts))
    return dict(sorted(merged.items()))


cuts = st.tuples(st.integers(1, 7), st.integers(1, 30), st.integers(1, 5), st.integers(1, 5)).filter(
    lambda cut: -(-cut[1] // cut[0]) >= max(cut[2:])
)
"""Samples of a micro-batch and of an update, which need not be a multiple, and two numbers of ranks to share it."""


loaders_of_an_order = st.sampled_from([_loader, partial(_loader, weights=torch.arange(N) % 3)])
"""Loaders of shuffled samples, and of draws with replacement."""


@given(cut=cuts, loader=loaders_of_an_order)
def test_numbered_micro_batches_equal_one_devices(cut, loader):
    batch_size, update_size, *worlds = cut
    make = partial(loader, batch_size)
    for world_size in worlds:
        loaders, (alone,) = (_on_ranks(make, ranks, update_size) for ranks in (world_size, 1))
        for epoch in range(2):
            order = alone.order_of_epoch(epoch).tolist()
            if alone.repeats:
                order = [number % len(TARGETS) for number in order]
                assert all(ROWS.tolist().index(row) % 3 for row in order), "a weight of 0"
            else:
                assert order == ROWS[epoch_order(N, 1, epoch)].tolist()
            expected = _numbered(alone)
            assert _merged([_numbered(loader) for loader in loaders]) == expected
            updates = [order[i : min(i + update_size, N)] for i in range(0, N, update_size)]
            batches = [update[i : i + batch_size] for update in updates for i in range(0, len(update), batch_size)]
            assert [*expected.values()] == batches
        assert len({len(loader) for loader in loaders}) == 1


@given(cut=cuts, loader=loaders_of_an_order, epoch=st.integers(0, 2), data=st.data())
def test_a_resume_after_any_update_on_other_ranks_makes_the_rest(cut, loader, epoch, data):
    batch_size, update_size, before, after = cut
    make = partial(loader, batch_size)
    (alone,) = _on_ranks(make, 1, update_size)
    for _ in range(epoch):
        list(alone)
    expected = {of: _numbered(alone) for of in (epoch, epoch + 1)}
    old = _on_ranks(make, before, update_size)[-1]
    old.set_epoch(epoch)
    steps = data.draw(st.integers(1, len(old)))
    updates = iter(old)
    for _ in range(steps):
        next(updates)
    state = old.state_dict()
    done = steps if steps < len(old) else 0
    assert state.items() > {"epoch": epoch + (steps == len(old)), "consumed": done * update_size}.items()
    new = _on_ranks(make, after, update_size, state)
    first = done * alone.division.micro_batches
    rest = {number: batch for number, batch in expected[state["epoch"]].items() if number >= first}
    assert _merged([_numbered(loader) for loader in new]) == rest
    if state["epoch"] == epoch:
        assert _merged([_numbered(loader) for loader in new]) == expected[epoch + 1]


def test_an_update_of_more_than_an_epoch_is_noted_once(caplog):
    loader = _loader()
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        loader.divide_updates(24)  # The last of the 6 micro-batches is short.
        assert not caplog.records
        loader.divide_updates(400)
        loader.divide_updates(400)
    (record,) = caplog.records
    assert record.getMessage() == "note: an update has 100 micro-batches, and an epoch has 6: each epoch is one update"
    assert len(loader) == 1


def test_a_position_within_an_epoch_needs_equal_updates():
    loader = _loader(world_size=2)
    loader.divide_updates(10)
    reason = "within an epoch, after 16 of 23, and updates now have 10: resume with the run"
    with pytest.raises(UserError, match=reason):
        loader.load_state_dict(_loader().state_dict() | {"consumed": 16})
    loader.load_state_dict(_loader().state_dict() | {"epoch": 3})
    reason = "has 1 micro-batches of 4, found 2 devices: pass fewer .* `batch_size` of 2 or"
    with pytest.raises(UserError, match=reason):
        loader.divide_updates(4)


def test_a_rank_without_a_micro_batch_repeats_the_first():
    loaders = [TrainLoader(INPUTS, TARGETS, torch.arange(5), 2, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
    *_, first = _targets(loaders[0])
    *_, stand_in = _targets(loaders[1])
    assert stand_in == first
    loaders[1].divide_updates(4)
    assert [update.is_dummy for update in loaders[1]] == [False, True]
    loaders[1].divide_updates(None)
    assert [len(targets) for targets in _targets(loaders[1])] == [2, 1]


def test_only_the_resumed_epoch_starts_in_its_middle():
    loader = _loader()
    loader.load_state_dict({"epoch": 0, "consumed": 8})
    loader.set_epoch(0)
    assert [len(_targets(loader)) for _ in range(2)] == [4, 6]
    loader.load_state_dict({"epoch": 0, "consumed": 8})
    loader.set_epoch(1)
    assert sum(_targets(loader), []) == ROWS[epoch_order(N, 1, 1)].tolist()


def test_a_transform_gets_whole_batches_with_their_rows():
    calls = []

    def transform(inputs: Tensor, rows: Tensor, epoch: int) -> Tensor:
        calls.append((rows.tolist(), epoch))
        return inputs + 0.5

    loader = _loader(transform=transform)
    batches = [(inputs[:, 0] - 0.5, targets) for _ in range(2) for inputs, targets in loader]
    assert [rows for rows, _ in calls] == [targets.tolist() for _, targets in batches]
    assert all(torch.equal(inputs, targets.float()) for inputs, targets in batches)
    assert [epoch for _, epoch in calls] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    ("rows", "batch_size", "reason"),
    [(0, 1, "the training set is empty"), (23, 0, "batch_size=0: expected a whole number, 1 or more")],
)
def test_an_empty_set_or_batch_is_rejected(rows, batch_size, reason):
    with pytest.raises(UserError, match=reason):
        TrainLoader(INPUTS, TARGETS, torch.arange(rows), batch_size, seed=1)


@given(n=st.integers(0, 30), batch_size=st.integers(1, 9), world_size=st.integers(1, 6))
def test_evaluation_gives_every_row_once_on_any_rank_count(n, batch_size, world_size):
    def batches(rank: int, world_size: int) -> list[list[int]]:
        loader = EvaluationLoader(INPUTS, TARGETS, ROWS[:n], batch_size, rank=rank, world_size=world_size)
        found = _targets(loader)
        assert len(loader) == len(found) >= 1
        return [batch for batch in found if batch]

    alone = batches(0, 1)
    assert sum(alone, []) == ROWS[:n].tolist()
    dealt = [batches(rank, world_size) for rank in range(world_size)]
    assert [batch for batches in zip_longest(*dealt) for batch in batches if batch] == alone


def test_a_position_in_other_data_is_rejected():
    pixels, rows = torch.arange(24, dtype=torch.uint8).view(6, 2, 2), torch.arange(6)
    labels = rows % 3

    def loader(inputs=pixels, targets=labels, rows=rows, batch_size=2, **options):
        return TrainLoader(inputs, targets, rows, batch_size, seed=1, **options)

    state = loader().state_dict()
    loader(batch_size=3, world_size=2, rank=1).load_state_dict(state)
    loader().load_state_dict({"epoch": 1, "consumed": 0})  # Saved before data were told apart.
    changed, relabeled = pixels.clone(), labels.clone()
    changed[5, 1, 1], relabeled[0] = 0, 2
    for other in ({"inputs": changed}, {"targets": relabeled}, {"rows": rows.flip(0)}):
        with pytest.raises(UserError, match="of a run on 6 samples, found 6, others or in another order; resume"):
            loader(**other).load_state_dict(state)
    with pytest.raises(UserError, match="of a run on 6 samples, found 5; resume with the same data"):
        loader(rows=torch.arange(5)).load_state_dict(state)


def test_data_rounded_by_another_machine_are_the_same():
    state = TrainLoader(torch.rand(6), torch.rand(6), torch.arange(6), 2, seed=1).state_dict()
    TrainLoader(torch.rand(6), torch.rand(6), torch.arange(6), 2, seed=1).load_state_dict(state)


def test_of_large_tensors_some_rows_count(monkeypatch):
    monkeypatch.setattr("datamodules.loading.loaders._MAX_FINGERPRINT_BYTES", 16)
    numbers = torch.arange(6).view(3, 2)
    first, second = numbers.clone(), numbers.clone()
    first[0, 0], second[1, 0] = 9, 9
    found = [fingerprint([each]) for each in (numbers, first, second)]
    assert found[0] != found[1]
    assert found[0] == found[2]
