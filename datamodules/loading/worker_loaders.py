"""Loaders over samples that are read by worker processes, with the orders and the state of those over tensors."""

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from typing_extensions import override

from datamodules.errors import RunFailedError, UserError
from datamodules.loading.loaders import EvaluationSampling, TrainSampling, Transform
from datamodules.loading.requests import Requests
from datamodules.loading.resumable import Spans

log = logging.getLogger("lightning_recipes")


class BatchRequest(NamedTuple):
    """A batch to load."""

    epoch: int
    rows: Sequence[int]
    """Sample numbers."""


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


class _Packed:
    """A batch that came from a worker: its pickle, which names tensors in shared memory."""

    def __init__(self, pickle: bytes) -> None:
        self._pickle = pickle

    def unpack(self) -> LoadedBatch:
        pickle, self._pickle = self._pickle, b""
        batch: LoadedBatch = ForkingPickler.loads(pickle)
        return batch

    def __del__(self) -> None:
        # The worker keeps the memory of a batch until it is unpacked, also of one that an epoch cut short leaves.
        if self._pickle:
            with suppress(Exception):
                self.unpack()

    def pin_memory(self, device: Any = None) -> LoadedBatch:
        """Called by the DataLoader's thread."""
        batch = self.unpack()
        return batch._replace(**{name: getattr(batch, name).pin_memory() for name in ("inputs", "targets", "rows")})


class _Sent(NamedTuple):
    """A `_Packed` batch in its worker."""

    pickle: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _Packed, (self.pickle,)


def _pack(batch: Any) -> _Sent:
    """Pickle a batch in a worker, which puts its tensors into shared memory."""
    # A DataLoader's queue would do so in a thread, where the error of a full shared memory is lost with the batch.
    return _Sent(bytes(ForkingPickler.dumps(batch)))


