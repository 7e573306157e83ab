"""The mean gradient of an update, equal to the bit on any number of ranks that share its micro-batches.

DDP adds the gradients of all ranks in an order that depends on their number. Here each micro-batch has its own
gradient, and the gradients are added in the order of the tree of `callbacks.lib.exact_sums`. Under DDP this is a
communication hook: each rank adds up one part of a bucket, as in a reduce-scatter; an all-gather sends the parts out.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from callbacks.lib.batch_norm import OrderedStatistics
from callbacks.lib.exact_sums import Node, TreeSum, nodes_by_rank, total_over_ranks
from datamodules.errors import UserError
from datamodules.loading.sampling import range_of_rank


def most_of_rank(count: int, world_size: int) -> int:
    """The most micro-batches of an update that a rank has; 1 at least."""
    return -(-count // world_size)


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in which many can be added up: gradients in half precision lose what is small."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _in_memory_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The elements of a gradient in the order in which those of its parameter lie in memory, as in a bucket of DDP."""
    strides = parameter.stride()
    flat = gradient.permute(sorted(range(len(strides)), key=lambda dim: -strides[dim])).reshape(-1)
    # A bucket holds the real and imaginary parts of complex numbers side by side.
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


class GradientSum:
    """Makes the gradients of an update the mean over all its targets, over micro-batches and ranks.

    Compute each micro-batch within `micro_batch`, and call `scale_loss` with its mean loss before the backward pass.
    After the last one ``.grad`` holds the mean. Each rank computes its range of the micro-batches; a rank without one
    computes a stand-in of any inputs, whose gradients do not count.

    `UpdateLoop` calls what `micro_batch` calls: `begin` at an update's start and `collect` after each backward pass;
    all but the last run within DDP's ``no_sync()``.

    It holds at most log2(micro-batches) + 1 gradients; with one micro-batch, one.

    Args:
        model: the module that trains, or DDP around it, whose reduction is replaced.
        expected_count: targets of an ordinary micro-batch. Gradients are relative to it, so float16 keeps its range.

    Raises:
        UserError: DDP has a static graph or a communication hook of its own, or an embedding has sparse gradients.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> gradients = GradientSum(model)
        >>> for inputs in (torch.zeros(1, 2), torch.ones(2, 2)):
        ...     with gradients.micro_batch(of=2):
        ...         loss = model(inputs).mean()
        ...         gradients.scale_loss(loss, count=len(inputs))
        ...         loss.backward()
        >>> model.weight.grad
        tensor([[0.6667, 0.6667]])
    """

    def __init__(self, model: nn.Module, expected_count: float = 1.0) -> None:
        self.model, self.expected_count = model, expected_count
        self.group: Any = None
        self.rank, self.world_size = 0, 1
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            raise UserError("sparse gradients have no fixed order of addition: pass sparse=False to the embedding")
        if isinstance(model, DistributedDataParallel):
            self.group = model.process_group
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.world_size > 1:
            self._replace_reduction()
        self.parameters: list[nn.Parameter] = []
        """Those that learn in this update."""
        self._hooks: list[Any] = []
        self.is_open = False
        """Whether micro-batches of an update were collected and the last one was not."""
        self.keeps_loss = False
        """Whether `mean_loss` is wanted, as by an optimizer that searches along a line."""

    def _replace_reduction(self) -> None:
        if self.model.static_graph:
            raise UserError("DDP(static_graph=True) reduces before all gradients are known: leave it out")
        try:
            self.model.register_comm_hook(self, _reduce_bucket)  # type: ignore[operator]
        except RuntimeError as error:
            raise UserError(
                f"DDP has a communication hook already, which adds gradients in its own way ({error}): leave it out"
            ) from error

    @contextlib.contextmanager
    def micro_batch(self, of: int, statistics: OrderedStatistics | None = None) -> Iterator[None]:
        """One micro-batch: forward pass, `scale_loss` and backward pass. In a rank's last one DDP communicates.

        After it `is_last` tells whether the update is complete.

        Args:
            of: micro-batches of the update, on all ranks, as `Update.count`.
            statistics: of the model's BatchNorm layers.
        """
        if not self.is_open:
            self.begin(of)
        if statistics is not None:
            statistics.begin()
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if isinstance(self.model, DistributedDataParallel) and self._step < self._steps - 1:
            context = self.model.no_sync()
        try:
            with context:
                yield
            if statistics is not None and self.leaf is not None:
                statistics.collect()
        finally:
            self.release()
            if statistics is not None:
                statistics.restore()
        self.collect()
        if statistics is not None and self.is_last:
            statistics.finish(most_of_rank(self.count, self.world_size))

    def begin(self, count: int | None) -> None:
        """Begin an update of `count` micro-batches.

        Args:
            count: on all ranks, which each take a range of them. None where it is not known: each rank adds up its own,
                as many on each, and the sums of the ranks are added, in an order that follows from their number.
        """
        self.count = self.world_size if count is None else count
        self.nodes = nodes_by_rank(self.count, self.world_size)
        self.sums = TreeSum(count)
        self._targets = TreeSum(count)
        self._losses = TreeSum(count)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._used: set[int] = set()
        self.buckets: list[_Bucket] = []
        self._numbers = range(*range_of_rank(self.count, self.rank, self.world_size))
        self._step = 0
        self._steps = max(1, len(self._numbers))
        self._is_counted = count is not None
        self.is_open = False

    @property
    def leaf(self) -> Node | None:
        """The micro-batch that is computed; None for a stand-in."""
        if not self._is_counted:
            return self._step, self._step + 1
        number = self._numbers.start + self._step
        return (number, number + 1) if number in self._numbers else None

    def scale_loss(self, loss: Tensor | None, count: float | Tensor, last: bool | None = None) -> None:
        """Let a backward pass from a mean loss give the gradient of its sum over targets, over `expected_count`.

        Args:
            loss: None where there is no backward pass.
            count: the targets behind the mean.
            last: whether it is this rank's last one, where `begin` was told no count.
        """
        self.is_last = self._step == self._steps - 1 if last is None else last
        device = self.parameters[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._targets_dtype = dtype
        weight = torch.as_tensor(count).detach().to(device, dtype, non_blocking=True) / self.expected_count
        if self.leaf is not None:
            self._targets.add(self.leaf, [weight.clone()])
            if self.keeps_loss and loss is not None:
                # A mean over no target may be NaN.
                total = torch.where(weight > 0, loss.detach().to(dtype) * weight, 0.0)
                self._losses.add(self.leaf, [total])
        if self._step == 0:
            for parameter in self.parameters:
                parameter.grad = None
        if self.is_last:
            self._share_targets(weight)
            if isinstance(self.model, DistributedDataParallel) and self.model.find_unused_parameters:
                # DDP expects a gradient from the steps within no_sync() in which a parameter was used.
                for parameter in self.parameters:
                    parameter.grad = torch.zeros_like(parameter) if id(parameter) in self._used else None
                    if self.leaf is None and parameter.grad is None:  # DDP counts no use without a gradient.
                        hook = parameter.register_post_accumulate_grad_hook(lambda used: setattr(used, "grad", None))
                        self._hooks.append(hook)
        if loss is not None and loss.requires_grad:
            # What flows in is 1, or the power of two of a GradScaler, and the product is exact.
            loss.register_hook(lambda gradient: (weight * gradient).to(gradient.dtype))

    def release(self) -> None:
        """Leave the parameters as they were; `collect` does it where no step has raised."""
        while self._hooks:
            self._hooks.pop().remove()

    def collect(self) -> None:
        """Take the gradients of the micro-batch; after the update's last step ``.grad`` holds the mean instead."""
        self.is_open = not self.is_last
        self.release()
        if self.is_last and self.world_size > 1:
            return  # The communication hook has done it.
        if self.leaf is not None:
            self.sums.add(self.leaf, [self._take(parameter) for parameter in self.parameters])
        if not self.is_last:
            self._step += 1
            return
        self.sums.end(self._step + 1)
        torch._foreach_mul_(self.sums.total, self.scale)
        for parameter, gradient in zip(self.parameters, self.sums.total, strict=True):
            if id(parameter) in self._used:
                parameter.grad = gradient.to(parameter.dtype)

    def _take(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of the present micro-batch: zeros where there is none, since another may have one."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        self._used.add(id(parameter))
        return _wide(gradient)

    def _of_rank(self, sums: TreeSum) -> list[list[Tensor]]:
        """This rank's sums, one for each of its nodes."""
        if not self._is_counted:
            sums.end(self._step + 1)
        return [tensors for _, tensors in sums.nodes]

    def mean_loss(self) -> Tensor:
        """The mean loss over all targets of the update, equal on all ranks; for `keeps_loss`, on all ranks."""
        like = self.parameters[0].new_zeros((), dtype=self._targets_dtype)
        own = [value for (value,) in self._of_rank(self._losses)]
        return total_over_ranks(own, self.nodes, like, group=self.group)() * self.scale

    def _share_targets(self, like: Tensor) -> None:
        """Begin to sum the weights of all micro-batches up, in the order of the tree."""
        own = [value for (value,) in self._of_rank(self._targets)]
        self._total = total_over_ranks(own, self.nodes, like, group=self.group)
        self._scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """What makes the sum of the gradients their mean; from the update's last `scale_loss` on."""
        if self._scale is None:
            total = self._total()
            self._scale = torch.where(total > 0, 1 / total, 1.0)
        return self._scale

    def flat_sums(self, parameters: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
        """This rank's sums over the parameters of a bucket, each as flat as the bucket; the last step's are in them."""
        rows = {id(parameter): row for row, parameter in enumerate(self.parameters)}
        total = TreeSum(self.sums.count)
        for node, tensors in self.sums.nodes:
            # Not by GradBucket.gradients(), which has the strides of contiguous parameters.
            total.add(node, [torch.cat([_in_memory_order(tensors[rows[id(p)]], p) for p in parameters])])
        if self.leaf is not None:
            total.add(self.leaf, [_wide(buffer)])
        return [flat for (flat,) in self._of_rank(total)]


class _Bucket:
    """A bucket on its way: each part goes to the rank that adds it up, and the sums come back to all."""

    def __init__(self, state: GradientSum, bucket: dist.GradBucket) -> None:
        buffer = bucket.buffer()
        self.state, self.size, self._buffer = state, buffer.numel(), buffer
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        flats = state.flat_sums(bucket.parameters(), buffer)
        self._part = -(-self.size // state.world_size)
        bounds = [min(rank * self._part, self.size) for rank in range(state.world_size + 1)]
        parts = [stop - first for first, stop in itertools.pairwise(bounds)]
        self._own = parts[state.rank]
        self._mine = [flat[bounds[state.rank] : bounds[state.rank + 1]] for flat in flats]
        # One tensor is sent: this rank's own part goes along where it lies between others.
        self._sends_own = len(flats) == 1 and 0 < state.rank < state.world_size - 1
        cut = [
            flat[bounds[rank] : bounds[rank + 1]]
            for rank in range(state.world_size)
            if rank != state.rank
            for flat in flats
        ]
        self._sent = flats[0] if self._sends_own else cut[0] if len(cut) == 1 else torch.cat([*cut, _wide(buffer[:0])])
        sent = [len(flats) * part for part in parts]
        received = [len(nodes) * self._own for nodes in state.nodes]
        if not self._sends_own:
            sent[state.rank] = received[state.rank] = 0
        self._received = self._sent.new_empty(sum(received))
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, received, sent, group=state.group, async_op=True
        )

    def _arrived(self) -> list[Tensor]:
        """This rank's part of each node, in the order of the nodes."""
        counts = [len(nodes) for nodes in self.state.nodes]
        if not self._sends_own:
            counts[self.state.rank] = 0
        # An empty tensor has one part, too.
        parts = list(self._received.split(self._own))[: sum(counts)] if self._own else [self._received] * sum(counts)
        if self._sends_own:
            return parts
        place = sum(counts[: self.state.rank])
        return [*parts[:place], *self._mine, *parts[place:]]

    def add_up(self) -> None:
        """Add this rank's part up when it has come, and send it to all."""
        self._work.wait()
        total, nodes = TreeSum(self.state.count), [node for nodes in self.state.nodes for node in nodes]
        for node, part in zip(nodes, self._arrived(), strict=True):
            total.add(node, [part])
        (mean,) = total.total
        self._whole, size = self._buffer, self._part * self.state.world_size
        if size != self.size:  # Otherwise DDP need not copy the mean from another tensor.
            self._whole = self._buffer.new_empty(size)
        own = self._whole[self.state.rank * self._part :][: self._part]
        torch.mul(mean, self.state.scale, out=own[: self._own])
        # Into one tensor, since gloo copies what it gathers into a list.
        self._work = dist.all_gather_into_tensor(self._whole, own, group=self.state.group, async_op=True)

    def end(self) -> None:
        """Hand the mean to DDP."""
        self._work.wait()
        self.future.set_result(self._whole[: self.size])


def _reduce_bucket(state: GradientSum, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: buckets are sent at once, and added up while the next ones are computed."""
    new = _Bucket(state, bucket)
    state.buckets.append(new)
    if len(state.buckets) > 1:
        state.buckets[-2].add_up()
    if bucket.is_last():
        new.add_up()
        for each in state.buckets:
            each.end()
        state.buckets.clear()
    return new.future
