"""Wrapper of a stock `DataLoader` whose order depends on (seed, epoch) only and whose position can be saved.

On several devices Lightning replaces the sampler of a `DataLoader` by a `DistributedSampler`, so one device and two
devices have different orders. Lightning also does not save the position within the epoch. The wrapper keeps the data
set, the collate function and the workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    TensorDataset,
    get_worker_info,
)
from typing_extensions import override

from datamodules.loading.foreign import TORCH_SAMPLERS
from datamodules.loading.loaders import InOrder, Requests, ResumableLoader, Spans, fingerprint
from datamodules.loading.randomness import derive_seed, derive_seed_at, seed_generators
from datamodules.loading.sampling import epoch_order
from datamodules.loading.updates import PassesThrough


class _MicroBatchRequest(NamedTuple):
    """Request of one micro-batch."""

    seed: int | None
    """Seed of the random transforms of the samples; None does not seed the generators."""
    rows: list[int]


class _Batches:
    """Dataset whose items are collated micro-batches. It runs in the workers, or without workers in this process.

    Args:
        at_once: whether the data set is indexed by a list of rows, as by a loader with ``batch_size=None``.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], at_once: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.at_once = at_once

    def __getitem__(self, request: _MicroBatchRequest) -> Any:
        if request.seed is not None:
            seed_generators(request.seed)
        if self.at_once:
            return self.collate(self.dataset[request.rows])
        # As in torch's fetcher: `__getitems__` reads a whole batch, which may be much faster.
        if callable(getattr(self.dataset, "__getitems__", None)):
            samples = self.dataset.__getitems__(request.rows)
        else:
            samples = [self.dataset[row] for row in request.rows]
        return self.collate(samples)


