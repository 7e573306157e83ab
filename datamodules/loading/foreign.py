"""Wrapper of any other training loader: it yields updates, and counts the samples of each batch."""

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from datamodules.errors import UserError
from datamodules.loading.updates import PassesThrough, Update, UpdateLoader

TORCH_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers whose order is determined by torch's generator or by `set_epoch`."""


class _Counted(NamedTuple):
    """Batch with the number of collated samples."""

    batch: Any
    samples: int


class _CountingCollate:
    """Collate function that also counts the samples. A module-level class, so that workers can be spawned."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> _Counted:
        return _Counted(self.collate(samples), len(samples))


class _RecordingSampler:
    """Sampler that records how many samples each index requests, for a `DataLoader` with ``batch_size=None``."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.dealt: deque[int | None] = deque()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.dealt.clear()
        for index in self.sampler:
            self.dealt.append(len(index) if isinstance(index, (list, tuple, torch.Tensor)) else None)
            yield index


class _StatePickler(pickle.Pickler):
    """Pickler that leaves out a data set."""

    def __init__(self, file: Any, dataset: Any) -> None:
        super().__init__(file)
        self._dataset = dataset

    @override
    def persistent_id(self, value: Any) -> str | None:
        return "dataset" if value is self._dataset else None


class _Hash:
    """File object that hashes what is written."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)


def _state_hash(sampler: Any, dataset: Any) -> str:
    """Return a hash of a sampler's attributes without its data set; "" if they cannot be pickled."""
    file = _Hash()
    try:
        _StatePickler(file, dataset).dump(sampler)
    except Exception:  # Attributes may be of any class, and pickling may raise anything.
        return ""
    return file.sha256.hexdigest()


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class ForeignLoader(PassesThrough, UpdateLoader):
    """Loader of updates over the batches of any other loader, separately on each rank.

    With another number of ranks, batches have other numbers and may hold other samples. Other attributes and methods
    are forwarded to the wrapped loader.

    The number of samples of a batch is known for a `DataLoader` that does not override ``__iter__``: the number of
    collated samples, or with ``batch_size=None`` the length of the list of indices.

    Args:
        source: loader of this rank's batches.
        batch_size: samples of an ordinary batch; None if unknown.
        size: batches of an update on this rank; the last update of an epoch may have fewer.
        set_epoch: function that passes the epoch to the samplers.
    """

    division = None

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        set_epoch: Callable[[int], None] | None = None,
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.size = size
        self.rank = rank
        self.world_size = world_size
        self._set_epoch = set_epoch
        self._hash_at_start = ""

    @property
    @override
    def has_several(self) -> bool:
        return self.size > 1

    @property
    @override
    def samples_per_update(self) -> int | None:
        return None if self.batch_size is None else self.batch_size * self.size * self.world_size

    @property
    @override
    def has_position(self) -> bool:
        return False

    @override
    def set_epoch(self, epoch: int) -> None:
        if self._set_epoch is not None:
            self._set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.source) // self.size)

    def __iter__(self) -> Iterator[Update[Any]]:
        batches: list[Any] = []
        samples: list[int | None] = []
        first = 0
        for batch, dealt in self.counted_batches():
            batches.append(batch)
            samples.append(dealt)
            if len(batches) == self.size:
                yield self._update(batches, samples, first)
                first += len(batches)
                batches = []
                samples = []
        if batches:
            yield self._update(batches, samples, first)

    def _update(self, batches: list[Any], samples: list[int | None], first: int) -> Update[Any]:
        numbers = [self._number(first + offset) for offset in range(len(batches))]
        # The count of all ranks is unknown: the loaders of other ranks may end earlier.
        return Update(batches, numbers, None, samples=samples)

    def _number(self, index: int) -> int:
        """Return the epoch-wide number of this rank's batch at `index`. Batches are numbered in turn over the ranks."""
        return index * self.world_size + self.rank

    @override
    def first_number(self, update: int) -> int:
        return self._number(update * self.size)

    def counted_batches(self) -> Iterator[tuple[Any, int | None]]:
        """Yield each batch with its number of samples; None if it is unknown."""
        source = self.source
        if isinstance(source, JointLoader):
            yield from source.counted_batches()
            return
        if not isinstance(source, DataLoader) or type(source).__iter__ is not DataLoader.__iter__:
            for batch in source:
                yield batch, None
            return
        order = self._order()
        self._hash_at_start = _state_hash(order, source.dataset) if self._may_keep_state() else ""
        reader = self._counting_copy(source) if self._reader is None else self._reader
        if source.persistent_workers:
            self._reader = reader  # The workers belong to the copy.
        if source.batch_sampler is not None:
            yield from reader
        elif isinstance(source.dataset, IterableDataset) or not getattr(source, "in_order", True):
            for batch in reader:
                yield batch, None
        else:
            for batch in reader:
                yield batch, reader.sampler.dealt.popleft()

    @staticmethod
    def _counting_copy(source: DataLoader[Any]) -> Any:
        """Return a copy of a loader that also counts samples. The user's loader and its workers are unchanged."""
        reader = copy.copy(source)
        if source.batch_sampler is not None:
            reader.collate_fn = _CountingCollate(source.collate_fn)
        elif not isinstance(source.dataset, IterableDataset):
            vars(reader)["sampler"] = _RecordingSampler(source.sampler)  # DataLoader.__setattr__ forbids it.
        return reader

    # The state of the order

    def _order(self) -> Any:
        """Return the batch sampler or the sampler that determines the order of a `DataLoader`."""
        batches = self.source.batch_sampler
        return self.source.sampler if batches is None else batches

    def _samplers(self) -> list[Any]:
        """Return the batch sampler, if any, and the sampler of a `DataLoader`."""
        order = self._order()
        inner = getattr(order, "sampler", None)
        return [order] if inner is None else [order, inner]

    def _may_keep_state(self) -> bool:
        """Return whether a sampler is of a class that is not torch's, and so may have a state."""
        return any(type(sampler) not in (BatchSampler, *TORCH_SAMPLERS) for sampler in self._samplers())

    @override
    def order_state(self) -> dict[str, Any]:
        if not isinstance(self.source, DataLoader):
            return {}
        for sampler in self._samplers():
            if _is_stateful(sampler):
                return {"sampler": sampler.state_dict()}
        if not self._may_keep_state():
            return {}
        state_hash = _state_hash(self._order(), self.source.dataset)
        if state_hash and state_hash == self._hash_at_start:
            return {}
        return {"changed": type(self._samplers()[-1]).__name__}

    @override
    def load_order_state(self, state: dict[str, Any]) -> None:
        if not isinstance(self.source, DataLoader):
            return
        samplers = self._samplers()
        stateful = [sampler for sampler in samplers if _is_stateful(sampler)]
        if stateful and "sampler" in state:
            stateful[0].load_state_dict(state["sampler"])
            return
        reason = ""
        if getattr(samplers[-1], "generator", None) or (self.source.num_workers and self.source.generator):
            reason = "a generator of its own: leave it out and train with SeedControl"
        elif self.source.persistent_workers:
            reason = "persistent workers, whose generators go on: pass persistent_workers=False"
        elif state.get("changed"):
            reason = (
                f"a {state['changed']} whose state changes within an epoch: give it `state_dict` and `load_state_dict`,"
                " or let its order follow from `set_epoch`"
            )
        if reason:
            raise UserError(f"the state of the {type(self.source).__name__} is in no checkpoint, since it has {reason}")


