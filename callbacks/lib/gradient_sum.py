"""Mean gradient of an update, bit-identical on any number of ranks that share its micro-batches.

DDP adds the gradients of all ranks in an order that depends on their number. Here the gradients of the micro-batches
are added in the order of the tree of `callbacks.lib.exact_sums`. Under DDP this is a communication hook: as in a
reduce-scatter, each rank adds one slice of each bucket; an all-gather returns the slices to all ranks.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from callbacks.lib.batch_norm import OrderedStatistics
from callbacks.lib.exact_sums import Node, TreeSum, nodes_by_rank, total_over_ranks
from datamodules.errors import UserError
from datamodules.lightning import pl
from datamodules.loading.randomness import widest_float
from datamodules.loading.sampling import range_of_rank

Result = TypeVar("Result")


def without_backward(
    module: pl.LightningModule, parameters: Sequence[Tensor], step: Callable[..., Result], *args: Any
) -> Result:
    """Call a function that runs `training_step`, and check that it computes no gradient of the parameters.

    Meanwhile ``.grad`` is None, on any number of devices: `zero_grad` and clipping find nothing to change, and what is
    there afterwards was computed. The gradients of the last update are put back for `on_before_zero_grad`.

    Raises:
        UserError: the function has computed gradients.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    result = step(*args)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not None:
            raise UserError(
                f"{type(module).__name__}.training_step calls backward() itself, and an update is the mean of the"
                " losses that it returns: add that loss to the one it returns, take gradients of inputs by"
                " torch.autograd.grad, or set automatic_optimization = False"
            )
        parameter.grad = gradient
    return result


def reject_kept_gradients(module: pl.LightningModule, parameters: Sequence[Tensor]) -> None:
    """Check that the module's own `optimizer_zero_grad` has left no gradient; waits for the device.

    Raises:
        UserError: a parameter has a gradient of another update.
    """
    if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
        raise UserError(
            f"{type(module).__name__}.optimizer_zero_grad keeps gradients of another update, and an update is the mean"
            " of its own micro-batches: leave it out, and pass GradientAccumulation(n)"
        )


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
        # A single sum is sent without a copy. The slice of this rank is included if it lies between others.
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


