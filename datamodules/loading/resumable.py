"""Base class of the training loaders, which saves the epoch and the position in it and resumes from there."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.data import SequentialSampler
from typing_extensions import override

from datamodules.errors import UserError, spelled
from datamodules.loading.sampling import Division
from datamodules.loading.updates import Update, UpdateLoader

Batch = TypeVar("Batch")

Spans = Sequence[tuple[int, int]]
"""Batches as ranges of positions ``[start, stop)`` in the order of an epoch."""


class InOrder(SequentialSampler):
    """Sampler of a loader that does not shuffle. Lightning checks its class for over-fitting and calls `set_epoch`."""

    def __init__(self, loader: "ResumableLoader[Any]") -> None:
        super().__init__(range(len(loader)))
        self.set_epoch = loader.set_epoch


_MOST = 1 << 26
"""Number of bytes of a tensor that its fingerprint reads at most."""


def fingerprint(tensors: Iterable[Tensor], names: Iterable[str] = ()) -> str:
    """Return a hash of tensors and of file names, 32 hexadecimal digits.

    Integer tensors count with their values, and of more than 64 MiB with every k-th row. Floating-point tensors count
    with their shape only, since another machine may have computed them with other rounding. Names count without their
    folders, so that a data set may be moved.
    """
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(f"{tuple(tensor.shape)}".encode())
        if not tensor.is_floating_point():
            step = max(1, -(-tensor.numel() * tensor.element_size() // _MOST))
            sha256.update(tensor[::step].cpu().contiguous().view(-1).numpy().data)
    for name in names:
        base_name = name.rpartition("/")[2]
        sha256.update(base_name.encode("utf-8", "surrogateescape") + b"\0")
    return sha256.hexdigest()[:32]


class ResumableLoader(UpdateLoader, Generic[Batch]):
    """Iterable over the updates of an epoch, the same on any number of ranks, resumable at each update.

    By default an update is one micro-batch on each rank, and the loader yields the micro-batch of its rank. After
    `divide_updates` it yields `Update` objects. ``len(loader)`` is the number of updates of an epoch. Subclasses read
    the batches.

    Args:
        items: number of items of an epoch: samples, or batches that were cut before.
        items_at_once: number of items of a micro-batch.
        source: the loader that this one wraps, if it wraps one.
    """

    def __init__(self, items: int, items_at_once: int, rank: int, world_size: int, source: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._items = items
        self._items_at_once = items_at_once
        self._epoch = 0
        # Items of the epoch that all ranks have consumed: the position that a checkpoint saves.
        self._consumed = 0
        # Items of the epoch that the next iteration skips: the position that a checkpoint has restored.
        self._start_at = 0
        self.source: Any = self if source is None else source
        self.keeps_order = False
        """Whether each epoch has the samples in the order of the data set, as for over-fitting."""
        self.divide_updates(None)

    def items_of(self, micro_batches: int) -> int:
        """Return the items of an update of `micro_batches` micro-batches, on all ranks together."""
        return self._items_at_once * micro_batches

    def items_of_samples(self, samples: int) -> int:
        """Return the items of an update of `samples` samples, on all ranks together.

        Raises:
            UserError: batches are limited by tokens, so that their number of samples varies.
        """
        return samples

    def divide_updates(self, items: int | None) -> None:
        """Set the size of an update, from the next iteration on. The loader then yields `Update` objects.

        Args:
            items: items of an update on all ranks together; its last micro-batch may be short. None restores the
                default: one micro-batch on each rank, which the loader yields itself.

        Raises:
            UserError: there are more ranks than micro-batches in an update.
        """
        self.gives_updates = items is not None
        """Whether the loader yields `Update` objects."""
        if items is None:
            items = self.items_of(self.world_size)
        self.division = Division(self._items, self._items_at_once, items, self.world_size)
        if self.division.micro_batches < self.world_size:
            raise UserError(
                f"an update has {self.division.micro_batches} micro-batches of {self._items_at_once}, found"
                f" {self.world_size} devices: pass fewer devices, or a {spelled('batch_size')} of"
                f" {max(1, items // self.world_size)} or less"
            )

    division: Division
    batch_size: int

    @property
    @override
    def has_several(self) -> bool:
        return self.division.micro_batches > self.world_size

    @property
    @override
    def samples_per_update(self) -> int:
        """Samples of an update on all ranks together; their mean number if batches are limited by tokens."""
        return self.division.update_size

    @property
    @override
    def has_position(self) -> bool:
        return True

    def _samples_of(self, epoch: int, start: int, stop: int) -> int:
        """Return the number of samples of a micro-batch, which are its items."""
        return stop - start

    @abstractmethod
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[Batch]:
        """Yield this rank's batch at each span of an epoch, whose first update begins at position `start_at`."""

    @abstractmethod
    def _describe_data(self) -> tuple[int, str]:
        """Return the number of training samples and their `fingerprint`."""

    @cached_property
    def data(self) -> dict[str, Any]:
        """Identity of the training data: the number of samples and a hash."""
        samples, data_fingerprint = self._describe_data()
        return {"samples": samples, "fingerprint": data_fingerprint}

    @property
    def sampler(self) -> Any:
        """Object whose ``set_epoch`` Lightning calls: the loader, or a sequential sampler if it does not shuffle."""
        return InOrder(self) if self.keeps_order else self

    def __len__(self) -> int:
        return self.division.updates

    def __iter__(self) -> Iterator[Any]:
        """Yield an `Update`, or by default this rank's batch, for each remaining update of the epoch."""
        # A generator reads the epoch at the first item. Lightning makes the iterator before it calls `set_epoch`.
        epoch = self._epoch
        begin = self.updates_done
        # Kept for the whole epoch: `divide_updates` may be called within it.
        division = self.division
        self._start_at = 0
        shares = [division.share(update, self.rank) for update in range(begin, division.updates)]
        spans = [span for share in shares for span in share.spans]
        batches = self._batches_of_epoch(epoch, begin * division.update_size, spans)
        for update, share in enumerate(shares, begin + 1):
            micro_batches = [next(batches) for _ in share.spans]
            # Set before the item is yielded: Lightning saves before it asks for the next item, and the saved position
            # has to be behind this one. Batches that workers prefetch do not count.
            self._consumed = update * division.update_size
            if update == division.updates:
                self._epoch = epoch + 1
                self._consumed = 0
            if self.gives_updates:
                numbers = range(share.first, share.first + len(micro_batches))
                samples = [self._samples_of(epoch, *span) for span in share.spans]
                yield Update(micro_batches, numbers, share.total, share.is_stand_in, samples)
            else:
                yield micro_batches[0]

    @override
    def first_number(self, update: int) -> int:
        """Return the number in the epoch of this rank's first micro-batch of an update."""
        division = self.division
        if self.rank == 0:
            return update * division.micro_batches
        return division.share(update, self.rank).first

    @property
    def updates_done(self) -> int:
        """Number of updates of this epoch that the next iteration skips."""
        return self._start_at // self.division.update_size

    @override
    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` with its first update, unless the restored position is in this epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._start_at = 0
            self._consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the items of it that all ranks have consumed, and the identity of the data."""
        return {"epoch": self._epoch, "consumed": self._consumed, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of `state`, which any number of ranks may have saved.

        Raises:
            UserError: `state` was saved with other training data, or within an epoch of updates of another size.
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
        """Check that `state` was saved with the same training data. The same positions of other data would differ.

        Raises:
            UserError: the samples or their order differ.
        """
        current = self.data
        saved = state.get("data", current)
        if saved != current:
            difference = ", others or in another order" if saved["samples"] == current["samples"] else ""
            raise UserError(
                f"the checkpoint is of a run on {saved['samples']:,} samples, found {current['samples']:,}{difference};"
                " resume with the same data, or start a new run from its weights"
            )
