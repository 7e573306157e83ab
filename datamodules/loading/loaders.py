"""Loaders over tensors in memory, and the base class of the training loaders, which resume from a saved position.

A batch of tensors in memory is one indexing operation on the device of the tensors.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from typing_extensions import override

from datamodules.errors import UserError, spelled
from datamodules.loading.sampling import UpdateDivision, epoch_order, evaluation_spans, number_draws, weighted_order
from datamodules.loading.updates import Update, UpdateLoader
from datamodules.notes import warn
from datamodules.ranges import COUNT, check_ranges

Request = TypeVar("Request")


class Requests(Generic[Request]):
    """Sampler of requests for batches. Its owner sets `pending` before each epoch, so workers persist over epochs."""

    def __init__(self) -> None:
        self.pending: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


Batch = TypeVar("Batch")

Spans = Sequence[tuple[int, int]]
"""Batches as ranges of positions ``[start, stop)`` in the order of an epoch."""


class InOrder(SequentialSampler):
    """Sampler of a loader that does not shuffle. Lightning checks its class (`overfit_batches`) and sets its epoch."""

    def __init__(self, loader: "ResumableLoader[Any]") -> None:
        super().__init__(range(len(loader)))
        self.set_epoch = loader.set_epoch


_MAX_FINGERPRINT_BYTES = 1 << 26
"""Maximum number of bytes that the fingerprint reads from a tensor."""


def fingerprint(tensors: Iterable[Tensor], names: Iterable[str] = ()) -> str:
    """Return a hash of tensors and of file names, 32 hexadecimal digits.

    Integer tensors are hashed by value, above 64 MiB by every k-th row. Floating-point tensors are hashed by shape
    only, because another machine may round their values differently. Names are hashed without folders, so that a data
    set can be moved.
    """
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(f"{tuple(tensor.shape)}".encode())
        if not tensor.is_floating_point():
            step = max(1, -(-tensor.numel() * tensor.element_size() // _MAX_FINGERPRINT_BYTES))
            sha256.update(tensor[::step].cpu().contiguous().view(-1).numpy().data)
    for name in names:
        base_name = name.rpartition("/")[2]
        sha256.update(base_name.encode("utf-8", "surrogateescape") + b"\0")
    return sha256.hexdigest()[:32]


class ResumableLoader(UpdateLoader, Generic[Batch]):
    """Iterable over the updates of an epoch, the same on any number of ranks, resumable at each update.

    By default an update is one micro-batch per rank, and the loader yields the micro-batch of its rank. After
    `divide_updates` it yields `Update` objects. ``len(loader)`` is the number of updates of an epoch. Subclasses read
    the batches.

    Args:
        items: number of items of an epoch: samples, or batches with a fixed content.
        items_per_micro_batch: number of items of a micro-batch.
        source: the wrapped loader, if any.
    """

    def __init__(self, items: int, items_per_micro_batch: int, rank: int, world_size: int, source: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._items = items
        self._items_per_micro_batch = items_per_micro_batch
        self._epoch = 0
        # Items of the epoch that all ranks have consumed; saved in checkpoints.
        self._consumed = 0
        # Items of the epoch that the next iteration skips; restored from a checkpoint.
        self._start_at = 0
        self.source: Any = self if source is None else source
        self._has_noted = False
        self.keeps_order = False
        """Whether every epoch has the samples in the order of the data set, as with `overfit_batches`."""
        self.divide_updates(None)

    def items_of(self, micro_batches: int) -> int:
        """Return the number of items in an update of `micro_batches` micro-batches, over all ranks."""
        return self._items_per_micro_batch * micro_batches

    def items_of_samples(self, samples: int) -> int:
        """Return the number of items in an update of `samples` samples, over all ranks.

        Raises:
            UserError: batches are limited by tokens, so their number of samples varies.
        """
        return samples

    def divide_updates(self, items: int | None) -> None:
        """Set the size of an update, from the next iteration on. The loader then yields `Update` objects.

        Args:
            items: items of an update over all ranks; the last micro-batch may be short. None restores the default: one
                micro-batch per rank, which the loader yields without an `Update`.

        Raises:
            UserError: there are more ranks than micro-batches in an update.
        """
        self.gives_updates = items is not None
        """Whether the loader yields `Update` objects."""
        if items is None:
            items = self.items_of(self.world_size)
        self.division = UpdateDivision(self._items, self._items_per_micro_batch, items, self.world_size)
        micro_batches_of_epoch = -(-self._items // self._items_per_micro_batch)
        if self.gives_updates and self.division.micro_batches > micro_batches_of_epoch and not self._has_noted:
            self._has_noted = True
            warn(
                f"note: an update has {self.division.micro_batches} micro-batches, and an epoch has"
                f" {micro_batches_of_epoch}: each epoch is one update"
            )
        if self.division.micro_batches < self.world_size:
            raise UserError(
                f"an update has {self.division.micro_batches} micro-batches of {self._items_per_micro_batch}, found"
                f" {self.world_size} devices: pass fewer devices, or a {spelled('batch_size')} of"
                f" {max(1, items // self.world_size)} or less"
            )

    division: UpdateDivision
    batch_size: int

    @property
    @override
    def has_several(self) -> bool:
        return self.division.micro_batches > self.world_size

    @property
    @override
    def samples_per_update(self) -> int:
        """Samples of an update over all ranks; a mean if batches are limited by tokens."""
        return self.division.update_size

    @property
    @override
    def has_position(self) -> bool:
        return True

    def _samples_of(self, epoch: int, start: int, stop: int) -> int:
        """Return the number of samples of a micro-batch; by default its number of items."""
        return stop - start

    @abstractmethod
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[Batch]:
        """Yield this rank's batch at each span of an epoch. The first update begins at position `start_at`."""

    @abstractmethod
    def _describe_data(self) -> tuple[int, str]:
        """Return the number of training samples and their `fingerprint`."""

    @cached_property
    def data(self) -> dict[str, Any]:
        """Identity of the training data: the number of samples and a fingerprint."""
        samples, data_fingerprint = self._describe_data()
        return {"samples": samples, "fingerprint": data_fingerprint}

    @property
    def sampler(self) -> Any:
        """Object whose ``set_epoch`` Lightning calls: this loader, or a sequential sampler if it does not shuffle."""
        return InOrder(self) if self.keeps_order else self

    def __len__(self) -> int:
        return self.division.updates

    def __iter__(self) -> Iterator[Any]:
        """Yield an `Update`, or by default this rank's batch, for each remaining update of the epoch."""
        # A generator reads the epoch at the first item. Lightning creates the iterator before it calls `set_epoch`.
        epoch = self._epoch
        begin = self.updates_done
        # Fixed for the epoch: `divide_updates` may be called within it.
        division = self.division
        self._start_at = 0
        slices = [division.rank_slice(update, self.rank) for update in range(begin, division.updates)]
        spans = [span for rank_slice in slices for span in rank_slice.spans]
        batches = self._batches_of_epoch(epoch, begin * division.update_size, spans)
        for update, rank_slice in enumerate(slices, begin + 1):
            micro_batches = [next(batches) for _ in rank_slice.spans]
            # Set before the item is yielded: Lightning saves before it requests the next item, and the saved position
            # has to be after this item. Batches that workers prefetch do not count.
            self._consumed = update * division.update_size
            if update == division.updates:
                self._epoch = epoch + 1
                self._consumed = 0
            if self.gives_updates:
                numbers = range(rank_slice.first, rank_slice.first + len(micro_batches))
                samples = [self._samples_of(epoch, *span) for span in rank_slice.spans]
                yield Update(micro_batches, numbers, rank_slice.total, rank_slice.is_dummy, samples)
            else:
                yield micro_batches[0]

    @override
    def first_number(self, update: int) -> int:
        """Return the epoch-wide number of this rank's first micro-batch of `update`."""
        division = self.division
        if self.rank == 0:
            return update * division.micro_batches
        return division.rank_slice(update, self.rank).first

    @property
    def updates_done(self) -> int:
        """Number of updates of the epoch that the next iteration skips."""
        return self._start_at // self.division.update_size

    @override
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which starts with its first update, unless the restored position is in this epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._start_at = 0
            self._consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of items that all ranks have consumed, and the identity of the data."""
        return {"epoch": self._epoch, "consumed": self._consumed, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of `state`, which may have been saved on another number of ranks.

        Raises:
            UserError: the training data have changed, or `state` is within an epoch of updates of another size.
        """
        self.check_data(state)
        if state["consumed"] % self.division.update_size:
            raise UserError(
                f"the checkpoint lies within an epoch, after {state['consumed']:,} of {self._items:,}, and updates now"
                f" have {self.division.update_size:,}: resume with the run's updates, or from an epoch's end"
            )
        self._epoch = state["epoch"]
        self._start_at = self._consumed = state["consumed"]

    def check_data(self, state: dict[str, Any]) -> None:
        """Check that `state` was saved with the same training data: a position means other samples in other data.

        Raises:
            UserError: the number of samples or the fingerprint differs.
        """
        current = self.data
        saved = state.get("data", current)
        if saved != current:
            difference = ", others or in another order" if saved["samples"] == current["samples"] else ""
            raise UserError(
                f"the checkpoint is of a run on {saved['samples']:,} samples, found {current['samples']:,}{difference};"
                " resume with the same data, or start a new run from its weights"
            )


