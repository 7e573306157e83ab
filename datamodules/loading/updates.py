"""Defines `Update`, the item of a training loader, and groups the batches of other loaders into updates."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch.utils._pytree import tree_flatten, tree_unflatten

from datamodules.errors import UserError

Batch = TypeVar("Batch")


class Update(Generic[Batch]):
    """Micro-batches of one rank for one optimizer step, with their numbers.

    An `Update` is neither a tensor nor a collection, so that a Trainer does not move it to the device as a whole. The
    loop moves each micro-batch when it computes it.

    Args:
        batches: this rank's micro-batches.
        numbers: number of each micro-batch in the epoch. With the loaders of `datamodules` they are the same on any
            number of ranks.
        count: number of micro-batches of the update on all ranks, or None if it is not known.
        is_stand_in: whether the update has no micro-batch for this rank. The rank then computes the first micro-batch,
            since DDP needs a backward pass on each rank, and its result does not count.

    Example:
        >>> list(Update(["cats", "dogs"], numbers=[6, 7], count=4))
        [(6, 'cats'), (7, 'dogs')]
    """

    def __init__(
        self, batches: list[Batch], numbers: Sequence[int], count: int | None, is_stand_in: bool = False
    ) -> None:
        self.batches = batches
        self.numbers = numbers
        self.count = count
        self.is_stand_in = is_stand_in

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number, micro-batch) pairs."""
        return zip(self.numbers, self.batches, strict=True)


def micro_batches(batch: Any) -> list[Any]:
    """Return the micro-batches of an item of a training loader.

    Example:
        >>> micro_batches(Update(["cats", "dogs"], [0, 1], count=2)), micro_batches("cats")
        (['cats', 'dogs'], ['cats'])
    """
    if isinstance(batch, Update):
        return batch.batches
    return [batch]


def join_updates(items: Any) -> Update[Any]:
    """Combine the updates of several loaders into one update, whose micro-batches are collections.

    Args:
        items: a collection of updates, as a `CombinedLoader` yields it, with None for a loader that has ended.

    Raises:
        UserError: the updates have different numbers of micro-batches.

    Example:
        >>> list(join_updates({"a": Update([1, 2], [0, 1], count=2), "b": Update([3, 4], [0, 1], count=2)}))
        [(0, {'a': 1, 'b': 3}), (1, {'a': 2, 'b': 4})]
    """
    leaves, structure = tree_flatten(items)
    updates = [leaf for leaf in leaves if isinstance(leaf, Update)]
    counts = {update.count for update in updates}
    if len(counts) > 1:
        listed = " and ".join(sorted(str(count) for count in counts))
        raise UserError(
            f"the training loaders have {listed} micro-batches in one update: give them as many samples each,"
            " or accumulate nothing"
        )
    batches = []
    for index in range(len(updates[0])):
        batch_leaves = []
        for leaf in leaves:
            # None, of a loader that has ended, stays None.
            batch_leaves.append(leaf.batches[index] if isinstance(leaf, Update) else leaf)
        batches.append(tree_unflatten(batch_leaves, structure))
    return Update(batches, updates[0].numbers, updates[0].count, updates[0].is_stand_in)


class GroupedUpdates:
    """Loader that groups the batches of any other loader into updates, on each rank by itself.

    Another number of ranks would give these batches other numbers, so that runs agree within rounding only.

    Args:
        loader: yields this rank's batches.
        size: batches of an update on this rank; the last update of an epoch may have fewer.
        set_epoch: function that tells samplers which epoch begins.
    """

    def __init__(
        self, loader: Any, size: int, rank: int, world_size: int, set_epoch: Callable[[int], None] | None = None
    ) -> None:
        self.loader = loader
        self.size = size
        self.rank = rank
        self.world_size = world_size
        self._set_epoch = set_epoch
        self.sampler = self  # Lightning calls ``loader.sampler.set_epoch`` before each epoch.

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers of the loader which epoch begins."""
        if self._set_epoch is not None:
            self._set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.loader) // self.size)

    def __iter__(self) -> Iterator[Update[Any]]:
        batches: list[Any] = []
        first = 0
        for batch in self.loader:
            batches.append(batch)
            if len(batches) == self.size:
                yield self._update(batches, first)
                first += len(batches)
                batches = []
        if batches:
            yield self._update(batches, first)

    def _update(self, batches: list[Any], first: int) -> Update[Any]:
        numbers = [self.number(first + offset) for offset in range(len(batches))]
        # The number of micro-batches on the other ranks is not known: their loaders may end earlier.
        return Update(batches, numbers, None)

    def number(self, index: int) -> int:
        """Return the number in the epoch of this rank's batch at `index`. The ranks take batches in turn."""
        return index * self.world_size + self.rank

    def first_number(self, update: int) -> int:
        """Return the number in the epoch of this rank's first batch of an update."""
        return self.number(update * self.size)


class StatefulGroupedUpdates(GroupedUpdates):
    """Loader like `GroupedUpdates`, over a loader with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of the loader."""
        self.loader.load_state_dict(state)
