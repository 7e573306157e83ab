import logging
import os
import pickle
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from datamodules.errors import RunFailedError, UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from datamodules.loading.sampling import epoch_order
from datamodules.loading.worker_loaders import BatchRequest, LoadedBatch, WorkerEvaluationLoader, WorkerTrainLoader
from tests.support.agents import wait_until
from tests.support.nodes import Program

N = 23
ROWS = torch.arange(N)
TARGETS = torch.arange(N)


class Numbers:
    """A reader whose inputs tell the sample, the epoch and the process; some samples cannot be read."""

    def __init__(self, unreadable: tuple[int, ...] = (), delay: float = 0.0) -> None:
        self.targets, self.unreadable, self.delay = TARGETS, unreadable, delay

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        time.sleep(self.delay)
        rows = [row for row in request.rows if row not in self.unreadable]
        inputs = torch.tensor([[row, request.epoch, os.getpid()] for row in rows]).reshape(-1, 3)
        bad = [
            (row, UserError("cannot be read", subject=f"{row}.jpg")) for row in request.rows if row in self.unreadable
        ]
        return LoadedBatch(inputs, TARGETS[rows], torch.tensor(rows, dtype=torch.int64), bad)


def _loader(batch_size: int = 4, reader: Numbers | None = None, **options) -> WorkerTrainLoader:
    return WorkerTrainLoader(reader or Numbers(), ROWS, batch_size, seed=1, **options)


def _plain(batch_size: int = 4, **options) -> TrainLoader:
    return TrainLoader(ROWS, TARGETS, ROWS, batch_size, seed=1, **options)


def _targets(loader) -> list[list[int]]:
    return [targets.tolist() for _, targets in loader]


def _workers(loader: WorkerTrainLoader) -> set[int]:
    return {int(number) for inputs, _ in loader for number in inputs[:, 2]}


def _wait_for_the_end_of(pids: Iterable[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the workers")


def _position(loader: WorkerTrainLoader | TrainLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["consumed"]


@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 1), (1, 3), (2, 1), (2, 2)])
def test_workers_give_the_batches_of_the_loader_over_tensors(num_workers, world_size):
    rank = world_size - 1
    loaders = [
        _loader(rank=rank, world_size=world_size, num_workers=num_workers),
        _plain(rank=rank, world_size=world_size),
    ]
    for each in loaders:
        each.divide_updates(10)  # 3 micro-batches, of which the last has 2 samples.
    loader, plain = loaders
    assert len(loader) == len(plain)
    states: list[dict[str, Any]] = []
    for epoch in range(3):
        for update, expected in zip(loader, plain, strict=True):
            assert [number for number, _ in update] == [number for number, _ in expected]
            for (inputs, targets), (_, expected_targets) in zip(update.batches, expected.batches, strict=True):
                assert torch.equal(targets, expected_targets)
                assert torch.equal(inputs[:, 0], targets)
                assert (inputs[:, 1] == epoch).all()
                assert (inputs[:, 2] == os.getpid()).all() == (num_workers == 0)
            # However far ahead the workers are.
            assert _position(loader) == _position(plain)
            if not states and _position(plain) == (0, 10):
                states = [each.state_dict() for each in loaders]
    for each, state in zip(loaders, states, strict=True):
        each.load_state_dict(pickle.loads(pickle.dumps(state)))
        each.set_epoch(0)
    rest, expected_rest = ([targets.tolist() for update in each for _, targets in update.batches] for each in loaders)
    assert rest == expected_rest
    loader.close()


def test_an_epoch_cut_short_leaves_nothing_of_it_in_the_next():
    loader, most = _loader(num_workers=2), 0
    for epoch in range(9):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        assert [next(iterator)[1].tolist() for _ in range(2)] == epoch_order(N, 1, epoch)[:8].view(2, 4).tolist()
        # Nor of its batches that were loaded ahead, each of three tensors in shared memory.
        opened = [len([*Path(f"/proc/{worker.pid}/fd").iterdir()]) for worker in loader._loader._iterator._workers]
        most = most if epoch > 1 else max(opened) + 20
        assert max(opened) <= most, "files of a worker"
    loader.close()


