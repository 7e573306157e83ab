"""The position of a training loader: in which epoch it is, and how far in it.

Lightning tells the loader the epoch, and saves and restores its state with the checkpoint. One class keeps that state
for every training loader here, whatever its batches are made of.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from datamodules.errors import UserError
from datamodules.loading.sampling import num_training_steps, training_span, training_spans

__all__ = ["ResumableLoader", "Spans"]

Batch = TypeVar("Batch")

Spans = Sequence[tuple[int, int]]
"""Batches as positions ``[start, stop)`` in an epoch's order."""


class ResumableLoader(ABC, Generic[Batch]):
    """Epochs of batches, the same on any number of ranks, resumable at any batch; a subclass makes the batches.

    Args:
        items: how many an epoch has: samples, or batches that were cut before.
        items_at_once: how many of them one rank takes in a step.
    """

    def __init__(self, items: int, items_at_once: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._items, self._items_at_once = items, items_at_once
        self._epoch = self._consumed = self._start_at = self._began_at = 0

    @abstractmethod
    def _batches_of_epoch(self, epoch: int, start_at: int, spans: Spans) -> Iterator[Batch]:
        """This rank's batches of an epoch, one for each span, from position `start_at` in its order on."""

    @abstractmethod
    def _describe_data(self) -> tuple[int, str]:
        """How many samples it trains on, and their `fingerprint`."""

    @cached_property
    def _data(self) -> dict[str, Any]:
        samples, found = self._describe_data()
        return {"samples": samples, "fingerprint": found}

    @property
    def sampler(self) -> Self:
        """Itself: Lightning calls ``loader.sampler.set_epoch`` before each epoch."""
        return self

    def __len__(self) -> int:
        return num_training_steps(self._items, self._items_at_once, self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        # A generator: Lightning makes the iterator before it says which epoch it is, and asks for a batch after.
        epoch, start_at = self._epoch, self._start_at
        self._start_at, self._began_at = 0, start_at
        step_size = self._items_at_once * self.world_size
        spans = list(training_spans(self._items, self._items_at_once, self.rank, self.world_size, start_at))
        for step, batch in enumerate(self._batches_of_epoch(epoch, start_at, spans), 1):
            # Lightning stops after len(self) batches and saves before asking for more, so the state must already be
            # what comes after this batch, however many are being made ahead of it.
            self._consumed = start_at + step * step_size
            if step == len(spans):
                self._epoch, self._consumed = epoch + 1, 0
            yield batch

    def batch_positions(self, batch_idx: int) -> range:
        """Where the samples of this rank's batch of that number stand in the order of the epoch that is iterated over.

        The same samples have the same positions on any number of ranks, in batches of any size, and after a resume.
        """
        step_size = self._items_at_once * self.world_size
        # A resumed epoch may begin within a step, where steps have another size than before.
        start = batch_idx * step_size + self._began_at % step_size
        return self._sample_positions(
            *training_span(self._items, self._items_at_once, self.rank, self.world_size, start)
        )

    def _sample_positions(self, start: int, stop: int) -> range:
        """The positions of the samples in these items."""
        return range(start, stop)

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` with its first batch, unless the restored position lies in it."""
        if epoch != self._epoch:
            self._epoch, self._start_at, self._consumed = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and how many items of its order all ranks have consumed; and of which data."""
        return {"epoch": self._epoch, "consumed": self._consumed, "data": self._data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any number of ranks.

        Raises:
            UserError: it was saved with other training data.
        """
        self.check_data(state)
        self._epoch = state["epoch"]
        self._start_at = self._consumed = state["consumed"]

    def check_data(self, state: dict[str, Any]) -> None:
        """Refuse a `state` that was saved with other training data: an epoch of it would be another one.

        Raises:
            UserError: other samples, or in another order.
        """
        saved, found = state.get("data", self._data), self._data
        if saved != found:
            others = ", others or in another order" if saved["samples"] == found["samples"] else ""
            raise UserError(
                f"the checkpoint is of a run on {saved['samples']:,} samples, found {found['samples']:,}{others};"
                " resume with the same data, or start a new run from its weights"
            )
