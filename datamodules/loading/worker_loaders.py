"""Loaders whose samples are read by worker processes, with the orders and state of the loaders over tensors."""

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

from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.loading.loaders import EvaluationSampling, Requests, Spans, TrainSampling, Transform

log = logging.getLogger("lightning_recipes")


class BatchRequest(NamedTuple):
    """Request of one batch."""

    epoch: int
    rows: Sequence[int]
    """Sample numbers, or numbers of `number_draws`, which are sample numbers modulo the number of targets."""


Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Function from (inputs, targets, partners' inputs, partners' targets, sample numbers, epoch) to inputs and targets.

The partner of a sample is its predecessor in the epoch's order, which may be in another batch or on another rank.
"""


class LoadedBatch(NamedTuple):
    """Batch of the readable samples."""

    inputs: Tensor
    targets: Tensor
    rows: Tensor
    """Numbers of the readable samples, in the order of the request."""
    unreadable: Sequence[tuple[int, UserError]]
    """Number and error of each unreadable sample."""


class SampleReader(Protocol):
    """Interface of the object that reads batches. Each worker has a copy."""

    targets: Tensor
    """Targets of all samples, of shape (n,)."""

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        """Read a batch, which must depend on the request only."""


class _Packed:
    """Batch received from a worker, still pickled. The pickle refers to tensors in shared memory."""

    def __init__(self, pickle: bytes) -> None:
        self._pickle = pickle

    def unpack(self) -> LoadedBatch:
        pickle = self._pickle
        self._pickle = b""
        batch: LoadedBatch = ForkingPickler.loads(pickle)
        return batch

    def __del__(self) -> None:
        # The worker keeps the shared memory of a batch until it is unpacked. An interrupted epoch leaves such batches.
        if self._pickle:
            with suppress(Exception):
                self.unpack()

    def pin_memory(self, device: Any = None) -> LoadedBatch:
        """Return the batch in pinned memory. The pinning thread of `DataLoader` calls this method."""
        batch = self.unpack()
        return batch._replace(**{name: getattr(batch, name).pin_memory() for name in ("inputs", "targets", "rows")})


class _Sent(NamedTuple):
    """Pickled batch in the worker; the training process receives it as `_Packed`."""

    pickle: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _Packed, (self.pickle,)


def _pack(batch: Any) -> _Sent:
    """Pickle a batch in a worker, which moves the tensors to shared memory."""
    # The queue of `DataLoader` would pickle in a thread, which would lose the error of a full shared memory.
    return _Sent(bytes(ForkingPickler.dumps(batch)))


def _start_worker(worker: int) -> None:
    """Make a worker ignore signals, which the training process handles, and print no errors."""
    # A thread of the worker would print an error when an interrupted training process closes the connection.
    sys.excepthook = lambda *_: None
    # Ctrl-C and signals of a scheduler are sent to the whole process group.
    for signal_number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)


class _Workers:
    """Mixin that yields batches from a reader, in this process or in workers, or from precomputed features."""

    warn_unreadable = True
    """Whether to log each unreadable sample. `unreadable` holds the errors by sample number."""

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
                f"mixtures need every image and its neighbor: pass {spelled('mixup', 0)} and {spelled('cutmix', 0)}"
                f" with {spelled('on_corrupt', 'skip')}, or {spelled('on_corrupt', 'error')}"
            )
        self.reader = reader
        self.num_workers = min(num_workers, batches)
        self.pin_memory, self.skip_unreadable = pin_memory, skip_unreadable
        self.transform, self.device, self.mix = transform, device, mix
        self.unreadable: dict[int, UserError] = {}
        self._requests: Requests[BatchRequest] = Requests()
        self._loader: DataLoader[LoadedBatch] | None = None
        self._features: tuple[Tensor, Tensor] | None = None

    def use_features(self, features: Tensor | None, numbers: Tensor | None) -> None:
        """Yield ``(features, targets)`` from the next epoch on, without reading samples.

        Args:
            features: features of shape (m, ...), on the device of the batches; None reads samples again.
            numbers: sample numbers of the features, int64 of shape (m,); other samples are left out.
        """
        self._features = None
        if features is None or numbers is None:
            return
        position = torch.full((len(self.reader.targets),), -1, device=features.device)
        position[numbers.to(features.device)] = torch.arange(len(features), device=features.device)
        self._features = (features, position)

    def close(self) -> None:
        """Shut the workers down. The next iteration starts new ones."""
        loader = self._loader
        self._loader = None
        # torch has no public way to end workers; Lightning calls the same method. Dropping the loader is not enough: a
        # reference to the iterator, as in a traceback, would keep the workers alive.
        if loader is not None and loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None}

    def _batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        if self._features is not None:
            self.close()
            yield from self._feature_batches(*self._features, order, spans)
            return
        requests = []
        for start, stop in spans:
            # Mixing needs the partner of the first sample. At position 0, index -1 is the epoch's last sample.
            partner = order[start - 1].view(1) if self.mix is not None else order[:0]
            requests.append(BatchRequest(epoch, torch.cat((partner, order[start:stop])).tolist()))
        for request, batch in zip(requests, self._load_batches(requests, len(order))):
            yield self._finish(batch, request)

    def _finish(self, batch: LoadedBatch, request: BatchRequest) -> tuple[Tensor, Tensor]:
        """Transform and mix a batch on the device, and return inputs and targets."""
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
        order = order.to(features.device) % len(position)
        positions = position.index_select(0, order)
        targets = self.reader.targets.to(features.device).index_select(0, order)
        # Checked once per epoch: a mask in each batch would synchronize.
        is_complete = bool((positions >= 0).all())
        for start, stop in spans:
            rows = positions[start:stop]
            batch_targets = targets[start:stop]
            if not is_complete:
                batch_targets = batch_targets[rows >= 0]
                rows = rows[rows >= 0]
            yield features.index_select(0, rows), batch_targets

    def _load_batches(self, requests: list[BatchRequest], count: int) -> Iterator[LoadedBatch]:
        """Yield the reader's batches, and handle unreadable samples; the set has `count` samples."""
        for batch in self._in_workers(requests) if self.num_workers else map(self.reader.__getitem__, requests):
            for row, error in batch.unreadable:
                self._handle_unreadable(row, error, count)
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
        """Return an iterator over the batches, read by the workers of the last epoch or by new ones."""
        self._requests.pending = requests
        if self._loader is not None:
            return iter(self._loader)
        self._loader = DataLoader(
            # Without automatic batching a DataLoader only calls `__getitem__`.
            cast("Dataset[LoadedBatch]", self.reader),
            batch_size=None,
            sampler=self._requests,
            num_workers=self.num_workers,
            collate_fn=_pack,
            pin_memory=self.pin_memory,
            worker_init_fn=_start_worker,
            # Each new iterator draws a base seed, by default from the global generator, which dropout also uses.
            generator=torch.Generator(),
            # Forking again in every epoch costs a second, and forked processes may hang.
            persistent_workers=True,
        )
        batches: Any = iter(self._loader)
        # torch also raises the error of a dead worker in a signal handler, which may interrupt a collective call or the
        # write of a file. Unregistered, the error is raised where the batch is awaited.
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        return batches

    def _failure(self, error: Exception) -> Exception:
        """Return the exception to raise after an error of the workers, with the cause and the remedy."""
        if os.strerror(errno.ENOSPC) in str(error):
            return UserError(
                f"/dev/shm has no room for the batches of {self.num_workers} workers; pass {spelled('num_workers', 0)},"
                " or start the container with more of it, as docker run --shm-size=1g does"
            )
        batches: Any = self._loader._iterator if self._loader is not None else None
        processes = batches._workers if batches is not None else []
        dead = [worker for worker, process in enumerate(processes) if not process.is_alive()]
        if not dead:
            # A live worker closes the connection when it runs out of file descriptors for its tensors.
            return OSError(errno.EMFILE, os.strerror(errno.EMFILE)) if isinstance(error, EOFError) else error
        code = processes[dead[0]].exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return RunFailedError(
            f"worker {dead[0]} (process {processes[dead[0]].pid}) {how}; the system may have run out of memory: pass"
            f" fewer {spelled('num_workers')}, or {spelled('num_workers', 0)} to see where"
        )

    def _kill(self) -> None:
        """Kill the workers, which may hang, and shut the loader down."""
        batches: Any = self._loader._iterator if self._loader is not None else None
        for process in batches._workers if batches is not None else ():
            process.kill()
        self.close()

    def _handle_unreadable(self, row: int, error: UserError, count: int) -> None:
        if not self.skip_unreadable:
            self.close()
            raise UserError(
                f"{error}; replace or remove the file, or pass {spelled('on_corrupt', 'skip')} to leave such files out"
            )
        if row in self.unreadable:
            return
        self.unreadable[row] = error
        if self.warn_unreadable:
            # Logged on this rank, because no other rank reads the sample.
            log.warning("warning: %s; it is left out", error, extra={"any_rank": True})
        if len(self.unreadable) == count:
            self.close()
            raise UserError(f"none of the {count:,} images can be read; {error}")


