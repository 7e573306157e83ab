"""The item of a training loader: what one rank computes of an update."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch.utils._pytree import tree_flatten, tree_unflatten

from datamodules.errors import UserError

Batch = TypeVar("Batch")


class Update(Generic[Batch]):
    """This rank's micro-batches of one optimizer step, with their numbers.

    It is no tensor and no collection, so a Trainer moves nothing of it to a device: the loop moves a micro-batch when
    it computes it.

    Args:
        batches: this rank's micro-batches.
        numbers: the number of each in the epoch. With the loaders of `datamodules` they are the same on any number of
            ranks.
        count: micro-batches of the update on all ranks; None where that is not known.
        is_stand_in: whether the update has no micro-batch for this rank. The rank computes the first one all the same,
            since DDP needs a backward pass on each rank, and nothing of it counts.

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
        """Each micro-batch after its number."""
        return zip(self.numbers, self.batches, strict=True)


def micro_batches(batch: Any) -> list[Any]:
    """The micro-batches behind the ``batch`` of `on_train_batch_start` and `on_train_batch_end`.

    Example:
        >>> micro_batches(Update(["cats", "dogs"], [0, 1], count=2)), micro_batches("cats")
        (['cats', 'dogs'], ['cats'])
    """
    return batch.batches if isinstance(batch, Update) else [batch]


def join_updates(items: Any) -> Update[Any]:
    """The update of several loaders together: each micro-batch is a collection of theirs.

    Args:
        items: a collection of updates, as a `CombinedLoader` gives it; None of a loader that has ended.

    Raises:
        UserError: their numbers of micro-batches differ.

    Example:
        >>> list(join_updates({"a": Update([1, 2], [0, 1], count=2), "b": Update([3, 4], [0, 1], count=2)}))
        [(0, {'a': 1, 'b': 3}), (1, {'a': 2, 'b': 4})]
    """
    leaves, structure = tree_flatten(items)
    updates = [leaf for leaf in leaves if isinstance(leaf, Update)]
    counts = {update.count for update in updates}
    if len(counts) > 1:
        found = " and ".join(sorted(str(count) for count in counts))
        raise UserError(
            f"the training loaders have {found} micro-batches in one update: give them as many samples each,"
            " or accumulate nothing"
        )
    batches = []
    for place in range(len(updates[0])):
        parts = [leaf.batches[place] if isinstance(leaf, Update) else leaf for leaf in leaves]
        batches.append(tree_unflatten(parts, structure))
    return Update(batches, updates[0].numbers, updates[0].count, updates[0].is_stand_in)


class GroupedUpdates:
    """Groups the batches of any loader into updates: each rank its own, as many on each.

    The batches have no numbers that hold on another number of ranks, so the run is equal within rounding only.

    Args:
        loader: yields this rank's batches.
        size: batches of an update; the last update of an epoch may have fewer.
        set_epoch: is called with the epoch that begins, for samplers.
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
        made = 0
        for batch in self.loader:
            batches.append(batch)
            if len(batches) == self.size:
                yield self._update(batches, made)
                made += len(batches)
                batches = []
        if batches:
            yield self._update(batches, made)

    def _update(self, batches: list[Any], made: int) -> Update[Any]:
        return Update(batches, [self.number(made + place) for place in range(len(batches))], None)

    def number(self, place: int) -> int:
        """The number of this rank's batch at a place in its epoch, where each rank takes one in turn."""
        return place * self.world_size + self.rank

    def first_number(self, update: int) -> int:
        """The number of this rank's first batch in the update of that number of the epoch."""
        return self.number(update * self.size)


class StatefulGroupedUpdates(GroupedUpdates):
    """`GroupedUpdates` of a loader with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved."""
        self.loader.load_state_dict(state)