def test_the_same_workers_serve_all_epochs():
    loader = _loader(num_workers=2)
    first = _workers(loader)
    assert len(first) == 2
    assert _workers(loader) == first
    # Also in the middle of an epoch, while somebody holds on to its iterator.
    iterator = iter(loader)
    next(iterator)
    loader.close()
    _wait_for_the_end_of(first)
    assert not _workers(loader) & first
    loader.close()


def test_there_are_no_more_workers_than_batches():
    loader = _loader(batch_size=23, num_workers=8)
    assert loader.num_workers == 1


def test_workers_leave_signals_to_the_training_process():
    loader = _loader(num_workers=1, reader=Numbers(delay=0.05))
    iterator = iter(loader)
    pid = int(next(iterator)[0][0, 2])
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    assert len(list(iterator)) == 5
    assert _workers(loader) == {pid}
    loader.close()


_ENDLESS = """
import sys, time
from multiprocessing import connection
from tests.datamodules.loading.test_worker_loaders import Numbers, _loader

connect, left = connection.Client, int(sys.argv[1])


def interrupted(*args, **options):
    global left
    client, left = connect(*args, **options), left - 1
    if left == 0:
        client.close()
        time.sleep(0.5)
        raise KeyboardInterrupt
    return client


connection.Client = interrupted
loader = _loader(num_workers=2, reader=Numbers(delay=0.02))
while True:
    for inputs, _ in loader:
        print(int(inputs[0, 2]), flush=True)
"""


@pytest.mark.parametrize("tensors", [0, 20])
def test_ctrl_c_ends_without_a_complaint_of_a_worker(tensors, tmp_path):
    """At any time, or while a tensor is fetched from a worker, whose thread waits to be told which."""
    (tmp_path / "endless.py").write_text(_ENDLESS)
    program = Program(tmp_path, "endless", ["endless.py", str(tensors)])
    wait_until(lambda: program.read("out").count("\n") >= 4, "four batches")
    if not tensors:
        # To the whole group, as a terminal does.
        os.killpg(program.process.pid, signal.SIGINT)
    _, out, err = program.wait()
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    _wait_for_the_end_of(set(map(int, out.split())))


def test_a_worker_that_dies_is_named_where_its_batch_is_awaited(monkeypatch):
    # torch looks every 5 seconds whether its workers live.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    loader = _loader(num_workers=2)
    batches = iter(loader)
    next(batches)
    victim = loader._loader._iterator._workers[1].pid
    os.kill(victim, signal.SIGKILL)
    for _ in range(20):  # Not here: the process may be in the midst of a collective call.
        time.sleep(0.01)
    with pytest.raises(RunFailedError, match=rf"^worker 1 \(process {victim}\) was ended by SIGKILL; .*num_workers"):
        list(batches)


