"""What makes bits depend on the number of devices or on a resume: warnings in the first update, and unsaved state."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from callbacks.lib.batch_norm import OrderedStatistics, is_synchronized, other_buffers
from callbacks.lib.loaded_updates import update_loaders
from callbacks.lib.ranks import checksum
from datamodules.errors import UserError
from datamodules.lightning import is_overridden
from datamodules.notes import warn


def plain_numbers(module: nn.Module) -> dict[str, Any]:
    """Return the public plain attributes of the layers that hold a number, a tensor of one element or None, by name.

    None may stand for a number that is still to come. torchmetrics objects are left out.

    Example:
        >>> network = nn.Sequential(nn.Dropout(0.5))
        >>> network.baseline = 2.0
        >>> plain_numbers(network)
        {'baseline': 2.0, '0.p': 0.5}
    """
    numbers = {}
    for layer_name, layer in module.named_modules():
        prefix = f"{layer_name}." if layer_name else ""
        # isinstance() would ask each of the hundred classes of torchmetrics.
        if Metric in type(layer).__mro__:
            continue
        for name, value in vars(layer).items():
            is_scalar = isinstance(value, Tensor) and value.numel() == 1
            if (is_scalar or value is None or type(value) in (int, float)) and not name.startswith("_"):
                numbers[prefix + name] = value
    return numbers


def unsaved_state(module: nn.Module) -> dict[str, float]:
    """Return what a module may compute with and no checkpoint holds, by name, with a checksum of each buffer."""
    state = {name: float(value) for name, value in plain_numbers(module).items() if value is not None}
    for layer_name, layer in module.named_modules():
        for name in sorted(layer._non_persistent_buffers_set):
            buffer = layer._buffers.get(name)
            if buffer is not None:
                state[f"{layer_name}.{name}".lstrip(".")] = float(checksum(buffer))
    return state


_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")
"""Functions of torch.distributed with which modules share values between devices."""


def _is_same(number: tuple[Any, int] | None, before: tuple[Any, int]) -> bool:
    """Whether a plain attribute holds the same number as before; None if it holds no number now."""
    if number is None or number[1] != before[1]:
        return False
    value = number[0]
    # By their texts, since NaN differs from itself.
    return value is before[0] or (not isinstance(value, Tensor) and repr(value) == repr(before[0]))


class FirstUpdate:
    """Comparison of a module's parameters and buffers before the first and after the last forward pass of an update.

    Args:
        trainer: a Trainer whose updates are sums over micro-batches.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        for parameter in self.module.parameters():
            parameter.grad = None  # Gradients from before the fit would be added to the update's.
        self._has_run = False
        # The values are kept, so that a new tensor cannot get the address of one that it has replaced.
        self._values = {name: p.detach() for name, p in self.module.named_parameters()}
        self._versions = self._parameter_versions()
        self._rows: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._numbers: dict[str, tuple[Any, int]] = {}
        # Values are compared only on several devices, since that waits for the device.
        if trainer.world_size > 1:
            self._rows = {name: row.clone() for name, row in self._parameter_rows().items()}
            self._buffers = {name: buffer.clone() for name, buffer in other_buffers(self.module).items()}
            self._numbers = self._plain_numbers()

    def _parameter_versions(self) -> dict[str, tuple[int, int]]:
        # An assignment to `.data` changes the address, an operation in place the version, unless it is one on `.data`.
        return {name: (p.data_ptr(), p._version) for name, p in self.module.named_parameters()}

    def _plain_numbers(self) -> dict[str, tuple[Any, int]]:
        # With the version of a tensor, which is not read, since that waits for the device.
        numbers = plain_numbers(self.module)
        return {name: (value, value._version if isinstance(value, Tensor) else 0) for name, value in numbers.items()}

    def _parameter_rows(self) -> dict[str, Tensor]:
        # The last row of each matrix: a copy of a large frozen network may not fit into memory.
        parameters = {name: p.detach() for name, p in self.module.named_parameters()}
        return {name: p[-1:] if p.dim() > 1 else p for name, p in parameters.items()}

    @contextlib.contextmanager
    def watched_collectives(self) -> Iterator[None]:
        """Run the first forward pass of a fit, and reject collective calls if devices have unequal numbers of them.

        Raises:
            UserError: the pass calls a collective, and some update has one micro-batch more on some devices.
        """
        division = update_loaders(self.trainer.train_dataloader)[0].division
        world_size = self.trainer.world_size
        counts = set() if division is None else {division.micro_batches_of(n) for n in (0, division.updates - 1)}
        indivisible = [count for count in sorted(counts) if count % world_size]
        # Layers of SyncBN call collectives, and have stand-ins for unequal numbers.
        if self._has_run or not indivisible or any(map(is_synchronized, self.module.modules())):
            yield
            return
        called: list[str] = []

        def noted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                called.append(name)
                return collective(*args, **kwargs)

            return call

        collectives = {name: getattr(dist, name) for name in _COLLECTIVES}
        for name, collective in collectives.items():
            setattr(dist, name, noted(name, collective))
        try:
            yield
        finally:
            for name, collective in collectives.items():
                setattr(dist, name, collective)
        if called:
            raise UserError(
                f"{type(self.module).__name__}.training_step calls torch.distributed.{called[0]}, which waits for all"
                f" devices in each micro-batch, and an update has {indivisible[0]} micro-batches for {world_size}"
                " devices: pass a global batch and a number of samples of which each device computes equally many"
                " micro-batches"
            )

    def check_forward(self, statistics: OrderedStatistics) -> None:
        """Warn of repeated BatchNorm layers and of loaders without numbers, after the first forward pass."""
        if self._has_run:
            return
        self._has_run = True
        repeated = statistics.repeated()
        if repeated:
            warn(
                f"note: {len(repeated)} {type(repeated[0]).__name__} layers are called more than once in a"
                " training_step: their running statistics follow the last call"
            )
        if self.trainer.world_size > 1:
            self._warn_of_device_dependence()

    def check_changes(self) -> None:
        """Warn of buffers, parameters and numbers that have changed, after the last micro-batch."""
        buffers = other_buffers(self.module)
        changed_buffers = [
            name for name, value in self._buffers.items() if not torch.equal(buffers.get(name, value), value)
        ]
        if changed_buffers:
            warn(f"note: {changed_buffers[0]} changes with each micro-batch: the bits depend on the number of devices")
        numbers = self._plain_numbers()
        changed_numbers = [name for name, value in self._numbers.items() if not _is_same(numbers.get(name), value)]
        if changed_numbers:
            warn(
                f"note: {changed_numbers[0]} changes with each micro-batch: if the training depends on it, the bits"
                " depend on the number of devices; change it once per update, in on_train_batch_end"
            )
        versions = self._parameter_versions()
        changed = [name for name, version in self._versions.items() if versions.get(name, version) != version]
        if not changed and self._rows:
            rows = self._parameter_rows()
            changed = [name for name, row in self._rows.items() if not torch.equal(rows.get(name, row), row)]
        if changed:
            first = f"{changed[0]} (the first of {len(changed)} parameters)" if len(changed) > 1 else changed[0]
            warn(
                f"note: {first} changes with each micro-batch, as a teacher that training_step moves: the bits depend"
                " on the number of devices; change it once per update, in on_train_batch_end"
            )

    def _has_trained_parameters(self) -> bool:
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        return any(id(parameter) in trained for parameter in self.module.parameters())

    def _warn_of_device_dependence(self) -> None:
        loaders = update_loaders(self.trainer.train_dataloader)
        if any(loader.division is None for loader in loaders):
            name = next(type(loader.source).__name__ for loader in loaders if loader.division is None)
            warn(
                f"note: a {name} does not number its micro-batches: on another number of devices its updates hold"
                " other samples and other noise; use a DataLoader over a data set with a length and a sampler of torch,"
                " or a loader of datamodules, for equal bits"
            )
        if not self._has_trained_parameters():
            warn(
                f"note: no optimizer trains a parameter of {type(self.module).__name__}: what it computes otherwise, as"
                " from batches that it keeps, depends on the number of devices"
            )
        elif any(map(is_synchronized, self.module.modules())):
            warn("note: SyncBN normalizes over what the devices see in one step: the bits depend on their number")
        if is_overridden("backward", self.module):
            warn(
                f"note: {type(self.module).__name__}.backward runs for each micro-batch, and on several devices finds"
                " the mean of all after the last one: change gradients in on_after_backward, which finds it on any"
                " number of devices"
            )


class DrawnNumbers:
    """Comparison of the generators' states before and after the first update of a run that no `SeedControl` seeds.

    Args:
        trainer: a Trainer that is resumed or trains on several devices.
    """

    def __init__(self, trainer: Any) -> None:
        self._device = trainer.strategy.root_device
        self._states = self._generator_states()

    def _generator_states(self) -> list[Any]:
        numpy_state: Any = np.random.get_state()
        states = [random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device).tolist())
        return states

    def finish(self) -> None:
        """Warn if random numbers were drawn."""
        if self._generator_states() != self._states:
            warn(
                "note: the run draws random numbers without SeedControl: they depend on the number of devices, and"
                " differ after a resume; begin runs with callbacks=[SeedControl(seed=1), ...] for equal bits"
            )
