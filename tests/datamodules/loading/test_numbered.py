"""A stock DataLoader whose micro-batches are dealt by their numbers: the same samples and noise on any ranks."""

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from callbacks import GradientAccumulation, SeedControl
from datamodules.loading.numbered import NumberedDataLoader, can_be_numbered
from datamodules.loading.sampling import epoch_order
from tests.support.tables import quiet_trainer

N = 23
SIZE = 3
"""Samples of a micro-batch: the last one has 2."""
UPDATE = 8
"""Samples of an update, which is no multiple."""


class Rows(Dataset[Any]):
    """Each sample is its number, and two random numbers where there is noise."""

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Tensor:
        noise = [float(torch.rand(())), float(np.random.rand())] if self.noise else [0.0, 0.0]
        return torch.tensor([float(row), *noise], dtype=torch.float64)


class AtOnce(Rows):
    """A data set that is indexed by lists of rows."""

    def __getitem__(self, rows: Any) -> Tensor:
        return torch.stack([super(AtOnce, self).__getitem__(row) for row in rows])


class Subclass(DataLoader[Any]):
    """A loader of a library, which adds arguments and attributes only."""

    def __init__(self, dataset: Any, batch_size: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, **options)
        self.origin = "library"


class Reads(Subclass):
    """A loader that reads in its own way."""

    def __iter__(self) -> Any:
        return super().__iter__()


def distributed(rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    sampler: Any = DistributedSampler(Rows(), num_replicas=world_size, rank=rank, shuffle=True, seed=5)
    return DataLoader(Rows(), SIZE, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Rows(), SIZE),
    "shuffled": lambda: DataLoader(Rows(), SIZE, shuffle=True),
    "a subclass": lambda: Subclass(Rows(), SIZE, shuffle=True),
    "lists of rows": lambda: DataLoader(
        AtOnce(), batch_size=None, sampler=BatchSampler(RandomSampler(AtOnce()), SIZE, False)
    ),
    "drop_last": lambda: DataLoader(Rows(), SIZE, shuffle=True, drop_last=True),
    "drawn again": lambda: DataLoader(Rows(), SIZE, sampler=RandomSampler(range(N), replacement=True, num_samples=14)),
    "weighted": lambda: DataLoader(Rows(), SIZE, sampler=WeightedRandomSampler([*range(N)], 17)),
    "subset": lambda: DataLoader(Rows(), SIZE, sampler=SubsetRandomSampler(range(4, 21))),
    "distributed": distributed,
}


def on_ranks(
    make: Callable[[], DataLoader[Any]], world_size: int, noise_seed: int | None = None, state: Any = None
) -> list[NumberedDataLoader]:
    """The loader of each rank, in its updates; from a position on."""
    loaders = [NumberedDataLoader(make(), 1, rank, world_size, noise_seed) for rank in range(world_size)]
    for loader in loaders:
        loader.divide_updates(UPDATE)
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def by_number(loaders: Sequence[Any]) -> dict[int, list[list[float]]]:
    """The micro-batches of an epoch by their numbers; no rank makes one that another has."""
    found: dict[int, list[list[float]]] = {}
    for loader in loaders:
        for update in loader:
            for number, batch in update:
                if not update.is_dummy:
                    assert number not in found
                    found[number] = batch.tolist()
    return dict(sorted(found.items()))


def rows_of(found: dict[int, list[list[float]]]) -> list[int]:
    return [int(sample[0]) for batch in found.values() for sample in batch]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_make_the_numbered_batches_of_one(name: str, world_size: int) -> None:
    alone, shared = on_ranks(LOADERS[name], 1), on_ranks(LOADERS[name], world_size)
    epochs = []
    for _ in range(2):
        expected = by_number(alone)
        torch.rand(3)  # What is drawn in between changes nothing.
        assert by_number(shared) == expected
        epochs.append(rows_of(expected))
    assert (epochs[0] == epochs[1]) == (name == "in order")
    assert {len(loader) for loader in shared} == {len(alone[0])}


