import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading import fingerprint as fingerprint_module
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from datamodules.loading.sampling import epoch_order

N = 23
INPUTS = torch.arange(100.0).unsqueeze(1)
TARGETS = torch.arange(100)
ROWS = torch.arange(0, 2 * N, 2)


def _loader(batch_size: int = 4, **options) -> TrainLoader:
    return TrainLoader(INPUTS, TARGETS, ROWS, batch_size, seed=1, **options)


def _targets(loader) -> list[list[int]]:
    return [targets.tolist() for _, targets in loader]


def _epochs(number: int, **options) -> list[list[list[int]]]:
    loader = _loader(**options)
    return [_targets(loader) for _ in range(number)]


def test_inputs_belong_to_their_targets():
    for inputs, targets in _loader():
        assert torch.equal(inputs[:, 0], targets.float())


def test_without_shuffling_each_epoch_keeps_the_rows_order():
    assert [sum(batches, []) for batches in _epochs(2, shuffle=False)] == [ROWS.tolist()] * 2


@given(world_size=st.integers(1, 9), batch_size=st.integers(1, 12))
def test_a_step_of_all_ranks_is_one_slice_of_the_order(world_size, batch_size):
    loaders = [_loader(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch in range(2):
        order = ROWS[epoch_order(N, 1, epoch)].tolist()
        size = world_size * batch_size
        steps = [sum(parts, []) for parts in zip(*map(_targets, loaders), strict=True)]
        assert steps == [order[start : min(start + size, N)] for start in range(0, N, size)]
        assert {len(loader) for loader in loaders} == {len(steps)}


RARE = (TARGETS % 10 == 0).long()  # 5 of the 23 rows.
WEIGHTS = 1 / torch.tensor([18.0, 5.0])[RARE]


def _with_numbers(inputs: Tensor, numbers: Tensor, _epoch: int) -> Tensor:
    return torch.stack((inputs[:, 0].long(), numbers), 1)


def _weighted(batch_size: int = 4, **options) -> TrainLoader:
    return TrainLoader(INPUTS, RARE, ROWS, batch_size, seed=1, transform=_with_numbers, weights=WEIGHTS, **options)


def _numbers(loader) -> list[list[tuple[int, int]]]:
    return [[tuple(pair) for pair in inputs.tolist()] for inputs, _ in loader]


def test_weights_draw_a_rare_class_as_often_and_repeats_have_other_numbers():
    loader = _weighted()
    for epoch in range(3):
        batches = list(loader)
        assert len(batches) == len(loader)
        targets = torch.cat([targets for _, targets in batches])
        pairs = sum(_numbers(batches), [])
        assert sorted(targets.bincount().tolist()) == [11, 12], epoch
        assert len(set(pairs)) == len(pairs) > len({sample for sample, _ in pairs})
        assert all(number % len(INPUTS) == sample and sample in ROWS for sample, number in pairs)
        assert [number for _, number in pairs] == loader.order_of_epoch(epoch).tolist()
        assert torch.equal(RARE[[sample for sample, _ in pairs]], targets)


@given(world_size=st.integers(1, 5), batch_size=st.integers(1, 7), consumed=st.integers(0, N - 1))
def test_weighted_samples_are_the_same_on_any_number_of_ranks_and_after_a_resume(world_size, batch_size, consumed):
    order = _weighted().order_of_epoch(1).tolist()
    loaders = [_weighted(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for loader in loaders:
        loader.load_state_dict({"epoch": 1, "consumed": consumed})
    steps = zip(*map(_numbers, loaders), strict=True)
    assert [number for step in steps for part in step for _, number in part] == order[consumed:]


def test_overfitting_repeats_the_first_weighted_epoch():
    loader = _weighted(shuffle=False)
    first, second = _numbers(loader), _numbers(loader)
    assert first == second == _numbers(_weighted())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(23), r"weights of shape \(23,\), expected one for each sample, \(100,\)"),
        (torch.zeros(100), "all weights of the training set are 0"),
        (torch.ones(100).index_fill(0, torch.tensor(4), -2.0), "weight -2 of sample 4: expected finite numbers"),
        (torch.ones(100).index_fill(0, torch.tensor(6), torch.nan), "weight nan of sample 6"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights: Tensor, message: str):
    with pytest.raises(UserError, match=message):
        _loader(weights=weights)


def test_a_rank_without_samples_gets_an_empty_batch_of_the_right_shape():
    loader = TrainLoader(INPUTS, TARGETS, torch.arange(5), 2, seed=1, rank=1, world_size=2)
    *_, (inputs, targets) = loader
    assert inputs.shape == (0, 1)
    assert targets.shape == (0,)
    assert targets.dtype == torch.int64


@given(stop=st.integers(1, 11), world_size=st.sampled_from([1, 2, 3]))
def test_a_new_loader_continues_where_the_state_was_saved(stop, world_size):
    steps_per_epoch = -(-N // (4 * world_size))
    stop = min(stop, 2 * steps_per_epoch - 1)
    whole = sum(_epochs(3, world_size=world_size), [])
    old, seen = _loader(world_size=world_size), []
    while len(seen) < stop:
        for _, targets in old:
            seen.append(targets.tolist())
            if len(seen) == stop:
                state = old.state_dict()
                break
    new = _loader(world_size=world_size)
    new.load_state_dict(pickle.loads(pickle.dumps(state)))
    epochs = 3 - stop // steps_per_epoch
    assert seen + sum((_targets(new) for _ in range(epochs)), []) == whole


def test_a_resume_on_other_ranks_trains_on_the_rest_exactly_once():
    old = iter(loader := _loader(world_size=2))
    seen = set(sum((next(old)[1].tolist() for _ in range(2)), []))
    state = loader.state_dict()
    assert state.items() > {"epoch": 0, "consumed": 16}.items()
    order = ROWS[epoch_order(N, 1, 0)].tolist()
    for world_size in (1, 3, 5):
        rest: list[int] = []
        for rank in range(world_size):
            new = _loader(rank=rank, world_size=world_size)
            new.load_state_dict(state)
            rest += sum(_targets(new), [])
        assert sorted(rest) == sorted(order[16:])
    assert seen < set(order[:16])


@given(world_size=st.integers(1, 4), batch_size=st.integers(1, 7), consumed=st.integers(0, N - 1), ahead=st.booleans())
def test_batches_tell_the_positions_of_their_samples_also_in_a_resumed_epoch(world_size, batch_size, consumed, ahead):
    for rank in range(world_size):
        loader = _loader(batch_size, rank=rank, world_size=world_size)
        loader.load_state_dict({"epoch": 0, "consumed": consumed})
        for epoch, first in enumerate((consumed // (batch_size * world_size), 0)):
            order = ROWS[epoch_order(N, 1, epoch)].tolist()
            # A fetcher may be as far ahead as it likes within an epoch.
            batches = enumerate(list(_targets(loader)) if ahead else (targets.tolist() for _, targets in loader), first)
            for number, targets in batches:
                assert [order[position] for position in loader.batch_positions(number)] == targets


def test_only_the_resumed_epoch_starts_in_its_middle():
    loader = _loader()
    loader.load_state_dict({"epoch": 0, "consumed": 8})
    loader.set_epoch(0)
    assert [len(_targets(loader)) for _ in range(2)] == [4, 6]
    loader.load_state_dict({"epoch": 0, "consumed": 8})
    loader.set_epoch(1)
    assert _targets(loader) == _epochs(2)[1]


def test_the_transform_gets_whole_batches_their_rows_and_the_epoch():
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
    [(0, 1, "the training set is empty"), (23, 0, "a batch holds one sample at least, found 0")],
)
def test_an_empty_set_or_batch_is_refused(rows, batch_size, reason):
    with pytest.raises(UserError, match=reason):
        TrainLoader(INPUTS, TARGETS, torch.arange(rows), batch_size, seed=1)


@given(n=st.integers(0, 30), batch_size=st.integers(1, 9), world_size=st.integers(1, 6))
def test_evaluation_gives_every_row_once_in_order_on_any_number_of_ranks(n, batch_size, world_size):
    def batches(rank: int, world_size: int) -> list[list[int]]:
        loader = EvaluationLoader(INPUTS, TARGETS, ROWS[:n], batch_size, rank=rank, world_size=world_size)
        found = _targets(loader)
        assert len(loader) == len(found) >= 1
        return [batch for batch in found if batch]

    alone = batches(0, 1)
    assert sum(alone, []) == ROWS[:n].tolist()
    dealt = [batches(rank, world_size) for rank in range(world_size)]
    assert [dealt[i % world_size][i // world_size] for i in range(len(alone))] == alone
    assert sum(map(len, dealt)) == len(alone)


def test_a_position_in_other_data_is_refused():
    pixels, rows = torch.arange(24, dtype=torch.uint8).view(6, 2, 2), torch.arange(6)
    labels = rows % 3

    def loader(inputs=pixels, targets=labels, rows=rows, batch_size=2, **options):
        return TrainLoader(inputs, targets, rows, batch_size, seed=1, **options)

    state = loader().state_dict()
    loader(batch_size=3, world_size=2, rank=1).load_state_dict(state)
    loader().load_state_dict({"epoch": 1, "consumed": 0})  # Saved before data were told apart.
    changed, relabelled = pixels.clone(), labels.clone()
    changed[5, 1, 1], relabelled[0] = 0, 2
    for other in ({"inputs": changed}, {"targets": relabelled}, {"rows": rows.flip(0)}):
        with pytest.raises(UserError, match="of a run on 6 samples, found 6, others or in another order; resume"):
            loader(**other).load_state_dict(state)
    with pytest.raises(UserError, match="of a run on 6 samples, found 5; resume with the same data"):
        loader(rows=torch.arange(5)).load_state_dict(state)


def test_data_that_another_machine_computes_with_other_rounding_are_the_same():
    state = TrainLoader(torch.rand(6), torch.rand(6), torch.arange(6), 2, seed=1).state_dict()
    TrainLoader(torch.rand(6), torch.rand(6), torch.arange(6), 2, seed=1).load_state_dict(state)


def test_of_large_tensors_some_rows_count(monkeypatch):
    monkeypatch.setattr(fingerprint_module, "_MOST", 16)
    numbers = torch.arange(6).view(3, 2)
    first, second = numbers.clone(), numbers.clone()
    first[0, 0], second[1, 0] = 9, 9
    found = [fingerprint_module.fingerprint([each]) for each in (numbers, first, second)]
    assert found[0] != found[1]
    assert found[0] == found[2]
