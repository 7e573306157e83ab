"""Sums of floating-point numbers that are bit-identical on any number of ranks.

Scalars: a float32 is a whole number times a power of two. Written as digits of a long whole number, in int64, numbers
are added without rounding, by ``+``, ``sum`` or an all-reduce.

Gradients would become 17 times as large, so their order of addition is fixed instead, by the micro-batches' numbers:
``S(a, b) = S(a, m) + S(m, b)``, where m - a is the largest power of two below b - a. A rank adds up the largest nodes
of this tree in its range; the ranks exchange these nodes and add them in the order of the tree.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from datamodules.loading.sampling import range_of_rank

_BITS = 16
DIGITS = 17
"""Whole numbers that represent a floating-point number: 16 digits of base 2**16, and one if it is not finite."""


def to_whole_numbers(values: Tensor) -> Tensor:
    """Return the whole numbers of each value, int64 of shape (\\*values.shape, 17).

    2**23 values can be added before an int64 overflows. The function does not wait for the device or need float64.

    Args:
        values: of any shape and floating-point type, finite or not. Of float64 the first 48 bits count.

    Example:
        >>> values = torch.tensor([1e30, 1.0, -1e30, 1e-30])
        >>> values.sum().item(), from_whole_numbers(to_whole_numbers(values).sum(0).tolist())
        (1.0000000031710769e-30, 1.0)
    """
    rounded = values.detach().float()
    whole = _digits(rounded)
    return whole + _digits((values.detach() - rounded).float()) if values.dtype == torch.float64 else whole


def _digits(values: Tensor) -> Tensor:
    bits = values.view(torch.int32).long()
    exponent = (bits >> 23) & 255
    # The leading bit of the 24 is not stored; it is 0 in numbers below 2**-126.
    mantissa = (bits & (2**23 - 1)) | ((exponent > 0).long() << 23)
    power = exponent.clamp(min=1) - 1
    number = (mantissa << (power % _BITS)) * (1 - 2 * (bits < 0).long())
    is_finite = exponent < 255
    number = torch.where(is_finite, number, 1)
    # A mantissa shifted by up to 15 bits needs no second digit: an int64 digit may exceed the base.
    digit = torch.where(is_finite, power // _BITS, DIGITS - 1)
    return number.unsqueeze(-1) * (digit.unsqueeze(-1) == torch.arange(DIGITS, device=values.device))


def from_whole_numbers(whole: Sequence[int]) -> float:
    """Return the number that a sum of `to_whole_numbers` represents, rounded once; NaN if a value was not finite.

    Args:
        whole: 17 integers, such as a tensor's ``tolist()``.
    """
    *digits, not_finite = whole
    total = sum(digit << (_BITS * position) for position, digit in enumerate(digits))
    return float("nan") if not_finite else total / 2**149


Node = tuple[int, int]
"""Micro-batches ``[first, stop)`` of an update."""


def _is_node(first: int, stop: int, count: int | None) -> bool:
    """Whether the tree over [0, count) has a node [first, stop)."""
    width = 1 << (stop - first - 1).bit_length()
    return first % width == 0 and (stop - first == width or stop == count)


def tree_nodes(first: int, stop: int, count: int) -> list[Node]:
    """Return the largest nodes of the tree over [0, count) within [first, stop), from left to right.

    Example:
        >>> tree_nodes(2, 5, count=5)
        [(2, 4), (4, 5)]
    """
    nodes = []
    while first < stop:
        end = next(end for end in range(stop, first, -1) if _is_node(first, end, count))
        nodes.append((first, end))
        first = end
    return nodes


class TreeSum:
    """Sum of lists of tensors in the order of the tree. It holds log2(count) + 1 of them at most.

    Args:
        count: micro-batches of the update on all ranks; None if it is only known at the end, see `end`.

    Example:
        >>> total = TreeSum(3)
        >>> for number in range(3):
        ...     total.add((number, number + 1), [torch.tensor(float(number))])
        >>> total.nodes
        [((0, 3), [tensor(3.)])]
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.nodes: list[tuple[Node, list[Tensor]]] = []
        """Sums so far, in as few nodes as the tree allows."""

    def add(self, node: Node, tensors: list[Tensor]) -> None:
        """Add the sum over the node after the present ones; the tensors are changed in place."""
        self.nodes.append((node, tensors))
        self._join()

    def end(self, count: int) -> None:
        """Set the number of micro-batches, if it was unknown so far."""
        self.count = count
        self._join()

    def _join(self) -> None:
        while len(self.nodes) > 1:
            ((first, _), left), ((_, stop), right) = self.nodes[-2:]
            if not _is_node(first, stop, self.count):
                return
            torch._foreach_add_(left, right)
            self.nodes[-2:] = [((first, stop), left)]

    @property
    def total(self) -> list[Tensor]:
        """Sum over all micro-batches.

        Raises:
            ValueError: micro-batches are missing.
        """
        if len(self.nodes) != 1 or self.nodes[0][0] != (0, self.count):
            raise ValueError(f"found {[node for node, _ in self.nodes]}, expected all of 0 to {self.count}")
        return self.nodes[0][1]


def nodes_by_rank(count: int, world_size: int) -> list[list[Node]]:
    """Return the nodes that each rank adds up.

    Example:
        >>> nodes_by_rank(5, world_size=2)
        [[(0, 2), (2, 3)], [(3, 4), (4, 5)]]
    """
    return [tree_nodes(*range_of_rank(count, rank, world_size), count) for rank in range(world_size)]


def total_over_ranks(
    own: Sequence[Tensor], nodes: Sequence[Sequence[Node]], like: Tensor, group: Any = None
) -> Callable[[], Tensor]:
    """Start to gather the sums over the nodes of each rank; a collective call.

    Returns:
        A function that waits for the sums and adds them up to the sum over all micro-batches.

    Args:
        own: this rank's sums, one for each of its nodes.
        nodes: the nodes of each rank.
        like: a tensor of the shape, type and device of a sum.
        group: the ranks' process group; by default all processes.
    """
    count = max(stop for rank_nodes in nodes for _, stop in rank_nodes)
    total = TreeSum(count)
    sums_by_rank: Any = [list(own)]
    work: Any = None
    if len(nodes) > 1:
        # An all-gather needs equal sizes: ranks with fewer nodes send zeros, which are not added.
        padded = like.new_zeros((max(map(len, nodes)), *like.shape))
        for index, value in enumerate(own):
            padded[index] = value
        sums_by_rank = [torch.empty_like(padded) for _ in nodes]
        work = dist.all_gather(sums_by_rank, padded, group=group, async_op=True)

    def add_up() -> Tensor:
        if work is not None:
            work.wait()
        for rank_nodes, sums in zip(nodes, sums_by_rank, strict=True):
            for node, value in zip(rank_nodes, sums):
                total.add(node, [value])
        return total.total[0]

    return add_up