class StatefulForeignLoader(ForeignLoader):
    """`ForeignLoader` over a loader with ``state_dict`` and ``load_state_dict``."""

    @property
    @override
    def has_position(self) -> bool:
        return True

    @override
    def order_state(self) -> dict[str, Any]:
        return {}

    @override
    def load_order_state(self, state: dict[str, Any]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the wrapped loader."""
        state: dict[str, Any] = self.source.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of the wrapped loader."""
        self.source.load_state_dict(state)


class JointLoader:
    """Iterable over the joint batches of several loaders, as they are passed to `training_step`.

    Args:
        loaders: a `CombinedLoader` over `ForeignLoader` objects with one batch per update.
        join: function that converts an item of the `CombinedLoader` to an `Update`.
    """

    def __init__(self, loaders: Any, join: Callable[[Any], Update[Any]]) -> None:
        self.loaders = loaders
        self.join = join

    def __len__(self) -> int:
        return len(self.loaders)

    def __iter__(self) -> Iterator[Any]:
        for batch, _ in self.counted_batches():
            yield batch

    def counted_batches(self) -> Iterator[tuple[Any, int | None]]:
        """Yield each joint batch with the number of samples from each loader; None if the numbers differ."""
        for item, _, _ in self.loaders:
            update = self.join(item)
            yield update.batches[0], update.samples[0]


def foreign_loader(source: Any, batch_size: int | None, rank: int, world_size: int, **options: Any) -> ForeignLoader:
    """Return a `ForeignLoader` over a loader, with a position if the loader is stateful."""
    loader_class = StatefulForeignLoader if _is_stateful(source) else ForeignLoader
    return loader_class(source, batch_size, rank=rank, world_size=world_size, **options)
