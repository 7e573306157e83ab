"""Loaders over samples that have to be read and augmented: worker processes make whole batches.

The shuffle orders and the state are those of the loaders over tensors, so batches do not depend on the number of
workers or on how far they prefetch.
"""

import logging
import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationSampling, TrainSampling
from datamodules.loading.resumable import Spans

__all__ = ["BatchRequest", "LoadedBatch", "SampleReader", "WorkerEvaluationLoader", "WorkerTrainLoader"]

log = logging.getLogger("lightning_recipes")


class BatchRequest(NamedTuple):
    """A batch to load."""

    epoch: int
    rows: Sequence[int]
    partners: Sequence[int] = ()
    """For each row the sample before it in the epoch's order, where the reader mixes samples."""


class LoadedBatch(NamedTuple):
    """A batch, without those of its samples that cannot be read."""

    inputs: Tensor
    targets: Tensor
    rows: Tensor
    unreadable: Sequence[tuple[int, str]]
    """Sample numbers, and the message about each."""


class SampleReader(Protocol):
    """Makes batches; it is copied into the workers."""

    targets: Tensor
    """Of all samples, of shape (n,)."""
    mixes: bool
    """Whether a sample needs a partner."""

    def prepare(self) -> None:
        """Called in the main process before each epoch, and before workers start."""

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        """Make a batch, as a function of the request alone."""


class _Requests:
    """The batches that workers make next: a sampler of a DataLoader that is refilled for each epoch."""

    def __init__(self) -> None:
        self.pending: list[BatchRequest] = []

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.pending)


def _start_worker(number: int) -> None:
    """Leave signals to the training process: Ctrl-C reaches the whole group, and a scheduler's signals may too."""
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _identity(batch: Any) -> Any:
    return batch


class _Workers:
    """Batches from a reader in this process or in others, or from features that were computed before."""

    def _set_reader(self, reader: SampleReader, num_workers: int, pin_memory: bool, skip_unreadable: bool) -> None:
        self.reader, self.num_workers = reader, num_workers
        self.pin_memory, self.skip_unreadable = pin_memory, skip_unreadable
        self._requests = _Requests()
        self._loader: DataLoader[LoadedBatch] | None = None
        self._skipped: set[int] = set()
        self._features: tuple[Tensor, Tensor] | None = None

    @property
    def skipped(self) -> int:
        """Samples that were left out so far because they cannot be read, each counted once."""
        return len(self._skipped)

    def use_features(self, features: Tensor | None, numbers: Tensor | None) -> None:
        """From the next epoch on, batches are ``(features of its samples, targets)``, and no sample is read.

        Args:
            features: of shape (m, ...), on the device where batches are wanted; None goes back to reading.
            numbers: the samples that they belong to, int64 of shape (m,); others are left out of their batches.
        """
        if features is None or numbers is None:
            self._features = None
            return
        position = torch.full((len(self.reader.targets),), -1, device=features.device)
        position[numbers.to(features.device)] = torch.arange(len(features), device=features.device)
        self._features = (features, position)

    def close(self) -> None:
        """End the workers; iterating again starts others."""
        loader, self._loader = self._loader, None
        # torch has no public way to end them, and Lightning calls the same; a reference to the iterator, as in the
        # traceback of an error, would keep them alive.
        if loader is not None and loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None}

    def _batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        if self._features is not None:
            self.close()
            yield from self._feature_batches(*self._features, order, spans)
            return
        for batch in self._load_batches(epoch, order, spans):
            yield batch.inputs, batch.targets

    def _feature_batches(
        self, features: Tensor, position: Tensor, order: Tensor, spans: Spans
    ) -> Iterator[tuple[Tensor, Tensor]]:
        order, targets = order.to(features.device), self.reader.targets.to(features.device)
        at, targets = position.index_select(0, order), targets.index_select(0, order)
        complete = bool((at >= 0).all())
        for start, stop in spans:
            here, classes = at[start:stop], targets[start:stop]
            if not complete:
                known = here >= 0
                here, classes = here[known], classes[known]
            yield features.index_select(0, here), classes

    def _load_batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[LoadedBatch]:
        self.reader.prepare()
        before = order.roll(1) if self.reader.mixes else order[:0]
        requests = [BatchRequest(epoch, order[a:b].tolist(), before[a:b].tolist()) for a, b in spans]
        for batch in self._in_workers(requests) if self.num_workers else map(self.reader.__getitem__, requests):
            for row, message in batch.unreadable:
                self._handle_unreadable(row, message, len(order))
            yield batch

    def _in_workers(self, requests: list[BatchRequest]) -> Iterator[LoadedBatch]:
        self._requests.pending = requests
        if self._loader is None:
            self._loader = DataLoader(
                # Of a data set the loader only asks for its items.
                cast("Dataset[LoadedBatch]", self.reader),
                batch_size=None,
                sampler=self._requests,
                num_workers=self.num_workers,
                collate_fn=_identity,
                pin_memory=self.pin_memory,
                worker_init_fn=_start_worker,
                # Its own: each iterator draws a number, by default from the generator that dropout uses.
                generator=torch.Generator(),
                # Processes that are forked again in every epoch may hang, and cost a second.
                persistent_workers=True,
            )
        yield from self._loader

    def _handle_unreadable(self, row: int, message: str, count: int) -> None:
        if not self.skip_unreadable:
            self.close()
            raise UserError(f"{message}; replace or remove the file, or pass on_corrupt='skip' to leave such files out")
        if row in self._skipped:
            return
        self._skipped.add(row)
        # Logged by the rank that finds it, also where other ranks are silenced.
        log.warning("warning: %s; it is left out", message, extra={"any_rank": True})
        if len(self._skipped) == count:
            self.close()
            raise UserError(f"none of the {count:,} images can be read; {message}")


class WorkerTrainLoader(_Workers, TrainSampling):
    """`TrainLoader` over samples that are made by workers: same shuffle orders, same state.

    Args:
        reader: makes batches; each has to be a function of the request alone.
        rows: int64, the numbers of the samples to train on.
        batch_size: samples on one rank in one forward pass.
        seed: seed of the shuffling.
        num_workers: worker processes; 0 makes each batch in this process.
        pin_memory: put batches into pinned memory, from which a GPU copies faster.
        skip_unreadable: leave samples that cannot be read out of their batches, in place of an error.
        drop_last: drop an incomplete last step.
        shuffle: False keeps the order of `rows` in every epoch.

    Raises:
        UserError: the set is empty, a batch is larger than the set, or a sample cannot be read.
    """

    def __init__(
        self,
        reader: SampleReader,
        rows: Tensor,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        skip_unreadable: bool = False,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        super().__init__(rows, batch_size, seed, rank, world_size, drop_last, shuffle)
        self._set_reader(reader, min(num_workers, len(self)), pin_memory, skip_unreadable)


class WorkerEvaluationLoader(_Workers, EvaluationSampling):
    """`EvaluationLoader` over samples that are made by workers; arguments as in `WorkerTrainLoader`."""

    def __init__(
        self,
        reader: SampleReader,
        rows: Tensor,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        skip_unreadable: bool = False,
    ) -> None:
        super().__init__(rows, batch_size, rank, world_size)
        self._set_reader(reader, min(num_workers, len(self)), pin_memory, skip_unreadable)

    def loaded_batches(self) -> Iterator[LoadedBatch]:
        """Its batches with their sample numbers, read again, whether there are features or not."""
        yield from self._load_batches(0, self.rows, self._spans())