class WorkerTrainLoader(_Workers, TrainSampling):
    """Loader like `TrainLoader`, with the same orders and state, over samples that worker processes read.

    Args:
        reader: reader of batches. A batch must depend on the request only.
        rows: numbers of the samples to train on, int64 of shape (m,).
        batch_size: samples of a micro-batch.
        seed: seed of the shuffling.
        num_workers: number of worker processes; 0 reads batches in this process.
        pin_memory: whether to put batches into pinned memory, for faster copies to a GPU.
        skip_unreadable: whether to leave out unreadable samples instead of raising an error.
        shuffle: whether to shuffle; False keeps the order of `rows` in every epoch.
        transform: function that computes the network's inputs of a batch on `device`.
        device: device of the batches; by default the device of the reader's batches.
        mix: function that mixes each sample with its predecessor in the epoch's order, after the transform.
        names: names of all samples, such as files. A checkpoint resumes with the same names only.
        weights: relative probability of each of the `rows`, for sampling with replacement, see `TrainLoader`.

    Raises:
        UserError: the set is empty, a sample is unreadable, or shared memory has no room for a batch.
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
        weights: Tensor | None = None,
        **how: Any,
    ) -> None:
        super().__init__(rows, batch_size, seed, rank, world_size, shuffle, reader.targets, None, names, weights)
        self._set_reader(reader, len(self), **how)


class WorkerEvaluationLoader(_Workers, EvaluationSampling):
    """Loader like `EvaluationLoader` over samples that workers read. For the arguments see `WorkerTrainLoader`."""

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
        """Yield the batches with their sample numbers. Samples are read even if `use_features` has set features."""
        requests = [BatchRequest(0, self.rows[a:b].tolist()) for a, b in self._spans()]
        yield from self._load_batches(requests, len(self.rows))

    @override
    def sample_numbers(self) -> Tensor:
        """Return the numbers of this rank's readable samples."""
        numbers = super().sample_numbers()
        return numbers[~torch.isin(numbers, torch.tensor([*self.unreadable], dtype=torch.int64))]
