"""Loaders of other people as loaders of updates: how many samples they dealt, what they keep, whose order repeats."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from datamodules import UserError
from datamodules.loading.foreign import ForeignLoader, foreign_loader

SAMPLES = 10


def joined(samples: list[int]) -> dict[str, Any]:
    """A batch whose first tensor has another length than there are samples."""
    return {"points": torch.zeros(7 * len(samples)), "samples": samples}


def half(samples: list[int]) -> dict[str, Any]:
    return joined(samples[::2])


class Rows:
    """A data set that reads a batch by the list of its rows."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, rows: Any) -> Any:
        return joined(rows) if isinstance(rows, list) else rows


class AtOnce(Rows):
    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class OwnBatches:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3], [4], [5, 6]])

    def __len__(self) -> int:
        return 3


class Subclass(DataLoader[Any]):
    def resample(self) -> str:
        return "resampled"


class OwnIterator(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {**batch, "more": 1}


WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}
LOADERS: dict[str, tuple[Callable[[], Any], list[int | None]]] = {
    "stock": (lambda: DataLoader(range(SAMPLES), 4, collate_fn=joined), [4, 4, 2]),
    "a subclass": (lambda: Subclass(range(SAMPLES), 4, collate_fn=joined), [4, 4, 2]),
    "own batch sampler": (lambda: DataLoader(range(SAMPLES), batch_sampler=OwnBatches(), collate_fn=joined), [4, 1, 2]),
    "batches read at once": (lambda: DataLoader(AtOnce(), 4, collate_fn=joined), [4, 4, 2]),
    "a stream": (lambda: DataLoader(Stream(), 4, collate_fn=joined), [4, 4, 2]),
    "a worker": (lambda: DataLoader(range(SAMPLES), 4, collate_fn=joined, **WORKER), [4, 4, 2]),
    "a worker that persists": (
        lambda: DataLoader(range(SAMPLES), 4, collate_fn=joined, persistent_workers=True, **WORKER),
        [4, 4, 2],
    ),
    "a stream, a worker that persists": (
        lambda: DataLoader(Stream(), 4, collate_fn=joined, persistent_workers=True, **WORKER),
        [4, 4, 2],
    ),
    "lists of rows": (
        lambda: DataLoader(Rows(), batch_size=None, sampler=BatchSampler(SequentialSampler(Rows()), 4, False)),
        [4, 4, 2],
    ),
    "lists of rows, a worker": (
        lambda: DataLoader(
            Rows(), batch_size=None, sampler=BatchSampler(SequentialSampler(Rows()), 4, False), **WORKER
        ),
        [4, 4, 2],
    ),
    "dropped when collated": (lambda: DataLoader(range(SAMPLES), 4, collate_fn=half), [4, 4, 2]),
    "single rows": (lambda: DataLoader(Rows(), batch_size=None), [None] * SAMPLES),
    "a stream of batches": (lambda: DataLoader(Stream(), batch_size=None), [None] * SAMPLES),
    "an iterator of its own": (lambda: OwnIterator(range(SAMPLES), 4, collate_fn=joined), [None] * 3),
    "no loader of torch": (lambda: [joined([1, 2]), joined([3])], [None, None]),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_each_kind_of_loader_tells_the_samples_it_dealt(kind: str) -> None:
    make, expected = LOADERS[kind]
    loader = foreign_loader(make(), 4, 0, 1)
    for _ in range(2):
        updates = list(loader)
        assert [count for update in updates for count in update.samples] == expected
    plain = [list(batch) if isinstance(batch, dict) else batch for batch in make()]
    assert [list(b) if isinstance(b, dict) else b for update in updates for b in update.batches] == plain


def test_the_users_loader_stays_as_it_is() -> None:
    for kind in ("stock", "a worker that persists", "lists of rows"):
        stock = LOADERS[kind][0]()
        before = dict(vars(stock))
        iterator = iter(ForeignLoader(stock))
        next(iterator)
        assert vars(stock) == before
        assert all(type(batch) is dict for batch in stock)


def test_attributes_of_the_loader_are_passed_through() -> None:
    stock = Subclass(range(SAMPLES), 4)
    loader = ForeignLoader(stock)
    assert loader.resample() == "resampled"
    assert loader.sampler is stock.sampler
    assert len(ForeignLoader(stock, size=2)) == 2
    with pytest.raises(AttributeError, match="Subclass.*absent"):
        loader.absent  # noqa: B018
    assert pickle.loads(pickle.dumps(loader)).resample() == "resampled"


class SeededSampler(Sampler[int]):
    """A sampler whose generator goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class SavedSampler(SeededSampler):
    def state_dict(self) -> dict[str, Any]:
        return {"state": self.rng.bit_generator.state["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = {**self.rng.bit_generator.state, **state}


class EpochSampler(SeededSampler):
    """A sampler whose order follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(SAMPLES).tolist())


class Unreadable(SeededSampler):
    def __init__(self) -> None:
        super().__init__()
        self.rows = iter(range(3))
        self.key = lambda row: row


def with_sampler(sampler: Any) -> ForeignLoader:
    return ForeignLoader(DataLoader(range(SAMPLES), 4, sampler=sampler))


@pytest.mark.parametrize(
    "sampler", [SeededSampler, Unreadable, lambda: RandomSampler(range(SAMPLES), generator=torch.Generator())]
)
def test_an_order_that_cannot_be_repeated_is_not_resumed(sampler: Callable[[], Any]) -> None:
    loader = with_sampler(sampler())
    list(loader)
    with pytest.raises(UserError, match="the state of the DataLoader is in no checkpoint, since it has a"):
        with_sampler(sampler()).load_order_state(loader.order_state())


def test_the_state_of_a_sampler_is_saved() -> None:
    whole = with_sampler(SavedSampler())
    list(whole)
    resumed = with_sampler(SavedSampler())
    resumed.load_order_state(pickle.loads(pickle.dumps(whole.order_state())))
    assert str([u.batches for u in resumed]) == str([u.batches for u in whole])


@pytest.mark.parametrize("sampler", [EpochSampler, lambda: RandomSampler(range(SAMPLES)), lambda: range(SAMPLES)])
def test_an_order_of_the_epoch_alone_resumes(sampler: Callable[[], Any]) -> None:
    loader = with_sampler(sampler())
    loader.set_epoch(3)
    list(loader)
    assert loader.order_state() == {}
    with_sampler(sampler()).load_order_state(loader.order_state())