Transform = Callable[[Tensor, Tensor, int], Tensor]
"""Function from (inputs, sample numbers, epoch) to the network's inputs, for a whole batch."""


class _SampleLoader(ABC):
    """Base class of loaders over samples. Subclasses read the samples in `_batches`."""

    repeats = False
    """Whether an epoch may repeat samples. Sample numbers then come from `number_draws`."""

    @abstractmethod
    def _batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batch at each span of positions in `order`."""


class TrainSampling(ResumableLoader[tuple[Tensor, Tensor]], _SampleLoader):
    """Resumable loader over samples with a new order in every epoch: shuffled, or sampled with replacement."""

    def __init__(
        self,
        rows: Tensor,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        targets: Tensor,
        inputs: Tensor | None = None,
        names: Iterable[str] = (),
        weights: Tensor | None = None,
    ) -> None:
        check_ranges(batch_size=(batch_size, COUNT))
        if len(rows) == 0:
            raise UserError("there is no sample to train on: the training set is empty")
        super().__init__(len(rows), batch_size, rank, world_size)
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.weights = weights
        self.repeats = weights is not None
        self._samples_of_set = len(targets)
        self._names = names
        # Tensors that identify the data set: a checkpoint resumes with the same data only.
        self._identity = (rows, targets) if inputs is None else (rows, targets, inputs)

    @override
    def _describe_data(self) -> tuple[int, str]:
        return len(self.rows), fingerprint(self._identity, self._names)

    @override
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches(epoch, self.order_of_epoch(epoch), spans)

    def order_of_epoch(self, epoch: int) -> Tensor:
        """Return the sample numbers of an epoch in order, int64 of shape (len(rows),); see also `repeats`."""
        if self.keeps_order or not self.shuffle:
            return self.rows
        if self.weights is not None:
            drawn = self.rows.cpu()[weighted_order(self.weights, self.seed, epoch)]
            return number_draws(drawn, self._samples_of_set).to(self.rows.device, non_blocking=True)
        positions = epoch_order(len(self.rows), self.seed, epoch)
        return self.rows.index_select(0, positions.to(self.rows.device, non_blocking=True))


class NumberedEvaluation(ABC):
    """Evaluation loader with known sample numbers."""

    @abstractmethod
    def sample_numbers(self) -> Tensor:
        """Return the numbers of this rank's samples in the order of the batches, int64 on the CPU."""