class _StartWorker:
    """Initialization of a worker: `get_worker_info().dataset` becomes the user's data set, as in a stock loader."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        # WorkerInfo.__setattr__ raises an error.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.function is not None:
            self.function(worker)


def _identity(batch: Any) -> Any:
    """Return the batch. A module-level function, because a lambda cannot be pickled for spawned workers."""
    return batch


_OF_CLASSES = {"__init__", "__module__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__parameters__"}
_METHODS = {name for name in vars(DataLoader) if name not in _OF_CLASSES | {"__orig_bases__", "__firstlineno__"}}
"""Names of the methods and properties of a `DataLoader`."""


def _reads_as_stock(loader: Any) -> bool:
    """Return whether a loader is a `DataLoader`, or of a subclass that overrides the constructor only."""
    if not isinstance(loader, DataLoader):
        return False
    classes = type(loader).__mro__
    return all(_METHODS.isdisjoint(vars(cls)) for cls in classes[: classes.index(DataLoader)])


def batch_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of lists of rows: the batch sampler, or with ``batch_size=None`` the sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def can_be_numbered(loader: Any) -> bool:
    """Return whether a loader reads a map-style data set as a stock `DataLoader`, with one of torch's samplers.

    Example:
        >>> can_be_numbered(DataLoader(range(4), shuffle=True)), can_be_numbered(DataLoader(range(4), batch_size=None))
        (True, False)
    """
    if not _reads_as_stock(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = batch_sampler_of(loader)
    if type(batches) is not BatchSampler or type(batches.sampler) not in TORCH_SAMPLERS:
        return False
    # A user's generator keeps its state from epoch to epoch, so the order is not a function of the epoch.
    return getattr(batches.sampler, "generator", None) is None


class NumberedDataLoader(PassesThrough, ResumableLoader[Any]):
    """Loader over a stock `DataLoader` that distributes numbered micro-batches to the ranks, resumable at any update.

    With ``shuffle=True`` the order is `epoch_order`. Other samplers of torch draw with a seed from (seed, epoch). A
    `DistributedSampler` determines the order only: no sample is repeated to fill an epoch. Other attributes and methods
    are forwarded to the stock loader. A resumed run keeps the number of samples of an epoch, even if ``drop_last`` and
    a new batch size would drop a different number.

    Args:
        stock: the loader; see `can_be_numbered`.
        seed: seed of the order.
        noise_seed: seed of the generators of torch, NumPy and Python, which are then seeded for each micro-batch from
            (noise_seed, epoch, position); None does not seed them.
        keeps_order: whether the samples are in the order of the data set, as with `overfit_batches`.
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
        self.source = stock
        batches_of_rows = batch_sampler_of(stock)
        self._sampler = batches_of_rows.sampler
        self.drop_last = batches_of_rows.drop_last
        self.seed = seed
        # The interrupted epoch of a checkpoint, and the seed of its order.
        self._resumed = (-1, seed)
        self.batch_size: int = batches_of_rows.batch_size
        self._noise_key = None if noise_seed is None else derive_seed(noise_seed, "items")
        samples = self._number_of_samples(keeps_order)
        if self.drop_last:
            samples = samples // self.batch_size * self.batch_size
        super().__init__(samples, self.batch_size, rank, world_size, source=stock)
        self.keeps_order = keeps_order
        self._requests: Requests[_MicroBatchRequest] = Requests()
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
        batches: Any = _Batches(stock.dataset, stock.collate_fn, at_once=stock.batch_sampler is None)
        self._reader = DataLoader(
            batches,
            batch_size=None,
            sampler=self._requests,
            collate_fn=_identity,
            # Each new iterator draws a base seed, by default from the global generator, which dropout also uses.
            generator=self._generator,
            **options,
        )

    @property
    @override
    def sampler(self) -> Any:
        """The sampler of the stock loader, or a sequential one if the loader does not shuffle."""
        return InOrder(self) if self.keeps_order else self.source.sampler

    def _number_of_samples(self, keeps_order: bool) -> int:
        """Return the number of samples of an epoch over all ranks."""
        sampler: Any = self._sampler
        # The length of a DistributedSampler is the length of one rank's share.
        if isinstance(sampler, DistributedSampler) or keeps_order:
            dataset: Any = self.source.dataset
            return len(dataset)
        return len(sampler)

    def order_of_epoch(self, epoch: int) -> Sequence[int]:
        """Return the sample numbers of an epoch in order, for all ranks."""
        sampler: Any = self._sampler
        if self.keeps_order or type(sampler) is SequentialSampler:
            return range(self._number_of_samples(self.keeps_order))
        if type(sampler) is DistributedSampler:
            # With one replica it yields the whole order, without the padding that makes ranks equal.
            single: DistributedSampler[Any] = DistributedSampler(
                sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
            )
            single.set_epoch(epoch)
            return [*single]
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            order: list[int] = epoch_order(len(sampler), self._seed_of(epoch), epoch).tolist()
            return order
        # A sampler without a generator draws from the global one, whose state is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self._seed_of(epoch), "order", epoch))
            return [*sampler]

    def _seed_of(self, epoch: int) -> int:
        """Return the seed of an epoch's order. An interrupted epoch keeps its seed."""
        resumed_epoch, resumed_seed = self._resumed
        return resumed_seed if epoch == resumed_epoch else self.seed

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "seed": self._seed_of(state["epoch"]), "items": self._items}

    def keep_length(self, state: dict[str, Any]) -> None:
        """Restore the number of samples of an epoch from `state`."""
        if state.get("data") == self.data:
            self._items = state.get("items", self._items)
            self.division = replace(self.division, items=self._items)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.keep_length(state)
        super().load_state_dict(state)
        if state["consumed"]:
            self._resumed = (state["epoch"], state.get("seed", self.seed))

    @override
    def _describe_data(self) -> tuple[int, str]:
        dataset = self.source.dataset
        tensors: Sequence[Tensor] = dataset.tensors if isinstance(dataset, TensorDataset) else ()
        return self._number_of_samples(self.keeps_order), fingerprint(tensors)

    @override
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[Any]:
        order = self.order_of_epoch(epoch)
        self._requests.pending = [
            _MicroBatchRequest(self._noise_seed(epoch, start), [*order[start:stop]]) for start, stop in spans
        ]
        if self.source.generator is None:
            # Workers draw their base seeds from this generator. The seeds have to differ between ranks and epochs.
            seed = derive_seed(self.seed, "workers", epoch, start_at, self.rank)
            self._generator.manual_seed(seed)
        yield from self._reader

    def _noise_seed(self, epoch: int, start: int) -> int | None:
        """Return the seed of a micro-batch, from its first position in the epoch, the same on any number of ranks."""
        if self._noise_key is None:
            return None
        return derive_seed_at(self._noise_key, epoch, start)
