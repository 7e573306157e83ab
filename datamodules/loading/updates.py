"""The class `Update`, the item of a training loader, and `UpdateLoader`, the interface of every training loader.

Tested in `tests/callbacks/test_update_positions.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils._pytree import tree_flatten, tree_unflatten

from datamodules.errors import UserError
from datamodules.loading.sampling import UpdateDivision

Batch = TypeVar("Batch")


class Update(Generic[Batch]):
    """Micro-batches of one rank for one optimizer step, with their numbers.

    An `Update` is neither a tensor nor a collection, so a Trainer does not move it to the device as a whole. The loop
    moves each micro-batch before it is computed.

    Args:
        batches: this rank's micro-batches.
        numbers: epoch-wide number of each micro-batch. With the loaders of `datamodules` they do not depend on the
            number of ranks.
        count: number of micro-batches of the update over all ranks; None if unknown.
        is_dummy: whether the update has no micro-batch for this rank. The rank then computes the first micro-batch,
            because DDP needs a backward pass on each rank, and its result is ignored.
        samples: number of samples in each micro-batch; None if unknown.

    Example:
        >>> list(Update(["cats", "dogs"], numbers=[6, 7], count=4))
        [(6, 'cats'), (7, 'dogs')]
    """

    def __init__(
        self,
        batches: list[Batch],
        numbers: Sequence[int],
        count: int | None,
        is_dummy: bool = False,
        samples: Sequence[int | None] | None = None,
    ) -> None:
        self.batches = batches
        self.numbers = numbers
        self.count = count
        self.is_dummy = is_dummy
        self.samples = [None] * len(batches) if samples is None else samples

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number, micro-batch) pairs."""
        return zip(self.numbers, self.batches, strict=True)


def join_updates(items: Any) -> Update[Any]:
    """Combine the updates of several loaders into one update, whose micro-batches are collections.

    Args:
        items: a collection of updates, as yielded by a `CombinedLoader`, with None for an exhausted loader.

    Raises:
        UserError: the updates have different numbers of micro-batches.

    Example:
        >>> list(join_updates({"a": Update([1, 2], [0, 1], count=2), "b": Update([3, 4], [0, 1], count=2)}))
        [(0, {'a': 1, 'b': 3}), (1, {'a': 2, 'b': 4})]
    """
    leaves, structure = tree_flatten(items)
    updates = [leaf for leaf in leaves if isinstance(leaf, Update)]
    counts = {update.count for update in updates}
    is_known = None not in counts
    if len(counts - {None}) > 1 or len({len(update) for update in updates}) > 1:
        listed = " and ".join(sorted({str(update.count or len(update)) for update in updates}))
        raise UserError(
            f"the training loaders have {listed} micro-batches in one update: give them as many samples each,"
            " or accumulate nothing"
        )
    first = updates[0]
    batches = []
    samples: list[int | None] = []
    for index in range(len(first)):
        batch_leaves = []
        for leaf in leaves:
            # None, from an exhausted loader, stays None.
            batch_leaves.append(leaf.batches[index] if isinstance(leaf, Update) else leaf)
        batches.append(tree_unflatten(batch_leaves, structure))
        dealt = {update.samples[index] for update in updates}
        samples.append(dealt.pop() if len(dealt) == 1 else None)
    if not is_known:  # One of the loaders does not number its batches, so the joint batches have no numbers.
        return Update(batches, first.numbers, None, samples=samples)
    return Update(batches, first.numbers, first.count, first.is_dummy, samples)


class PassesThrough:
    """Mixin of a loader's wrapper: attributes and methods that it lacks are forwarded to `source`."""

    source: Any
    _reader: Any = None
    """A `DataLoader` made from `source`, which has the workers; None if `source` has them."""

    @property
    def _iterator(self) -> Any:
        """The iterator whose workers persist, or None: after an error, Lightning ends them by this name of torch."""
        return (self.source if self._reader is None else self._reader)._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        (self.source if self._reader is None else self._reader)._iterator = iterator

    if not TYPE_CHECKING:  # A type checker would not detect misspelled attributes.

        def __getattr__(self, name: str) -> Any:
            # A copy has no attributes at first: looking up `source` would recurse.
            if name == "source" or name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.source, name)


class UpdateLoader(ABC):
    """Interface of a training loader for the callbacks: an iterable over `Update` objects.

    `callbacks.lib.loaded_updates` wraps every training loader of a Trainer with an `UpdateLoop`.
    """

    rank: int
    world_size: int
    batch_size: int | None
    """Samples of an ordinary micro-batch; None if unknown."""
    division: UpdateDivision | None
    """Division of the epoch's updates among the ranks; None if micro-batches have no numbers in common on all ranks."""
    source: Any
    """The user's loader."""

    @property
    @abstractmethod
    def has_several(self) -> bool:
        """Whether this rank computes several micro-batches in an update."""

    @property
    @abstractmethod
    def samples_per_update(self) -> int | None:
        """Samples of an update over all ranks; None if unknown."""

    @property
    @abstractmethod
    def has_position(self) -> bool:
        """Whether a run can resume within an epoch of this loader."""

    @abstractmethod
    def first_number(self, update: int) -> int:
        """Return the epoch-wide number of this rank's first micro-batch of `update`."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""

    def check_data(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Check that `state` was saved with the same training data, if the loader can detect it.

        Raises:
            UserError: the data differ.
        """

    def order_state(self) -> dict[str, Any]:
        """Return the state that a resume from an epoch's end needs, besides the epoch, to repeat the order."""
        return {}

    def load_order_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Restore the result of `order_state`.

        Raises:
            UserError: the order of the samples cannot be repeated.
        """
