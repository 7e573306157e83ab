"""Reduction of DDP's gradient buckets in the order of the tree of `callbacks.lib.exact_sums`.

`reduce_bucket` is the communication hook of `callbacks.GradientSum`: each rank adds one slice of a bucket, as in a
reduce-scatter, and an all-gather returns the slices of the mean to all ranks.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from callbacks.lib.exact_sums import TreeSum


def widened(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, in which sums keep small gradients."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def in_memory_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Flatten a gradient in the order in which the parameter's elements lie in memory, as in a bucket of DDP."""
    strides = parameter.stride()
    flat = gradient.permute(sorted(range(len(strides)), key=lambda dim: -strides[dim])).reshape(-1)
    # A bucket holds the real and imaginary parts of complex numbers side by side.
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


class BucketReduction:
    """Reduction of one DDP bucket, with the all-to-all of its slices under way.

    Args:
        state: the `GradientSum` of the update.
        bucket: the gradients of this rank's last micro-batch.
    """

    def __init__(self, state: Any, bucket: dist.GradBucket) -> None:
        buffer = bucket.buffer()
        self.state = state
        self.size = buffer.numel()
        self._buffer = buffer
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        flat_sums = state.flat_sums(bucket.parameters(), buffer)
        self._slice_size = -(-self.size // state.world_size)
        bounds = [min(rank * self._slice_size, self.size) for rank in range(state.world_size + 1)]
        sizes = [stop - first for first, stop in itertools.pairwise(bounds)]
        self._own_size = sizes[state.rank]
        self._own_slices = [flat[bounds[state.rank] : bounds[state.rank + 1]] for flat in flat_sums]
        # A single sum is sent without a copy. The slice of this rank goes along if it lies between those of others.
        self._sends_own = len(flat_sums) == 1 and 0 < state.rank < state.world_size - 1
        slices = [
            flat[bounds[rank] : bounds[rank + 1]]
            for rank in range(state.world_size)
            if rank != state.rank
            for flat in flat_sums
        ]
        if self._sends_own:
            self._sent = flat_sums[0]
        elif len(slices) == 1:
            self._sent = slices[0]
        else:
            # The empty slice gives the dtype if nothing is sent.
            self._sent = torch.cat([*slices, widened(buffer[:0])])
        sent_sizes = [len(flat_sums) * size for size in sizes]
        received_sizes = [len(nodes) * self._own_size for nodes in state.nodes]
        if not self._sends_own:
            sent_sizes[state.rank] = received_sizes[state.rank] = 0
        self._received = self._sent.new_empty(sum(received_sizes))
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, received_sizes, sent_sizes, group=state.group, async_op=True
        )

    def _node_slices(self) -> list[Tensor]:
        """Return this rank's slice of each node's sum, in the order of the nodes."""
        counts = [len(nodes) for nodes in self.state.nodes]
        if not self._sends_own:
            counts[self.state.rank] = 0
        # `split` of an empty tensor returns one part, where no node may be received.
        if self._own_size:
            slices = list(self._received.split(self._own_size))[: sum(counts)]
        else:
            slices = [self._received] * sum(counts)
        if self._sends_own:
            return slices
        index = sum(counts[: self.state.rank])
        return [*slices[:index], *self._own_slices, *slices[index:]]

    def add_up(self) -> None:
        """Wait for this rank's slices, add them, and send the mean to all ranks."""
        self._work.wait()
        total = TreeSum(self.state.count)
        nodes = [node for rank_nodes in self.state.nodes for node in rank_nodes]
        for node, node_slice in zip(nodes, self._node_slices(), strict=True):
            total.add(node, [node_slice])
        (total_slice,) = total.total
        # In DDP's own buffer if the slices fill it, which saves DDP a copy.
        self._mean = self._buffer
        padded_size = self._slice_size * self.state.world_size
        if padded_size != self.size:
            self._mean = self._buffer.new_empty(padded_size)
        own_slice = self._mean[self.state.rank * self._slice_size :][: self._slice_size]
        torch.mul(total_slice, self.state.scale, out=own_slice[: self._own_size])
        # Into one tensor: gloo would copy once more to gather into a list.
        self._work = dist.all_gather_into_tensor(self._mean, own_slice, group=self.state.group, async_op=True)

    def end(self) -> None:
        """Hand the mean to DDP."""
        self._work.wait()
        self.future.set_result(self._mean[: self.size])


def reduce_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of gradients; a communication hook of DDP."""
    reduction = BucketReduction(state, bucket)
    state.buckets.append(reduction)
    # A bucket is sent at once and added one bucket later, so that the transfer overlaps the backward pass.
    if len(state.buckets) > 1:
        state.buckets[-2].add_up()
    if bucket.is_last():
        reduction.add_up()
        for pending in state.buckets:
            pending.end()
        state.buckets.clear()
    return reduction.future
