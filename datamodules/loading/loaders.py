"""Loaders that yield whole batches of tensors in memory.

A batch is one indexing operation: no worker, no collation, no copy from the host when the tensors live on the
training device. Lightning leaves these loaders alone (they are no ``DataLoader``), tells the training loader the epoch,
and saves and restores its position with the checkpoint.

The orders are classes of their own; `datamodules.loading.worker_loaders` has loaders over samples that must be made.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.sampling import epoch_order, evaluation_spans, num_training_steps, training_spans

__all__ = ["EvaluationLoader", "EvaluationOrder", "Spans", "TrainLoader", "TrainOrder", "Transform"]

Transform = Callable[[Tensor, Tensor, int], Tensor]
"""What turns (inputs, their sample numbers, epoch) into the network's inputs, a batch at a time."""

Spans = Sequence[tuple[int, int]]
"""Batches as positions ``[start, stop)`` in an order."""


class _Loader:
    """The samples of a set, and batches of some of them; where the batches come from is left to `_batches`."""

    def __init__(self, rows: Tensor, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1:
            raise UserError(f"a batch holds one sample at least, found {batch_size}; pass --batch-size 64")
        self.rows, self.batch_size, self.rank, self.world_size = rows, batch_size, rank, world_size

    def _batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        raise NotImplementedError


class TrainOrder(_Loader):
    """Every epoch in its own order, from a position in it on."""

    def __init__(
        self, rows: Tensor, batch_size: int, seed: int, rank: int, world_size: int, drop_last: bool, shuffle: bool
    ) -> None:
        super().__init__(rows, batch_size, rank, world_size)
        self.seed, self.drop_last, self.shuffle = seed, drop_last, shuffle
        if len(rows) == 0:
            raise UserError("there is no sample to train on: the training set is empty")
        # Without drop_last, the ranks share a step that is larger than the set.
        at_once = batch_size * world_size if drop_last else batch_size
        if at_once > len(rows):
            split = f" ({batch_size:,} on each of {world_size} ranks)" if at_once > batch_size else ""
            raise UserError(
                f"a batch of {at_once:,}{split} is larger than the training set of {len(rows):,} samples; "
                f"pass --batch-size {max(1, len(rows) * batch_size // at_once)} or less"
            )
        self._epoch = 0
        self._consumed = 0
        self._start_at = 0

    @property
    def sampler(self) -> "TrainOrder":
        """Itself: Lightning calls ``loader.sampler.set_epoch`` before each epoch."""
        return self

    def __len__(self) -> int:
        return num_training_steps(len(self.rows), self.batch_size, self.world_size, self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # A generator: Lightning makes the iterator before it says which epoch it is, and asks for a batch after.
        epoch, start_at = self._epoch, self._start_at
        self._start_at = 0
        count = len(self.rows)
        order = self.rows
        if self.shuffle:
            order = self.rows.index_select(0, epoch_order(count, self.seed, epoch).to(self.rows.device))
        spans = list(training_spans(count, self.batch_size, self.rank, self.world_size, self.drop_last, start_at))
        for step, batch in enumerate(self._batches(epoch, order, spans), 1):
            # Lightning stops after len(self) batches and saves before asking for more, so the state must already be
            # what comes after this batch, however many are being made ahead of it.
            self._consumed = start_at + step * self.batch_size * self.world_size
            if step == len(spans):
                self._epoch, self._consumed = epoch + 1, 0
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with its first batch, unless the restored position lies in it."""
        if epoch != self._epoch:
            self._epoch, self._start_at, self._consumed = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, and how many samples of its order all ranks have consumed."""
        return {"epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, on any number of ranks."""
        self._epoch = state["epoch"]
        self._start_at = self._consumed = state["consumed"]


class EvaluationOrder(_Loader):
    """Every sample once, in the order of the rows."""

    def _spans(self) -> list[tuple[int, int]]:
        return list(evaluation_spans(len(self.rows), self.batch_size, self.rank, self.world_size))

    def __len__(self) -> int:
        return len(self._spans())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._batches(0, self.rows, self._spans())


class _Tensors(_Loader):
    """Batches by indexing, transformed on the device."""

    inputs: Tensor
    targets: Tensor
    transform: Transform | None
    device: torch.device

    def _set_tensors(
        self, inputs: Tensor, targets: Tensor, transform: Transform | None, device: torch.device | str | None
    ) -> None:
        self.inputs, self.targets, self.transform = inputs, targets, transform
        self.device = torch.device(device) if device is not None else inputs.device

    def _batches(self, epoch: int, order: Tensor, spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        for start, stop in spans:
            yield self._batch(order[start:stop], epoch)

    def _batch(self, rows: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        # index_select is 10 times faster than indexing with a tensor here: it copies row by row.
        inputs = self.inputs.index_select(0, rows).to(self.device, non_blocking=True)
        targets = self.targets.index_select(0, rows).to(self.device, non_blocking=True)
        if self.transform is not None:
            inputs = self.transform(inputs, rows.to(self.device, non_blocking=True), epoch)
        return inputs, targets


class TrainLoader(TrainOrder, _Tensors):
    """Shuffled batches in one global order for any number of ranks, resumable at any batch.

    Epoch e's order is a function of (seed, e). Each step consumes the next ``batch_size * world_size`` samples of it,
    and each rank takes its part. The last step shares what is left; where fewer samples than ranks are left some ranks
    get an empty batch, so that every rank makes the same number of steps.

    Args:
        inputs: of shape (n, ...), all samples.
        targets: of shape (n, ...).
        rows: int64, the numbers of those samples to train on.
        batch_size: samples on one rank in one forward pass.
        seed: of the order.
        transform: makes the network's inputs of a batch, on `device`.
        device: where batches go; by default where `inputs` are.
        drop_last: leave an incomplete last step out; which samples that are depends on the number of ranks.
        shuffle: False keeps the order of `rows` in every epoch.

    Raises:
        UserError: the set is empty, or a batch is larger than the set.

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
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        super().__init__(rows.to(inputs.device), batch_size, seed, rank, world_size, drop_last, shuffle)
        self._set_tensors(inputs, targets, transform, device)


class EvaluationLoader(EvaluationOrder, _Tensors):
    """Every sample exactly once, on any number of ranks, in batches that do not depend on that number.

    Args:
        inputs: of shape (n, ...), all samples.
        targets: of shape (n, ...).
        rows: int64, the numbers of those samples to evaluate.
        batch_size: samples in one forward pass.
        transform: makes the network's inputs of a batch, on `device`; it is told epoch 0.
        device: where batches go; by default where `inputs` are.

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
