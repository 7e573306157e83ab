"""Defines `Update`, the item of a training loader, and `UpdateLoader`, what every training loader tells.

Tested in `tests/datamodules/loading/test_loaders.py`.
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

    An `Update` is neither a tensor nor a collection, so that a Trainer does not move it to the device as a whole. The
    loop moves each micro-batch when it computes it.

    Args:
        batches: this rank's micro-batches.
        numbers: number of each micro-batch in the epoch. With the loaders of `datamodules` they are the same on any
            number of ranks.
        count: number of micro-batches of the update on all ranks, or None if it is not known.
        is_dummy: whether the update has no micro-batch for this rank. The rank then computes the first micro-batch,
            since DDP needs a backward pass on each rank, and its result does not count.
        samples: number of samples that the loader dealt for each micro-batch; None where it does not know it.

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
            # None, of a loader that has ended, stays None.
            batch_leaves.append(leaf.batches[index] if isinstance(leaf, Update) else leaf)
        batches.append(tree_unflatten(batch_leaves, structure))
        dealt = {update.samples[index] for update in updates}
        samples.append(dealt.pop() if len(dealt) == 1 else None)
    if not is_known:  # One of the loaders does not number its batches, so the joint ones have no numbers either.
        return Update(batches, first.numbers, None, samples=samples)
    return Update(batches, first.numbers, first.count, first.is_dummy, samples)


class PassesThrough:
    """Mixin of a wrapper around somebody's loader: attributes and methods that it lacks are those of `source`."""

    source: Any

    if not TYPE_CHECKING:  # A checker of types would find no misspelled attribute.

        def __getattr__(self, name: str) -> Any:
            # A copy has no attributes at first.
            if name == "source" or name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.source, name)


class UpdateLoader(ABC):
    """Training loader as the callbacks see it: an iterable over `Update` objects that tells what it deals.

    Every training loader of a Trainer with an `UpdateLoop` is one, wrapped in `callbacks.lib.loaded_updates`.
    """

    rank: int
    world_size: int
    batch_size: int | None
    """Samples of an ordinary micro-batch; None if they are unknown."""
    division: UpdateDivision | None
    """Division of the epoch's updates among the ranks; None if micro-batches have no numbers that all ranks share."""
    source: Any
    """The loader as the user made it."""

    @property
    @abstractmethod
    def has_several(self) -> bool:
        """Whether this rank computes several micro-batches in an update."""

    @property
    @abstractmethod
    def samples_per_update(self) -> int | None:
        """Samples of an update on all ranks; None if they are unknown."""

    @property
    @abstractmethod
    def has_position(self) -> bool:
        """Whether a run resumes within an epoch of this loader."""

    @abstractmethod
    def first_number(self, update: int) -> int:
        """Return the number in the epoch of this rank's first micro-batch of an update."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""

    def check_data(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Check that a state was saved with the same training data, where the loader can tell.

        Raises:
            UserError: the data differ.
        """

    def order_state(self) -> dict[str, Any]:
        """Return what a resume from an epoch's end needs beside the epoch: the state of the order, or its lack."""
        return {}

    def load_order_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Restore `order_state`.

        Raises:
            UserError: the order of the samples cannot be repeated.
        """
