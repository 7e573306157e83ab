"""Gradients averaged over the ranks after the backward pass, in place of DDP, which does so during it."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientMean", "broadcast_tensors"]

_BYTES = 25 * 2**20
"""Of a bucket, as in DDP."""


def _runs(tensors: Iterable[Tensor], capacity: dict[torch.dtype, int]) -> Iterator[list[Tensor]]:
    """The tensors in groups of one type that fit into its bucket."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, same in by_type.items():
        run: list[Tensor] = []
        filled = 0
        for tensor in same:
            if run and filled + tensor.numel() > capacity[dtype]:
                yield run
                run, filled = [], 0
            run.append(tensor)
            filled += tensor.numel()
        yield run


def _views(flat: Tensor, run: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in run])
    return [part.view_as(tensor) for part, tensor in zip(parts, run, strict=True)]


class GradientMean:
    """Averages gradients over the ranks, through buckets that are allocated once, so that it needs no memory later.

    Args:
        parameters: all that may have a gradient.
        world_size: the number of ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world_size: int) -> None:
        self._world_size = world_size
        self._buckets: dict[torch.dtype, Tensor] = {}
        for dtype in {parameter.dtype for parameter in parameters}:
            sizes = [parameter.numel() for parameter in parameters if parameter.dtype == dtype]
            numel = max(*sizes, min(sum(sizes), _BYTES // dtype.itemsize)) if len(sizes) > 1 else sizes[0]
            self._buckets[dtype] = torch.empty(numel, dtype=dtype, device=parameters[0].device)
        self._planned: list[int] = []
        self._plan: list[tuple[list[Tensor], Tensor, list[Tensor]]] = []

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of parameters, the same on every rank, by their means; a rank may lack some."""
        if self._planned != (planned := [id(parameter) for parameter in parameters]):
            self._planned, self._plan = planned, []
            for run in _runs(parameters, {dtype: len(bucket) for dtype, bucket in self._buckets.items()}):
                flat = self._buckets[run[0].dtype][: sum(parameter.numel() for parameter in run)]
                self._plan.append((run, flat, _views(flat, run)))
        for same, flat, parts in self._plan:
            for parameter in same:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in same if parameter.grad is not None]
            torch._foreach_copy_(parts, gradients)
            dist.all_reduce(flat.div_(self._world_size))
            torch._foreach_copy_(gradients, parts)


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors by those of rank 0."""
    for run in _runs(tensors, {tensor.dtype: _BYTES // tensor.dtype.itemsize for tensor in tensors}):
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        dist.broadcast(flat, 0)
        torch._foreach_copy_(run, _views(flat, run))