def _start_worker(number: int) -> None:
    """Leave signals and errors to the training process: Ctrl-C reaches the whole group of processes."""
    # A worker's thread would print that an interrupted training process has broken off the connection.
    sys.excepthook = lambda *_: None
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class _Workers:
    """Batches from a reader in this process or in others, or from features that were computed before."""

    warn_unreadable = True
    """Whether to log each sample that cannot be read; `unreadable` holds them, by number, with the message."""

    def _set_reader(
        self,
        reader: SampleReader,
        batches: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        skip_unreadable: bool = False,
        transform: Transform | None = None,
        device: torch.device | None = None,
        mix: Mix | None = None,
    ) -> None:
        if mix is not None and skip_unreadable:
            raise UserError(
                "mixtures need every image and its neighbour: pass mixup=0 and cutmix=0 with on_corrupt='skip', or"
                " on_corrupt='error'"
            )
        self.reader, self.num_workers = reader, min(num_workers, batches)
        self.pin_memory, self.skip_unreadable = pin_memory, skip_unreadable
        self.transform, self.device, self.mix = transform, device, mix
        self._requests: Requests[BatchRequest] = Requests()
        self._loader: DataLoader[LoadedBatch] | None = None
        self.unreadable: dict[int, str] = {}
        self._features: tuple[Tensor, Tensor] | None = None

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
        return self.mix(inputs[1:], targets[1:], inputs[:-1], targets[:-1], numbers[1:], request.epoch)

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

    def _load_batches(self, requests: list[BatchRequest], count: int) -> Iterator[LoadedBatch]:
        """Batches as the reader makes them, of a set of `count` samples."""
        for batch in self._in_workers(requests) if self.num_workers else map(self.reader.__getitem__, requests):
            for row, message in batch.unreadable:
                self._handle_unreadable(row, message, count)
            yield batch

    def _in_workers(self, requests: list[BatchRequest]) -> Iterator[LoadedBatch]:
        batches: Any = None
        for _ in requests:
            try:
                batches = self._start(requests) if batches is None else batches
                batch: LoadedBatch | _Packed = next(batches)
                received = batch.unpack() if isinstance(batch, _Packed) else batch
            except (EOFError, OSError, RuntimeError) as error:
                failure = self._failure(error)
                self._kill()
                if failure is error:
                    raise
                raise failure from error
            yield received

    def _start(self, requests: list[BatchRequest]) -> Any:
        """Have workers load these batches: those of the epoch before, or new ones."""
        self._requests.pending = requests
        if self._loader is not None:
            return iter(self._loader)
        self._loader = DataLoader(
            # Of a data set the loader only asks for its items.
            cast("Dataset[LoadedBatch]", self.reader),
            batch_size=None,
            sampler=self._requests,
            num_workers=self.num_workers,
            collate_fn=_pack,
            pin_memory=self.pin_memory,
            worker_init_fn=_start_worker,
            # Its own: each iterator draws a number, by default from the generator that dropout uses.
            generator=torch.Generator(),
            # Processes that are forked again in every epoch may hang, and cost a second.
            persistent_workers=True,
        )
        batches: Any = iter(self._loader)
        # torch also raises the death of a worker in a signal's handler, in the midst of whatever the process does: of a
        # collective call, or of writing a file. It is to be raised where its batch is awaited.
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        return batches

    def _failure(self, error: Exception) -> Exception:
        """What to raise where a batch did not come from the workers."""
        if os.strerror(errno.ENOSPC) in str(error):
            return UserError(
                f"/dev/shm has no room for the batches of {self.num_workers} workers; pass num_workers=0, or start the"
                " container with more of it, as docker run --shm-size=1g does"
            )
        batches: Any = self._loader._iterator if self._loader is not None else None
        processes = batches._workers if batches is not None else []
        dead = [worker for worker, process in enumerate(processes) if not process.is_alive()]
        if not dead:
            # A worker that lives and has no file descriptor left for its tensors closes the connection.
            return OSError(errno.EMFILE, os.strerror(errno.EMFILE)) if isinstance(error, EOFError) else error
        code = processes[dead[0]].exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return RunFailedError(
            f"worker {dead[0]} (process {processes[dead[0]].pid}) {how}; the system may have run out of memory: pass"
            " fewer `num_workers`, or num_workers=0 to see where"
        )

    def _kill(self) -> None:
        """End workers that may not answer."""
        batches: Any = self._loader._iterator if self._loader is not None else None
        for process in batches._workers if batches is not None else ():
            process.kill()
        self.close()

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
        batch_size: samples of a micro-batch.
        seed: seed of the shuffling.
        num_workers: worker processes; 0 makes each batch in this process.
        pin_memory: put batches into pinned memory, from which a GPU copies faster.
        skip_unreadable: leave samples that cannot be read out of their batches, in place of an error.
        shuffle: False keeps the order of `rows` in every epoch.
        transform: makes the network's inputs of a batch, on `device`.
        device: where batches go; by default where the reader makes them.
        mix: mixes each sample with the one before it in the epoch's order, behind the transform.
        names: of all samples, such as files: a run is not resumed with others.

    Raises:
        UserError: the set is empty, a sample cannot be read, or shared memory has no room for a batch.
        RunFailedError: a worker died.
    """

    def __init__(
        self,
        reader: SampleReader,
        rows: Tensor,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        names: Iterable[str] = (),
        **how: Any,
    ) -> None:
        super().__init__(rows, batch_size, seed, rank, world_size, shuffle, reader.targets, names=names)
        self._set_reader(reader, len(self), **how)


class WorkerEvaluationLoader(_Workers, EvaluationSampling):
    """`EvaluationLoader` over samples that are made by workers; arguments as in `WorkerTrainLoader`."""

    def __init__(
        self,
        reader: SampleReader,
        rows: Tensor,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        **how: Any,
    ) -> None:
        super().__init__(rows, batch_size, rank, world_size)
        self._set_reader(reader, len(self), **how)

    def loaded_batches(self) -> Iterator[LoadedBatch]:
        """Its batches with their sample numbers, read again, whether there are features or not."""
        requests = [BatchRequest(0, self.rows[a:b].tolist()) for a, b in self._spans()]
        yield from self._load_batches(requests, len(self.rows))

    @override
    def sample_numbers(self) -> Tensor:
        """As of `EvaluationLoader`, without the samples that were found to be unreadable."""
        numbers = super().sample_numbers()
        return numbers[~torch.isin(numbers, torch.tensor([*self.unreadable], dtype=torch.int64))]
