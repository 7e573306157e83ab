"""Loaders over samples that have to be read and augmented: worker processes make whole batches.

The shuffle orders and the state are those of the loaders over tensors, so batches do not depend on the number of
workers or on how far they prefetch.
"""

import errno
import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from datamodules.errors import RunFailedError, UserError, system_failure
from datamodules.loading.loaders import EvaluationSampling, TrainSampling, Transform
from datamodules.loading.resumable import Spans
from datamodules.loading.worker_failures import (
    cannot_start,
    check_workers_here_only,
    describe_failure,
    describe_worker,
    end_half_started,
    free_shared_memory,
    listed,
    no_room,
    too_many_workers,
)

__all__ = ["BatchRequest", "LoadedBatch", "Mix", "SampleReader", "WorkerEvaluationLoader", "WorkerTrainLoader"]

log = logging.getLogger("lightning_recipes")


_AHEAD = 2
"""Batches that each worker loads ahead; torch's default."""
_POLL = 5.0
"""Seconds between two looks at whether the workers live."""
_WARN_AFTER = 60.0


class BatchRequest(NamedTuple):
    """A batch to load."""

    epoch: int
    rows: Sequence[int]
    """Sample numbers, which are larger by the number of all samples at each repeat within an epoch."""


Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""What turns (inputs, targets, those of each sample's partner, sample numbers, epoch) into inputs and targets.

The partner of a sample is the one before it in the epoch's order, whichever batch or rank that is in.
"""


class LoadedBatch(NamedTuple):
    """A batch, without those of its samples that cannot be read."""

    inputs: Tensor
    targets: Tensor
    rows: Tensor
    """The numbers of its samples, as they were requested."""
    unreadable: Sequence[tuple[int, str]]
    """Which samples, and the message about each."""


class SampleReader(Protocol):
    """Makes batches; it is copied into the workers."""

    targets: Tensor
    """Of all samples, of shape (n,)."""

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        """Make a batch, as a function of the request alone."""


class _Requests:
    """The batches that workers make next: a sampler of a DataLoader that is refilled for each epoch."""

    def __init__(self) -> None:
        self.pending: list[BatchRequest] = []

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.pending)


class _Packed(NamedTuple):
    """A batch on its way from a worker: its pickle, which names tensors in shared memory."""

    pickle: bytes

    def unpack(self) -> LoadedBatch:
        batch: LoadedBatch = ForkingPickler.loads(self.pickle)
        return batch

    def pin_memory(self, device: Any = None) -> LoadedBatch:
        """Called by the DataLoader's thread."""
        batch = self.unpack()
        return batch._replace(**{name: getattr(batch, name).pin_memory() for name in ("inputs", "targets", "rows")})


class _NotSent(NamedTuple):
    """What a worker sends in place of a batch that it cannot send."""

    reason: str
    size: int
    """Bytes of the batch."""


def _size(batch: LoadedBatch) -> int:
    return sum(tensor.nbytes for tensor in (batch.inputs, batch.targets, batch.rows))


def _pack(batch: Any) -> _Packed | _NotSent:
    """Pickle a batch in a worker, which puts its tensors into shared memory.

    A DataLoader's queue would do so in a thread, where an error is printed, the batch is lost, and the training waits
    for it for ever.
    """
    try:
        return _Packed(bytes(ForkingPickler.dumps(batch)))
    except (OSError, RuntimeError) as error:
        return _NotSent(str(error), _size(batch))


def _start_worker(number: int) -> None:
    """Leave signals to the training process: Ctrl-C reaches the whole group, and a scheduler's signals may too."""
    start = threading.Thread.start

    def start_or_end(thread: threading.Thread) -> None:
        try:
            start(thread)
        except RuntimeError:  # A limit of the system. The queue that would report it needs a thread.
            os._exit(errno.EAGAIN)

    threading.Thread.start = start_or_end  # type: ignore[assignment, method-assign]
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


class _Workers:
    """Batches from a reader in this process or in others, or from features that were computed before."""

    timeout = 1800.0
    """Seconds to wait for a batch; after a minute a warning names the worker."""
    warn_unreadable = True
    """Whether to log each sample that cannot be read; `unreadable` holds them, by number, with the message."""

    def _set_reader(
        self,
        reader: SampleReader,
        num_workers: int,
        pin_memory: bool,
        skip_unreadable: bool,
        transform: Transform | None,
        device: torch.device | None,
        mix: Mix | None = None,
    ) -> None:
        self.reader, self.num_workers = reader, num_workers
        self.pin_memory, self.skip_unreadable = pin_memory, skip_unreadable
        self.transform, self.device, self.mix = transform, device, mix
        self._requests = _Requests()
        self._loader: DataLoader[LoadedBatch] | None = None
        self.unreadable: dict[int, str] = {}
        self._features: tuple[Tensor, Tensor] | None = None
        self._received = False

    @property
    def skipped(self) -> int:
        """Samples that were left out so far because they cannot be read, each counted once."""
        return len(self.unreadable)

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
        # One sample more for a mixture; the last one comes before the first.
        ahead = [order[a - 1 :][: self.mix is not None] for a, _ in spans]
        requests = [BatchRequest(epoch, torch.cat((lead, order[a:b])).tolist()) for lead, (a, b) in zip(ahead, spans)]
        for request, batch in zip(requests, self._load_batches(requests, len(order))):
            yield self._finish(batch, request)

    def _finish(self, batch: LoadedBatch, request: BatchRequest) -> tuple[Tensor, Tensor]:
        """Transform and mix a batch on the device."""
        tensors = (batch.inputs, batch.targets, batch.rows)
        if self.device is not None:
            tensors = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)  # type: ignore[assignment]
        inputs, targets, numbers = tensors
        if self.transform is not None:
            inputs = self.transform(inputs, numbers, request.epoch)
        if self.mix is None:
            return inputs, targets
        if not batch.unreadable:
            return self.mix(inputs[1:], targets[1:], inputs[:-1], targets[:-1], numbers[1:], request.epoch)
        # A sample whose partner cannot be read is mixed with itself, which leaves it as it is.
        bad, count = {row for row, _ in batch.unreadable}, len(self.reader.targets)
        good = [row % count not in bad for row in request.rows]
        places = list(itertools.accumulate(good, initial=0))
        own = [i for i in range(1, len(good)) if good[i]]
        mine, others = (
            torch.tensor([places[i] for i in rows], dtype=torch.int64, device=inputs.device)
            for rows in (own, [i - good[i - 1] for i in own])
        )
        return self.mix(inputs[mine], targets[mine], inputs[others], targets[others], numbers[mine], request.epoch)

    def _feature_batches(
        self, features: Tensor, position: Tensor, order: Tensor, spans: Spans
    ) -> Iterator[tuple[Tensor, Tensor]]:
        order, targets = order.to(features.device) % len(self.reader.targets), self.reader.targets.to(features.device)
        at, targets = position.index_select(0, order), targets.index_select(0, order)
        complete = bool((at >= 0).all())
        for start, stop in spans:
            here, classes = at[start:stop], targets[start:stop]
            if not complete:
                known = here >= 0
                here, classes = here[known], classes[known]
            yield features.index_select(0, here), classes

    def _load_batches(self, requests: list[BatchRequest], count: int) -> Iterator[LoadedBatch]:
        """Batches as the reader makes them, of a set of `count` samples."""
        for batch in self._in_workers(requests) if self.num_workers else map(self.reader.__getitem__, requests):
            for row, message in batch.unreadable:
                self._handle_unreadable(row, message, count)
            yield batch

    def _in_workers(self, requests: list[BatchRequest]) -> Iterator[LoadedBatch]:
        free = free_shared_memory() if self._loader is None else math.inf
        batches = self._start(requests)
        for number, request in enumerate(requests):
            batch = self._receive(batches, number, request)
            if number == 0:
                self._check_room(_size(batch), len(requests), free)
            yield batch

    def _start(self, requests: list[BatchRequest]) -> Any:
        """Have workers load these batches: those of the epoch before, or new ones."""
        self._requests.pending = requests
        if self._loader is not None:
            try:
                return iter(self._loader)
            except RuntimeError as error:
                log.warning("warning: %s; other workers take their place", str(error).splitlines()[0])
                self._kill()
        self._loader = DataLoader(
            # Of a data set the loader only asks for its items.
            cast("Dataset[LoadedBatch]", self.reader),
            batch_size=None,
            sampler=self._requests,
            num_workers=self.num_workers,
            collate_fn=_pack,
            pin_memory=self.pin_memory,
            timeout=_POLL,
            worker_init_fn=_start_worker,
            # Its own: each iterator draws a number, by default from the generator that dropout uses.
            generator=torch.Generator(),
            # Processes that are forked again in every epoch may hang, and cost a second.
            persistent_workers=True,
            prefetch_factor=_AHEAD,
        )
        try:
            batches = iter(self._loader)
        except (OSError, RuntimeError) as error:
            end_half_started(error)
            raise UserError(cannot_start(self.num_workers, error)) from error
        check_workers_here_only(batches)
        return batches

    def _receive(self, batches: Any, number: int, request: BatchRequest) -> LoadedBatch:
        """The next batch, number `number` of this epoch."""
        worker, began, warned = number % self.num_workers, time.monotonic(), False
        what = f"batch {number + 1} (samples {listed(request.rows)})"
        while True:
            try:
                batch: LoadedBatch | _Packed | _NotSent = next(batches)
                break
            except RuntimeError as error:
                waited, text = time.monotonic() - began, str(error)
                if not text.startswith(("DataLoader timed out", "DataLoader worker")):
                    raise
                if "timed out" not in text or waited >= self.timeout:
                    raise self._failed(describe_failure(batches, worker, what, waited)) from error
            if waited >= _WARN_AFTER and not warned:
                who, warned = describe_worker(batches, worker), True
                log.warning("warning: %s has not loaded %s for %.0f s", who, what, waited, extra={"any_rank": True})
        try:
            received = batch.unpack() if isinstance(batch, _Packed) else batch
        except (EOFError, OSError, RuntimeError) as error:
            raise self._failed(system_failure(error) or describe_failure(batches, worker, what, 0.0)) from error
        if isinstance(received, _NotSent):
            raise self._failed(no_room(self.num_workers, received.size, received.reason))
        self._received = True
        return received

    def _failed(self, problem: str) -> UserError:
        """The error to raise, after the workers have ended."""
        self._kill()
        return RunFailedError(problem) if self._received else UserError(problem)

    def _kill(self) -> None:
        """End workers that may not answer."""
        batches: Any = self._loader._iterator if self._loader is not None else None
        for process in batches._workers if batches is not None else ():
            process.kill()
        self.close()

    def _check_room(self, size: int, batches: int, free: float) -> None:
        """Refuse workers that load more batches ahead than shared memory holds, before one of them fails to."""
        needed = size * min(batches, _AHEAD * self.num_workers)
        if needed > free:
            self._kill()
            enough_for = int(free // (_AHEAD * size))
            raise UserError(too_many_workers(self.num_workers, needed, free, enough_for))

    def _handle_unreadable(self, row: int, message: str, count: int) -> None:
        if not self.skip_unreadable:
            self.close()
            raise UserError(f"{message}; replace or remove the file, or pass on_corrupt='skip' to leave such files out")
        if row in self.unreadable:
            return
        self.unreadable[row] = message
        if self.warn_unreadable:
            # Logged by the rank that finds it, also where other ranks are silenced.
            log.warning("warning: %s; it is left out", message, extra={"any_rank": True})
        if len(self.unreadable) == count:
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
        shuffle: False keeps the order of `rows` in every epoch; with `weights` it repeats the first epoch.
        weights: as of `TrainLoader`.
        transform: makes the network's inputs of a batch, on `device`.
        device: where batches go; by default where the reader makes them.
        mix: mixes each sample with the one before it in the epoch's order, behind the transform.
        names: of all samples, such as files: a run is not resumed with others.

    Raises:
        UserError: the set is empty, a batch is larger than the set, a sample cannot be read, workers cannot start, or
            shared memory has no room for their batches.
        RunFailedError: a worker died, or did not load a batch within `timeout`; the message names it.
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
        weights: Tensor | None = None,
        transform: Transform | None = None,
        device: torch.device | None = None,
        mix: Mix | None = None,
        names: Iterable[str] = (),
    ) -> None:
        targets = reader.targets
        super().__init__(rows, batch_size, seed, rank, world_size, drop_last, shuffle, weights, targets, names=names)
        self._set_reader(reader, min(num_workers, len(self)), pin_memory, skip_unreadable, transform, device, mix)


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
        transform: Transform | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(rows, batch_size, rank, world_size)
        self._set_reader(reader, min(num_workers, len(self)), pin_memory, skip_unreadable, transform, device)

    def loaded_batches(self) -> Iterator[LoadedBatch]:
        """Its batches with their sample numbers, read again, whether there are features or not."""
        requests = [BatchRequest(0, self.rows[a:b].tolist()) for a, b in self._spans()]
        yield from self._load_batches(requests, len(self.rows))

    @override
    def sample_numbers(self) -> Tensor:
        """As of `EvaluationLoader`, without the samples that were found to be unreadable."""
        numbers = super().sample_numbers()
        return numbers[~torch.isin(numbers, torch.tensor([*self.unreadable], dtype=torch.int64))]
