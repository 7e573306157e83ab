"""The position of a training loader, which Lightning saves and restores: in which epoch it is, and how far in it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.sampling import Division, Step

Batch = TypeVar("Batch")

Spans = Sequence[tuple[int, int]]
"""Batches as positions ``[start, stop)`` in an epoch's order."""

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
    """Epochs of micro-batches, the same on any number of ranks, resumable at any update; a subclass makes the batches.

    Args:
        items: how many an epoch has: samples, or batches that were cut before.
        items_at_once: how many of them a micro-batch has.
    """

    def __init__(self, items: int, items_at_once: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._items, self._items_at_once = items, items_at_once
        self._epoch = self._consumed = self._start_at = 0
        self.divide_updates(self.items_of(world_size))

    def items_of(self, micro_batches: int) -> int:
        """The items of an update of so many micro-batches, on all ranks."""
        return self._items_at_once * micro_batches

    def items_of_samples(self, samples: int) -> int:
        """The items of an update of so many samples, on all ranks.

        Raises:
            UserError: batches are limited by tokens, so that their samples are not known.
        """
        return samples

    def divide_updates(self, items: int) -> None:
        """Say what an update is; by default a micro-batch on each rank. It holds from the next epoch on.

        Args:
            items: of an update, on all ranks; its last micro-batch may be short.

        Raises:
            UserError: there are more ranks than micro-batches in an update.
        """
        self.division = Division(self._items, self._items_at_once, items, self.world_size)
        if self.division.micro_batches < self.world_size:
            raise UserError(
                f"an update has {self.division.micro_batches} micro-batches of {self._items_at_once}, found"
                f" {self.world_size} devices: pass fewer devices, or a `batch_size` of"
                f" {max(1, items // self.world_size)} or less"
            )

    def steps_in(self, items: int) -> int:
        """The steps of each rank in an update of so many items."""
        return replace(self.division, update_size=items).steps_per_update

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
    def sampler(self) -> Self:
        """Itself: Lightning calls ``loader.sampler.set_epoch`` before each epoch."""
        return self

    def __len__(self) -> int:
        return len(self.division)

    def __iter__(self) -> Iterator[Batch]:
        # A generator: Lightning makes the iterator before it says which epoch it is, and asks for a batch after.
        epoch, start_at, division = self._epoch, self._start_at, self.division
        self._start_at = 0
        steps = list(division.steps(self.rank, start_at))
        spans = [(step.start, step.stop) for step in steps]
        for number, batch in enumerate(self._batches_of_epoch(epoch, start_at, spans), 1):
            # Lightning stops after len(self) batches and saves before asking for more, so the state must already be
            # what comes after this batch, however many are being made ahead of it. An update that was begun is made
            # again from its first micro-batch on.
            self._consumed = start_at + number // division.steps_per_update * division.update_size
            if number == len(steps):
                self._epoch, self._consumed = epoch + 1, 0
            yield batch

    def step(self, batch_idx: int) -> Step:
        """What this rank's batch of that number is in the epoch that is iterated over."""
        return self.division.step(batch_idx, self.rank)

    def micro_batch_number(self, batch_idx: int) -> int:
        """The number of the micro-batch in its epoch, the same on any number of ranks and after a resume."""
        return self.step(batch_idx).number

    @property
    def steps_done(self) -> int:
        """The steps of each rank in this epoch before the position from which the next iteration goes on."""
        return self.division.steps_before(self._start_at)

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