class _Exits(Numbers):
    """Ends its process with a status."""

    status = 0

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        os._exit(self.status)


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_a_worker_that_ends_is_named(status, monkeypatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    monkeypatch.setattr(_Exits, "status", status)
    with pytest.raises(RunFailedError, match=rf"^worker 0 \(process \d+\) ended with status {status}; "):
        list(_loader(reader=_Exits(), num_workers=1))


class _Unsendable(Tensor):
    """A tensor that cannot be put into shared memory."""

    def __reduce_ex__(self, protocol):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


class _NoRoom(Numbers):
    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        batch = super().__getitem__(request)
        return batch._replace(inputs=batch.inputs.as_subclass(_Unsendable)) if request.rows[0] == self.at else batch


def test_a_batch_too_large_for_shared_memory_is_an_error():
    reader = _NoRoom()
    reader.at = epoch_order(N, 1, 0)[4 * 2].item()
    with pytest.raises(UserError, match=r"no room for the batches of 2 workers; pass num_workers=0, .*--shm-size"):
        _targets(_loader(num_workers=2, reader=reader))


def test_batches_use_no_random_generator():
    for num_workers in (0, 1):
        state = torch.get_rng_state()
        loader = _loader(num_workers=num_workers)
        _targets(loader)
        _targets(loader)
        loader.close()
        assert torch.equal(torch.get_rng_state(), state)


def test_partners_follow_the_epochs_order_however_it_is_split():
    def partners(batch_size: int, world_size: int = 1, consumed: int = 0, num_workers: int = 0) -> dict[int, int]:
        found: dict[int, int] = {}

        def mix(inputs: Tensor, targets: Tensor, others: Tensor, their: Tensor, numbers: Tensor, epoch: int):
            assert torch.equal(inputs[:, 0], numbers)
            assert torch.equal(TARGETS[numbers], targets)
            assert torch.equal(TARGETS[others[:, 0]], their)
            found.update(zip(numbers.tolist(), others[:, 0].tolist()))
            return inputs, targets

        for rank in range(world_size):
            options = {"rank": rank, "world_size": world_size, "num_workers": num_workers}
            loader = _loader(batch_size, mix=mix, **options)
            loader.load_state_dict({"epoch": 0, "consumed": consumed})
            assert sum(len(inputs) for inputs, _ in loader) <= N
            loader.close()
        return found

    order = epoch_order(N, 1, 0)
    before = dict(zip(order.tolist(), order.roll(1).tolist(), strict=True))
    assert all(row != partner for row, partner in before.items())
    assert partners(4) == partners(7) == partners(1) == partners(3, world_size=4) == before
    assert partners(4, num_workers=2) == before
    assert partners(4, consumed=8).items() < before.items()
    with pytest.raises(UserError, match="mixtures need every image and its neighbor: pass mixup=0 and cutmix=0 with"):
        _loader(mix=lambda *given: given[:2], skip_unreadable=True)


# Samples that cannot be read


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_samples_leave_their_batches_smaller(num_workers, caplog):
    loader = _loader(reader=Numbers(unreadable=(7, 11)), num_workers=num_workers, skip_unreadable=True)
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        found = [_targets(loader) for _ in range(2)]
    assert found[0] == [[row for row in batch if row not in (7, 11)] for batch in _targets(_plain())]
    assert sum(map(len, found[1])) == N - 2
    assert len(loader.unreadable) == 2
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"warning: {row}.jpg cannot be read; it is left out" for row in (11, 7)
    ]
    loader.close()


# Evaluation


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_batches_are_those_of_the_loader_over_tensors(num_workers, world_size):
    for rank in range(world_size):
        loader = WorkerEvaluationLoader(Numbers(), ROWS, 6, rank, world_size, num_workers=num_workers)
        plain = EvaluationLoader(ROWS, TARGETS, ROWS, 6, rank, world_size)
        assert _targets(loader) == _targets(plain)
        assert [answer.rows.tolist() for answer in loader.loaded_batches()] == _targets(plain)
        assert len(loader) == len(plain)
        loader.close()


# Features

FEATURES = torch.arange(N * 2.0).view(N, 2)


def test_features_replace_reading_from_the_next_epoch_on():
    loader, plain = _loader(num_workers=1), _plain()
    pids = _workers(loader)
    _targets(plain)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    loader.use_features(FEATURES[shuffled], shuffled)
    for (features, targets), (_, expected) in zip(loader, plain, strict=True):
        assert torch.equal(targets, expected)
        assert torch.equal(features, FEATURES[targets])
        assert _position(loader) == _position(plain)
    _wait_for_the_end_of(pids)
    loader.use_features(None, None)
    inputs = torch.cat([inputs for inputs, _ in loader])
    assert inputs[:, 0].tolist() == epoch_order(N, 1, 2).tolist()
    loader.close()


def test_samples_without_features_are_left_out_of_their_batches():
    loader = _loader()
    known = torch.tensor([row for row in range(N) if row not in (7, 11)])
    loader.use_features(FEATURES[known], known)
    batches = list(loader)
    expected = [[row for row in batch if row not in (7, 11)] for batch in _targets(_plain())]
    assert [targets.tolist() for _, targets in batches] == expected
    assert all(torch.equal(features, FEATURES[targets]) for features, targets in batches)


def test_evaluation_takes_features():
    loader = WorkerEvaluationLoader(Numbers(), ROWS, 6)
    loader.use_features(FEATURES, ROWS)
    assert torch.equal(torch.cat([features for features, _ in loader]), FEATURES)
    assert torch.cat([answer.inputs for answer in loader.loaded_batches()]).shape == (N, 3)
