"""Build the Trainer's strategy: one device, or Lightning's DDP with less communication."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.batch_norm import broadcast_tensors, exempt_from_broadcast, running_buffers
from datamodules.errors import UserError, spelled
from datamodules.lightning import DDPStrategy

_STRATEGY = re.compile(r"auto|ddp(?:_find_unused_parameters_(true|false))?")


class LeanDDPStrategy(DDPStrategy):
    """DDP that trains the same model with less communication.

    Gradients are views of the reduced buckets, which saves a copy, in memory and time. The running statistics of
    BatchNorm are broadcast from rank 0 before each validation and at the end of training, and not before each forward
    pass: training does not read them, so what is evaluated and saved is the same. Other buffers are broadcast as in
    stock DDP.

    Args:
        settings: arguments of `DDPStrategy` and `torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"gradient_as_bucket_view": True, **settings})

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        exempt_from_broadcast(model)

    @override
    def on_validation_start(self) -> None:
        self._broadcast_statistics()

    @override
    def on_train_end(self) -> None:
        self._broadcast_statistics()

    @torch.no_grad()
    def _broadcast_statistics(self) -> None:
        assert self.model is not None
        if dist.is_initialized():
            broadcast_tensors(running_buffers(self.model))


def check_strategy(name: Any) -> None:
    """Refuse a strategy other than one device and DDP.

    Raises:
        UserError: runs cannot train with the strategy.
    """
    if not _STRATEGY.fullmatch(str(name)):
        raise UserError(
            "runs train on one device or with DDP",
            setting="strategy",
            value=name,
            to_type=f"pass {spelled('strategy', 'ddp')}, or leave it out",
        )


def build_strategy(name: str, world_size: int) -> Any:
    """Return the strategy that ``--strategy`` names.

    Args:
        world_size: processes of the run.
    """
    match = _STRATEGY.fullmatch(name)
    if match is None or world_size == 1:
        return name
    if match[1] is None:
        return LeanDDPStrategy()
    return LeanDDPStrategy(find_unused_parameters=match[1] == "true")