class EvaluationSampling(_SampleLoader, NumberedEvaluation):
    """Loader that yields every sample once, in the order of `rows`."""

    def __init__(self, rows: Tensor, batch_size: int, rank: int, world_size: int) -> None:
        check_ranges(batch_size=(batch_size, COUNT))
        self.rows = rows
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def _spans(self) -> list[tuple[int, int]]:
        return list(evaluation_spans(len(self.rows), self.batch_size, self.rank, self.world_size))

    @override
    def sample_numbers(self) -> Tensor:
        return torch.cat([self.rows[start:stop] for start, stop in self._spans()]).cpu()

    def __len__(self) -> int:
        return len(self._spans())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._batches(0, self.rows, self._spans())


class _Tensors(_SampleLoader):
    """Loader that indexes tensors, and transforms each batch on the device."""

    inputs: Tensor
    targets: Tensor
    transform: Transform | None
    device: torch.device

    def _set_tensors(
        self, inputs: Tensor, targets: Tensor, transform: Transform | None, device: torch.device | str | None
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self.transform = transform
        self.device = torch.device(device) if device is not None else inputs.device

    @override
    def _batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        for start, stop in spans:
            yield self._batch(order[start:stop], epoch)

    def _batch(self, rows: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        samples = rows % len(self.targets) if self.repeats else rows
        # index_select copies row by row, which is 10 times as fast as indexing with a tensor.
        inputs = self.inputs.index_select(0, samples).to(self.device, non_blocking=True)
        targets = self.targets.index_select(0, samples).to(self.device, non_blocking=True)
        if self.transform is not None:
            inputs = self.transform(inputs, rows.to(self.device, non_blocking=True), epoch)
        return inputs, targets


class TrainLoader(TrainSampling, _Tensors):
    """Loader of shuffled batches in one global order for any number of ranks, resumable at any update.

    The order of an epoch is a function of (seed, epoch). Each update consumes the next samples of this order, by
    default one batch per rank; see `divide_updates`. An update is cut into micro-batches, and each rank gets a range of
    them. If the last update of an epoch has fewer micro-batches than ranks, the remaining ranks repeat the first one.

    Args:
        inputs: all samples, of shape (n, ...).
        targets: targets of all samples, of shape (n, ...).
        rows: numbers of the samples to train on, int64 of shape (m,).
        batch_size: samples of a micro-batch.
        seed: seed of the shuffling.
        transform: function that computes the network's inputs of a batch on `device`.
        device: device of the batches; by default the device of `inputs`.
        shuffle: whether to shuffle; False keeps the order of `rows` in every epoch.
        weights: relative probability of each of the `rows`, of shape (m,), on the CPU. An epoch then samples m times
            with replacement (`weighted_order`), and `transform` gets the numbers of `number_draws`.

    Raises:
        UserError: the training set is empty.

    Example:
        >>> loader = TrainLoader(torch.arange(10.0), torch.arange(10), torch.arange(10), batch_size=4, seed=1)
        >>> [len(inputs) for inputs, targets in loader]
        [4, 4, 2]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        rows: Tensor,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        shuffle: bool = True,
        weights: Tensor | None = None,
    ) -> None:
        rows = rows.to(inputs.device)
        super().__init__(rows, batch_size, seed, rank, world_size, shuffle, targets, inputs, weights=weights)
        self._set_tensors(inputs, targets, transform, device)


class EvaluationLoader(EvaluationSampling, _Tensors):
    """Loader of every sample exactly once, in batches that do not depend on the number of ranks.

    Args:
        inputs: all samples, of shape (n, ...).
        targets: targets of all samples, of shape (n, ...).
        rows: numbers of the samples to evaluate, int64 of shape (m,).
        batch_size: samples in one forward pass.
        transform: function that computes the network's inputs of a batch on `device`; its epoch is 0.
        device: device of the batches; by default the device of `inputs`.

    Example:
        >>> samples = torch.arange(5)
        >>> loaders = [EvaluationLoader(samples, samples, samples, 2, rank=rank, world_size=2) for rank in (0, 1)]
        >>> [[targets.tolist() for _, targets in loader] for loader in loaders]
        [[[0, 1], [4]], [[2, 3]]]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        rows: Tensor,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(rows.to(inputs.device), batch_size, rank, world_size)
        self._set_tensors(inputs, targets, transform, device)


def sample_numbers(loader: Any) -> Tensor | None:
    """Return the numbers of the samples that an evaluation loader yields on this rank, int64, in order.

    The numbers of all batches are returned, even if the evaluation stops early. They are known for the loaders of this
    package, and for a `DataLoader` that reads its data set in order. For other loaders the result is None.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sample_numbers(DataLoader(range(3))), sample_numbers(DataLoader(range(3), shuffle=True))
        (tensor([0, 1, 2]), None)
    """
    if isinstance(loader, NumberedEvaluation):
        return loader.sample_numbers()
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    # Any other sampler may yield another order the second time.
    is_sequential = type(getattr(batch_sampler, "sampler", None)) is SequentialSampler
    if not is_sequential and type(batch_sampler) is not list:
        return None
    return torch.tensor([number for batch in batch_sampler for number in batch], dtype=torch.int64)
