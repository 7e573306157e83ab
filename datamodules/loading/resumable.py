"""The position of a training loader, which Lightning saves and restores: in which epoch it is, and how far in it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.data import SequentialSampler

from datamodules.errors import UserError
from datamodules.loading.sampling import Division
from datamodules.loading.updates import Update

Batch = TypeVar("Batch")

Spans = Sequence[tuple[int, int]]
"""Batches as positions ``[start, stop)`` in an epoch's order."""


class _InOrder(SequentialSampler):
    """The sampler of a loader that keeps the order: Lightning asks for its class, and says which epoch begins."""

    def __init__(self, loader: "ResumableLoader[Any]") -> None:
        super().__init__(range(len(loader)))
        self.set_epoch = loader.set_epoch


_MOST = 1 << 26  # Bytes of a tensor that are looked at.


def fingerprint(tensors: Iterable[Tensor], names: Iterable[str] = ()) -> str:
    """A hash of whole numbers, and of the names of files without their folders; 32 letters.

    Of floating-point numbers only the shape counts: another machine may compute them with another rounding. Of a tensor
    of more than 64 MiB every k-th row counts.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)}".encode())
        if not tensor.is_floating_point():
            step = max(1, -(-tensor.numel() * tensor.element_size() // _MOST))
            found.update(tensor[::step].cpu().contiguous().view(-1).numpy().data)
    for name in names:
        found.update(name.rpartition("/")[2].encode("utf-8", "surrogateescape") + b"\0")
    return found.hexdigest()[:32]


class ResumableLoader(ABC, Generic[Batch]):
    """Epochs of updates, the same on any number of ranks, resumable at any of them; a subclass makes the batches.

    An update is one micro-batch on each rank, and an item of the loader is this rank's. Once `divide_updates` has said
    what else an update is, the items are `Update` objects. ``len(loader)`` is the number of updates of an epoch.

    Args:
        items: how many an epoch has: samples, or batches that were cut before.
        items_at_once: how many of them a micro-batch has.
    """

    def __init__(self, items: int, items_at_once: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._items, self._items_at_once = items, items_at_once
        self._epoch = 0
        self._consumed = 0
        self._start_at = 0
        self.keeps_order = False
        """Whether each epoch has the samples in the order of the data, as for over-fitting."""
        self.divide_updates(None)

    def items_of(self, micro_batches: int) -> int:
        """The items of an update of so many micro-batches, on all ranks."""
        return self._items_at_once * micro_batches

    def items_of_samples(self, samples: int) -> int:
        """The items of an update of so many samples, on all ranks.

        Raises:
            UserError: batches are limited by tokens, so that their samples are not known.
        """
        return samples

    def divide_updates(self, items: int | None) -> None:
        """Say what an update is. It holds from the next epoch on, and the items of the loader are then `Update`s.

        Args:
            items: of an update, on all ranks; its last micro-batch may be short. None gives back what the loader began
                with: one micro-batch on each rank, which is itself the item.

        Raises:
            UserError: there are more ranks than micro-batches in an update.
        """
        self.gives_updates = items is not None
        """Whether an item is an `Update`."""
        if items is None:
            items = self.items_of(self.world_size)
        self.division = Division(self._items, self._items_at_once, items, self.world_size)
        if self.division.micro_batches < self.world_size:
            raise UserError(
                f"an update has {self.division.micro_batches} micro-batches of {self._items_at_once}, found"
                f" {self.world_size} devices: pass fewer devices, or a `batch_size` of"
                f" {max(1, items // self.world_size)} or less"
            )

    @property
    def samples_per_update(self) -> int:
        """On all ranks; their mean number where batches are limited by tokens."""
        return self.division.update_size

    @abstractmethod
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[Batch]:
        """This rank's batches of an epoch, one for each span, from position `start_at` in its order on."""

    @abstractmethod
    def _describe_data(self) -> tuple[int, str]:
        """How many samples it trains on, and their `fingerprint`."""

    @cached_property
    def data(self) -> dict[str, Any]:
        """Of which data it is: the number of samples, and a hash of them."""
        samples, found = self._describe_data()
        return {"samples": samples, "fingerprint": found}

    @property
    def sampler(self) -> Any:
        """What Lightning calls ``set_epoch`` of: itself, or what says that the samples come in their order."""
        return _InOrder(self) if self.keeps_order else self

    def __len__(self) -> int:
        return self.division.updates

    def __iter__(self) -> Iterator[Any]:
        """Each `Update`, or this rank's batch where `divide_updates` has said nothing."""
        # A generator: Lightning makes the iterator before it says which epoch it is, and asks for an item after.
        epoch = self._epoch
        begin = self.updates_done
        division = self.division
        self._start_at = 0
        shares = [division.share(update, self.rank) for update in range(begin, division.updates)]
        spans = [span for share in shares for span in share.spans]
        batches = self._batches_of_epoch(epoch, begin * division.update_size, spans)
        for update, share in enumerate(shares, begin + 1):
            micro_batches = [next(batches) for _ in share.spans]
            # Lightning saves before it asks for the next item, so the position is already what comes after this one,
            # however many batches are being made ahead of it.
            self._consumed = update * division.update_size
            if update == division.updates:
                self._epoch = epoch + 1
                self._consumed = 0
            if self.gives_updates:
                numbers = range(share.first, share.first + len(micro_batches))
                yield Update(micro_batches, numbers, share.total, share.is_stand_in)
            else:
                yield micro_batches[0]

    def first_number(self, update: int) -> int:
        """The number of this rank's first micro-batch in the update of that number of the epoch."""
        division = self.division
        if self.rank == 0:
            return update * division.micro_batches
        return division.share(update, self.rank).first

    @property
    def updates_done(self) -> int:
        """The updates of this epoch before the position from which the next iteration goes on."""
        return self._start_at // self.division.update_size

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` with its first batch, unless the restored position lies in it."""
        if epoch != self._epoch:
            self._epoch, self._start_at, self._consumed = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and how many items of its order all ranks have consumed; and of which data."""
        return {"epoch": self._epoch, "consumed": self._consumed, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any number of ranks.

        Raises:
            UserError: it was saved with other training data, or within an epoch of updates of another size.
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
        """Refuse a `state` that was saved with other training data: an epoch of it would be another one.

        Raises:
            UserError: other samples, or in another order.
        """
        saved, found = state.get("data", self.data), self.data
        if saved != found:
            others = ", others or in another order" if saved["samples"] == found["samples"] else ""
            raise UserError(
                f"the checkpoint is of a run on {saved['samples']:,} samples, found {found['samples']:,}{others};"
                " resume with the same data, or start a new run from its weights"
            )
