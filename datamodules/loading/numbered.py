"""A stock `DataLoader` as numbered micro-batches: its data set, collate function and workers, in our order.

Lightning puts a sampler of its own into a `DataLoader` on several devices only, so that one device sees another order
than two, and saves no position of it. Here the order is a function of (seed, epoch), on any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from typing_extensions import override

from datamodules.loading.randomness import derive_seed, derive_seed_at, seed_generators
from datamodules.loading.requests import Requests
from datamodules.loading.resumable import ResumableLoader, Spans, fingerprint
from datamodules.loading.sampling import epoch_order

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Those whose epoch is known when it begins."""


class _Request(NamedTuple):
    """A micro-batch to load."""

    seed: int | None
    """From which the noise of its samples is drawn."""
    rows: list[int]


class _Batches:
    """Makes whole micro-batches of the samples of a data set, in a worker or here."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, request: _Request) -> Any:
        if request.seed is not None:
            seed_generators(request.seed)
        if callable(getattr(self.dataset, "__getitems__", None)):
            samples = self.dataset.__getitems__(request.rows)
        else:
            samples = [self.dataset[row] for row in request.rows]
        return self.collate(samples)


class _StartWorker:
    """Shows a worker the user's data set, and calls the user's function."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # Its own refuses.
        if self.function is not None:
            self.function(worker)


def _as_it_is(batch: Any) -> Any:
    return batch


def can_be_numbered(loader: Any) -> bool:
    """Whether a loader is a stock `DataLoader` over a data set with a length, whose sampler is torch's.

    Example:
        >>> can_be_numbered(DataLoader(range(4), shuffle=True)), can_be_numbered(DataLoader(range(4), batch_size=None))
        (True, False)
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in _SAMPLERS:
        return False
    # A generator of the user's goes on from epoch to epoch.
    return getattr(loader.sampler, "generator", None) is None


class NumberedDataLoader(ResumableLoader[Any]):
    """A stock `DataLoader` whose micro-batches are dealt to the ranks by their numbers, resumable at any update.

    ``shuffle=True`` shuffles in the order of `epoch_order`; other samplers of torch draw from (seed, epoch). A
    `DistributedSampler` gives the order only: no sample is repeated to fill up an epoch.

    Args:
        stock: the loader; see `can_be_numbered`.
        seed: of the order.
        noise_seed: each micro-batch is loaded with the generators of torch, NumPy and Python at (seed, epoch, number);
            None leaves them alone.
        keeps_order: whether the samples come in the order of the data set, as for over-fitting.
    """

    def __init__(
        self,
        stock: DataLoader[Any],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        noise_seed: int | None = None,
        keeps_order: bool = False,
    ) -> None:
        self.stock = stock
        self.dataset = stock.dataset
        self.num_workers = stock.num_workers
        self.collate_fn = stock.collate_fn
        self.drop_last = stock.drop_last
        self.pin_memory = stock.pin_memory
        self.seed = seed
        self._resumed = -1, seed
        assert stock.batch_size is not None
        self.batch_size = stock.batch_size
        self._noise_key = None if noise_seed is None else derive_seed(noise_seed, "items")
        samples = self._number_of_samples(keeps_order)
        if stock.drop_last:
            samples = samples // self.batch_size * self.batch_size
        super().__init__(samples, self.batch_size, rank, world_size)
        self.keeps_order = keeps_order
        self._requests: Requests[_Request] = Requests()
        options: dict[str, Any] = {"pin_memory": stock.pin_memory, "timeout": stock.timeout}
        if stock.num_workers:
            options |= {
                "num_workers": stock.num_workers,
                "prefetch_factor": stock.prefetch_factor,
                "persistent_workers": stock.persistent_workers,
                "multiprocessing_context": stock.multiprocessing_context,
                "worker_init_fn": _StartWorker(stock.worker_init_fn),
            }
        self._generator = stock.generator or torch.Generator()
        batches: Any = _Batches(stock.dataset, stock.collate_fn)
        self._loader: DataLoader[Any] = DataLoader(
            batches,
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            # Its own: each iterator draws a number, by default from the generator that dropout uses.
            generator=self._generator,
            **options,
        )

    def _number_of_samples(self, keeps_order: bool) -> int:
        sampler: Any = self.stock.sampler
        if isinstance(sampler, DistributedSampler) or keeps_order:
            dataset: Any = self.stock.dataset
            return len(dataset)
        return len(sampler)

    def order_of_epoch(self, epoch: int) -> Sequence[int]:
        """The samples of an epoch in their order, on all ranks."""
        sampler: Any = self.stock.sampler
        if self.keeps_order or type(sampler) is SequentialSampler:
            return range(self._number_of_samples(self.keeps_order))
        if type(sampler) is DistributedSampler:
            whole: DistributedSampler[Any] = DistributedSampler(
                sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
            )
            whole.set_epoch(epoch)
            return [*whole]
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            order: list[int] = epoch_order(len(sampler), self._seed_of(epoch), epoch).tolist()
            return order
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self._seed_of(epoch), "order", epoch))
            return [*sampler]

    def _seed_of(self, epoch: int) -> int:
        """The seed of an epoch's order: an epoch that was saved within goes on in the order in which it began."""
        resumed, seed = self._resumed
        return seed if epoch == resumed else self.seed

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "seed": self._seed_of(state["epoch"])}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["consumed"]:
            self._resumed = state["epoch"], state.get("seed", self.seed)

    @override
    def _describe_data(self) -> tuple[int, str]:
        tensors: Sequence[Tensor] = self.dataset.tensors if isinstance(self.dataset, TensorDataset) else ()
        return self._number_of_samples(self.keeps_order), fingerprint(tensors)

    @override
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[Any]:
        order = self.order_of_epoch(epoch)
        self._requests.pending = [
            _Request(self._noise_seed(epoch, start), [*order[start:stop]]) for start, stop in spans
        ]
        if self.stock.generator is None:
            # Workers draw what is not addressed from it: other numbers on each rank and in each epoch.
            seed = derive_seed(self.seed, "workers", epoch, start_at, self.rank)
            self._generator.manual_seed(seed)
        yield from self._loader

    def _noise_seed(self, epoch: int, start: int) -> int | None:
        """The address of a micro-batch's noise is where it starts in the epoch, the same on any number of ranks."""
        return None if self._noise_key is None else derive_seed_at(self._noise_key, epoch, start)
