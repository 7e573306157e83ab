"""Gradients averaged over the ranks after the backward pass, in place of DDP, which does so during it."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientMean", "broadcast_tensors"]

_BYTES = 25 * 2**20
"""Of a bucket, as in DDP."""


def _runs(tensors: Iterable[Tensor], capacity: dict[torch.dtype, int]) -> Iterable[list[Tensor]]:
    """The tensors in groups of one type that fit into its bucket."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, same in by_type.items():
        run: list[Tensor] = []
        for tensor in same:
            if run and sum(t.numel() for t in run) + tensor.numel() > capacity[dtype]:
                yield run
                run = []
            run.append(tensor)
        yield run


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

    def __call__(self, gradients: Iterable[Tensor]) -> None:
        """Replace gradients by their means; every rank has the same number of them, of the same shapes."""
        for run in _runs(gradients, {dtype: len(bucket) for dtype, bucket in self._buckets.items()}):
            flat = self._buckets[run[0].dtype][: sum(gradient.numel() for gradient in run)]
            parts = [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in run]), run, strict=True)]
            torch._foreach_copy_(parts, run)
            dist.all_reduce(flat.div_(self._world_size))
            torch._foreach_copy_(run, parts)


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors by those of rank 0."""
    for run in _runs(tensors, {tensor.dtype: _BYTES // tensor.dtype.itemsize for tensor in tensors}):
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        dist.broadcast(flat, 0)
        parts = flat.split([tensor.numel() for tensor in run])
        torch._foreach_copy_(run, [part.view_as(tensor) for part, tensor in zip(parts, run, strict=True)])