def most_of_rank(count: int, world_size: int) -> int:
    """Return the largest number of micro-batches of a rank in an update of `count` micro-batches; at least 1."""
    return -(-count // world_size)


class GradientSum:
    """Sum of the gradients of an update: ``.grad`` becomes the mean over all targets of micro-batches and ranks.

    Compute each micro-batch within `micro_batch`, and call `scale_loss` with its mean loss before the backward pass.
    After the last one ``.grad`` holds the mean. Each rank computes its range of the micro-batches. A rank without one
    computes a stand-in from any inputs, whose gradients do not count.

    `UpdateLoop` calls the same methods as `micro_batch`: `start_update` at an update's start and `collect` after each
    backward pass. All backward passes of a rank but the last run within DDP's ``no_sync()``.

    It holds at most log2(micro-batches) + 1 gradients; with one micro-batch, one.

    Args:
        model: the module to train, or DDP around it, whose reduction is replaced.
        expected_count: targets of an ordinary micro-batch. Gradients are relative to it, so float16 keeps its range.

    Raises:
        UserError: DDP has a static graph or a communication hook, or an embedding has sparse gradients.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> gradients = GradientSum(model)
        >>> for inputs in (torch.zeros(1, 2), torch.ones(2, 2)):
        ...     with gradients.micro_batch(num_micro_batches=2):
        ...         loss = model(inputs).mean()
        ...         gradients.scale_loss(loss, count=len(inputs))
        ...         loss.backward()
        >>> model.weight.grad
        tensor([[0.6667, 0.6667]])
    """

    def __init__(self, model: nn.Module, expected_count: float = 1.0) -> None:
        self.model = model
        self.expected_count = expected_count
        self.group: Any = None
        self.rank = 0
        self.world_size = 1
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            raise UserError("sparse gradients have no fixed order of addition: pass sparse=False to the embedding")
        if isinstance(model, DistributedDataParallel):
            self.group = model.process_group
            self.rank = dist.get_rank(self.group)
            self.world_size = dist.get_world_size(self.group)
        if self.world_size > 1:
            self._replace_reduction()
        self.parameters: list[nn.Parameter] = []
        """Parameters that require a gradient in this update."""
        self._hooks: list[Any] = []
        self.is_open = False
        """Whether an update was begun and its last micro-batch is still to come."""
        self.keeps_loss = False
        """Whether `mean_loss` will be called, as for an optimizer with a line search."""

    def _replace_reduction(self) -> None:
        if self.model.static_graph:
            raise UserError("DDP(static_graph=True) reduces before all gradients are known: leave it out")
        try:
            self.model.register_comm_hook(self, reduce_bucket)  # type: ignore[operator]
        except RuntimeError as error:
            raise UserError(
                f"DDP has a communication hook already, which adds gradients in its own way ({error}): leave it out"
            ) from error

    @contextlib.contextmanager
    def micro_batch(self, num_micro_batches: int, statistics: OrderedStatistics | None = None) -> Iterator[None]:
        """Run one micro-batch: forward pass, `scale_loss` and backward pass. DDP communicates in a rank's last one.

        Afterwards `is_last` tells whether the update is complete.

        Args:
            num_micro_batches: number of micro-batches of the update on all ranks, as `Update.count`.
            statistics: running statistics of the model's BatchNorm layers.
        """
        if not self.is_open:
            self.start_update(num_micro_batches)
        if statistics is not None:
            statistics.begin()
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if isinstance(self.model, DistributedDataParallel) and self._step < self._steps - 1:
            context = self.model.no_sync()
        try:
            with context:
                yield
            if statistics is not None and self.tree_leaf is not None:
                statistics.collect()
        finally:
            self.release()
            if statistics is not None:
                statistics.restore()
        self.collect()
        if statistics is not None and self.is_last:
            statistics.finish(most_of_rank(self.count, self.world_size))

    def start_update(self, count: int | None) -> None:
        """Begin an update of `count` micro-batches.

        Args:
            count: their number on all ranks, of which each computes a range. None if it is unknown: each rank adds its
                own micro-batches, equally many on each, and the ranks' sums are added in the order of the ranks. The
                bits then depend on the number of ranks.
        """
        self.count = self.world_size if count is None else count
        self.nodes = nodes_by_rank(self.count, self.world_size)
        self.sums = TreeSum(count)
        self._targets = TreeSum(count)
        self._losses = TreeSum(count)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._used: set[int] = set()
        self.buckets: list[BucketReduction] = []
        self._numbers = range(*range_of_rank(self.count, self.rank, self.world_size))
        self._step = 0
        self._steps = max(1, len(self._numbers))
        self._is_counted = count is not None
        self.is_open = False
        self._mask: Tensor | bool = True
        self._has_targets: bool | None = False
        """Whether a micro-batch of this rank has targets; None if only the device knows."""

    @property
    def tree_leaf(self) -> Node | None:
        """The tree's leaf of the present micro-batch; None for a stand-in."""
        if not self._is_counted:
            return self._step, self._step + 1
        number = self._numbers.start + self._step
        return (number, number + 1) if number in self._numbers else None

    def scale_loss(self, loss: Tensor | None, count: float | Tensor, last: bool | None = None) -> None:
        """Scale a mean loss by ``count / expected_count``, so that its gradients can be summed over micro-batches.

        Args:
            loss: the mean loss; None if there is no backward pass.
            count: number of targets behind the mean.
            last: whether this is the rank's last micro-batch; needed if `start_update` was called without a count.
        """
        self.is_last = self._step == self._steps - 1 if last is None else last
        device = self.parameters[0].device
        dtype = widest_float(device)
        self._targets_dtype = dtype
        self._note_targets(count)
        weight = torch.as_tensor(count).detach().to(device, dtype, non_blocking=True) / self.expected_count
        if self.tree_leaf is not None:
            self._targets.add(self.tree_leaf, [weight.clone()])
            if self.keeps_loss and loss is not None:
                # A mean over no target may be NaN, which a product with 0 would keep.
                weighted_loss = torch.where(weight > 0, loss.detach().to(dtype) * weight, 0.0)
                self._losses.add(self.tree_leaf, [weighted_loss])
        if self._step == 0:
            for parameter in self.parameters:
                parameter.grad = None
        if self.is_last:
            self._share_targets(weight)
            if isinstance(self.model, DistributedDataParallel) and self.model.find_unused_parameters:
                self._mark_used_parameters()
        if loss is not None and loss.requires_grad:

            def scale(gradient: Tensor) -> Tensor:
                # The incoming gradient is 1 or the power of two of a GradScaler, so the product is exact.
                return (weight * gradient).to(gradient.dtype)

            loss.register_hook(scale)

    def _note_targets(self, count: float | Tensor) -> None:
        """Note whether the micro-batch has targets, and mask its gradients if it may have none."""
        if isinstance(count, Tensor) and count.device.type != "cpu":
            self._mask = count.detach() > 0  # Known to the device only, for which the host does not wait.
        else:
            self._mask = bool(count > 0)
        if self.tree_leaf is None or self._has_targets or self._mask is False:
            return
        self._has_targets = True if self._mask is True else None

    def _masked(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the present micro-batch, or zeros if it has no target.

        The gradient of a mean over no target may be NaN, which a weight of 0 would keep.
        """
        if self._mask is True:
            return gradient
        if self._mask is False:
            return torch.zeros_like(gradient)
        return torch.where(self._mask, gradient, 0.0)

    def is_empty(self) -> bool:
        """Whether the update had no target on any rank; for after the last `collect`.

        Where the number of targets is on an accelerator, it is False: the host does not wait for it.
        """
        if self._has_targets is False:
            return not bool(self.total > 0)
        return False

    def skips_on_device(self) -> Tensor | None:
        """Return a flag on the device that is 1 if the update had no target; None if the host knows."""
        return (self.total == 0).float() if self._has_targets is None else None

    def _mark_used_parameters(self) -> None:
        """Give a gradient to each parameter that an earlier micro-batch of the update has used.

        With `find_unused_parameters` DDP expects one from the steps within ``no_sync()`` that used the parameter.
        """
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in self._used else None
            if self.tree_leaf is None and parameter.grad is None:
                # A parameter that only a stand-in uses is unused: without a gradient, DDP does not count it as used.
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))

    def release(self) -> None:
        """Remove the hooks on parameters; `collect` does so unless a step has raised."""
        while self._hooks:
            self._hooks.pop().remove()

    def collect(self) -> None:
        """Add the gradients of the micro-batch to the sum; after the update's last one ``.grad`` holds the mean."""
        self.is_open = not self.is_last
        self.release()
        if self.is_last and self.world_size > 1:
            return  # The communication hook has written the mean into `.grad`.
        if self.tree_leaf is not None:
            self.sums.add(self.tree_leaf, [self._pop_gradient(parameter) for parameter in self.parameters])
        if not self.is_last:
            self._step += 1
            return
        self.sums.end(self._step + 1)
        torch._foreach_mul_(self.sums.total, self.scale)
        for parameter, gradient in zip(self.parameters, self.sums.total, strict=True):
            if id(parameter) in self._used:
                parameter.grad = gradient.to(parameter.dtype)

    def _pop_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Remove and return the gradient of the present micro-batch."""
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            # Zeros, since another micro-batch of the same node may have a gradient.
            return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        self._used.add(id(parameter))
        return self._masked(widened(gradient))

    def _rank_sums(self, sums: TreeSum) -> list[list[Tensor]]:
        """Return this rank's sums, one for each of its nodes."""
        if not self._is_counted:
            sums.end(self._step + 1)
        return [tensors for _, tensors in sums.nodes]

    def mean_loss(self) -> Tensor:
        """Return the mean loss over all targets of the update, equal on all ranks.

        Needs `keeps_loss`. A collective call: all ranks must call it.
        """
        like = self.parameters[0].new_zeros((), dtype=self._targets_dtype)
        losses = [loss for (loss,) in self._rank_sums(self._losses)]
        return total_over_ranks(losses, self.nodes, like, group=self.group)() * self.scale

    def _share_targets(self, like: Tensor) -> None:
        """Start to sum the weights of all micro-batches, in the order of the tree."""
        weights = [weight for (weight,) in self._rank_sums(self._targets)]
        self._wait_for_total = total_over_ranks(weights, self.nodes, like, group=self.group)
        self._total: Tensor | None = None
        self._scale: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Sum of the weights of all micro-batches; known from the update's last `scale_loss` on."""
        if self._total is None:
            self._total = self._wait_for_total()
        return self._total

    @property
    def scale(self) -> Tensor:
        """Factor from the sum of the gradients to their mean; known from the update's last `scale_loss` on."""
        if self._scale is None:
            self._scale = torch.where(self.total > 0, 1 / self.total, 1.0)
        return self._scale

    def flat_sums(self, parameters: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
        """Return this rank's sums over the parameters of a bucket, flattened like it, with its last micro-batch."""
        indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        total = TreeSum(self.sums.count)
        for node, tensors in self.sums.nodes:
            # Not by GradBucket.gradients(), which has the strides of contiguous parameters.
            total.add(node, [torch.cat([in_memory_order(tensors[indices[id(p)]], p) for p in parameters])])
        if self.tree_leaf is not None:
            total.add(self.tree_leaf, [self._masked(widened(buffer))])
        return [flat for (flat,) in self._rank_sums(total)]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