def test_each_sampler_gives_the_samples_that_it_has_in_torch() -> None:
    rows = {name: rows_of(by_number(on_ranks(make, 1))) for name, make in LOADERS.items()}
    order = epoch_order(N, 1, 0).tolist()
    assert rows["in order"] == [*range(N)]
    assert rows["shuffled"] == rows["a subclass"] == rows["lists of rows"] == order
    assert rows["drop_last"] == order[: N // SIZE * SIZE]
    assert len(rows["drawn again"]) == 14 > len({*rows["drawn again"]})
    assert len(rows["weighted"]) == 17
    assert 0 not in rows["weighted"]
    assert sorted(rows["subset"]) == [*range(4, 21)]
    assert rows["distributed"] == [int(row) for batch in distributed() for row in batch[:, 0]]


def test_a_distributed_sampler_repeats_no_sample_to_fill_up() -> None:
    loaders = [NumberedDataLoader(distributed(rank, 2), 1, rank, 2) for rank in range(2)]
    for loader in loaders:
        loader.divide_updates(UPDATE)
        loader.set_epoch(3)
    whole: Any = distributed()
    whole.sampler.set_epoch(3)
    assert rows_of(by_number(loaders)) == [int(row) for batch in whole for row in batch[:, 0]]


@pytest.mark.parametrize("name", LOADERS)
def test_a_resume_on_other_ranks_makes_the_rest_of_the_run(name: str) -> None:
    expected = [by_number(each) for each in [on_ranks(LOADERS[name], 1)] * 2]
    updates = len(on_ranks(LOADERS[name], 1)[0])
    for before, after in ((1, 2), (2, 3), (3, 1)):
        for done in range(1, updates):
            (old, *_) = on_ranks(LOADERS[name], before)
            steps = iter(old)
            for _ in range(done):
                next(steps)
            new = on_ranks(LOADERS[name], after, state=old.state_dict())
            first = done * new[0].division.micro_batches
            rest = {number: batch for number, batch in expected[0].items() if number >= first}
            assert by_number(new) == rest
            assert by_number(new) == expected[1]


@pytest.mark.parametrize("name", ["shuffled", "weighted"])
def test_an_epoch_goes_on_in_its_order_with_another_seed(name: str) -> None:
    def loader(seed: int) -> NumberedDataLoader:
        made = NumberedDataLoader(LOADERS[name](), seed)
        made.divide_updates(UPDATE)
        return made

    whole = by_number([loader(1)])
    old, new, other = loader(1), loader(2), loader(2)
    next(iter(old))
    new.load_state_dict(old.state_dict())
    assert new.state_dict() == old.state_dict(), "a second interruption changes nothing"
    assert by_number([new]) == {number: batch for number, batch in whole.items() if number >= 3}
    by_number([other])
    assert by_number([new]) == by_number([other]), "the next epoch is that of the new seed"


def test_samples_have_their_noise_on_any_ranks_or_workers() -> None:
    def make(workers: int) -> Callable[[], DataLoader[Any]]:
        return lambda: DataLoader(Rows(noise=True), SIZE, shuffle=True, num_workers=workers)

    alone, shared = on_ranks(make(0), 1, noise_seed=7), on_ranks(make(2), 2, noise_seed=7)
    other = on_ranks(make(0), 1, noise_seed=8)
    epochs = []
    for _ in range(2):
        expected = by_number(alone)
        torch.rand(3)
        assert by_number(shared) == expected
        assert by_number(other) != expected
        epochs.append(expected)
    noise = [sample[1] for epoch in epochs for batch in epoch.values() for sample in batch]
    assert len({*noise}) == 2 * N


def test_without_a_noise_seed_the_generators_are_left_alone() -> None:
    (loader,) = on_ranks(LOADERS["shuffled"], 1)
    before = torch.get_rng_state()
    by_number([loader])
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_without_a_seed_draw_other_noise_on_each_rank() -> None:
    def noise(seed: int, rank: int) -> list[float]:
        """Of two epochs."""
        loader = NumberedDataLoader(DataLoader(Rows(noise=True), SIZE, num_workers=1), seed, rank, 2)
        return [float(value) for _ in range(2) for batch in loader for value in batch[:, 1]]

    first = noise(1, rank=0)
    assert first == noise(1, rank=0)
    drawn = [*first, *noise(1, rank=1), *noise(2, rank=0)]
    assert len({*drawn}) == len(drawn)


class Shown(Rows):
    """Each sample is the worker, how often its data set was read there, and whether that is the data set it shows."""

    reads = 0

    def __getitem__(self, row: int) -> Tensor:
        self.reads += 1
        info: Any = get_worker_info()
        return torch.tensor([info.id, self.reads, info.dataset is self, info.dataset.started])


def _start(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.started = worker


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_shows_the_users_data_set_to_its_function(persistent: bool) -> None:
    stock: DataLoader[Any] = DataLoader(
        Shown(), SIZE, num_workers=2, worker_init_fn=_start, persistent_workers=persistent
    )
    loader = NumberedDataLoader(stock, 1)
    reads = []
    for _ in range(2):
        samples = torch.cat([*loader])
        assert samples[:, 2].all()
        assert torch.equal(samples[:, 0], samples[:, 3])
        reads.append(int(samples[:, 1].max()))
    assert (reads[1] > reads[0]) == persistent, "workers that persist go on with their data set"


class Fails(pl.LightningModule):
    """Raises in its second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ZeroDivisionError
        return self.layer(batch.float()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Any]):
    """Rows whose micro-batches have no numbers."""

    def __iter__(self) -> Any:
        return (Rows()[row] for row in range(N))


@pytest.mark.parametrize("dataset", [Rows, Stream])
def test_workers_end_with_a_fit_that_raises(dataset: Callable[[], Any]) -> None:
    """Left to the garbage collector, each would keep its process waiting for 5 seconds."""
    before = set(multiprocessing.active_children())
    loader = DataLoader(dataset(), SIZE, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(SeedControl(1), GradientAccumulation(SIZE)).fit(Fails(), loader)
    assert set(multiprocessing.active_children()) <= before


def test_a_data_set_is_asked_for_whole_batches_where_it_can() -> None:
    class Whole(Rows):
        def __getitems__(self, rows: list[int]) -> list[Tensor]:
            asked.append(rows)
            return [self[row] for row in rows]

    asked: list[list[int]] = []
    (loader,) = on_ranks(lambda: DataLoader(Whole(), SIZE, shuffle=True), 1)
    found = by_number([loader])
    assert asked == [[int(sample[0]) for sample in batch] for batch in found.values()]


def test_a_loader_whose_order_is_not_known_is_left_alone() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(N))

    class Batches:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2]])

        def __len__(self) -> int:
            return 2

    generator = torch.Generator()
    left_alone: list[Any] = [
        DataLoader(Stream()),
        Reads(Rows(), SIZE),
        DataLoader(Rows(), batch_sampler=Batches()),
        DataLoader(Rows(), batch_size=None),
        DataLoader(Rows(), shuffle=True, generator=generator),
        DataLoader(Rows(), sampler=[2, 1, 0]),
        [DataLoader(Rows())],
    ]
    assert not any(map(can_be_numbered, left_alone))
    assert all(can_be_numbered(make()) for make in LOADERS.values())
