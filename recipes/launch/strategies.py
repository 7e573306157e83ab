"""The Trainer's strategy: Lightning's DDP with less communication, and FSDP2 over all devices."""

import re
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.batch_norm import exempt_from_broadcast, running_buffers
from datamodules.errors import UserError

__all__ = ["Compression", "FSDP2Strategy", "LeanDDPStrategy", "build_strategy"]

Compression = Literal["bf16", "fp16"]

_HOOKS: dict[str, Any] = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


class _StatisticsOfRankZero:
    """Broadcasts the running statistics of BatchNorm from rank 0 before what they are for: evaluating and saving."""

    model: nn.Module | None

    def on_validation_start(self) -> None:
        self._broadcast_statistics()

    def on_train_end(self) -> None:
        self._broadcast_statistics()

    @torch.no_grad()
    def _broadcast_statistics(self) -> None:
        assert self.model is not None
        for buffers in running_buffers(self.model) if dist.is_initialized() else ():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, 0)
            for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(value.view_as(buffer))


class LeanDDPStrategy(_StatisticsOfRankZero, DDPStrategy):
    """DDP that trains the same model with less communication.

    Gradients are views of the buckets that are reduced, which saves a copy of them, in memory and time. The running
    statistics of BatchNorm are broadcast from rank 0 before each validation and at the end of training, and not before
    each forward pass: training does not read them, and what is evaluated and saved is the same. Other buffers are
    broadcast as in stock DDP.

    Args:
        compression: the data type in which gradients are reduced; by default their own.
        settings: of `DDPStrategy` and `torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(self, compression: Compression | None = None, **settings: Any) -> None:
        super().__init__(**{"gradient_as_bucket_view": True, **settings})
        self.compression = compression

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        exempt_from_broadcast(model)
        if self.compression is not None:
            # Lightning registers hooks on GPUs only; gloo reduces both data types, too.
            model.register_comm_hook(None, _HOOKS[self.compression])


class FSDP2Strategy(_StatisticsOfRankZero, ModelParallelStrategy):
    """FSDP2 over all devices of the run; each layer that is not split has to be equal on all ranks.

    Lightning's default would use the devices of a node for tensor parallelism: parameters that `configure_model` splits
    over ``device_mesh["data_parallel"]`` would stay whole, and no gradient would be reduced. A checkpoint is one file,
    which any strategy loads.

    Args:
        world_size: processes of the run.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, 1, save_distributed_checkpoint=False)

    def _gather_weights(self) -> None:
        """Hold the weights in full while a model is evaluated: the ranks may have unequal numbers of batches."""
        for module in self._split_modules():
            module.set_reshard_after_forward(False)
            module.unshard()

    def _split_weights(self) -> None:
        for module in self._split_modules():
            module.set_reshard_after_forward(True)
            module.reshard()

    def _split_modules(self) -> list[FSDPModule]:
        assert self.model is not None
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._gather_weights()

    on_test_start = on_predict_start = _gather_weights
    on_validation_end = on_test_end = on_predict_end = _split_weights


def build_strategy(
    name: Any, world_size: int, accelerator: Any = "auto", compression: Compression | None = None
) -> Any:
    """What the Trainer gets for ``--strategy``; names of Lightning's that are not known here stay.

    Args:
        name: of the strategy.
        world_size: processes of the run.
        accelerator: of the Trainer.
        compression: see `LeanDDPStrategy`; of no effect in one process, which reduces nothing.

    Raises:
        UserError: another strategy cannot compress gradients.

    Example:
        >>> build_strategy("auto", world_size=1), build_strategy("deepspeed", world_size=2)
        ('auto', 'deepspeed')
    """
    if name == "fsdp2":
        strategy: Any = FSDP2Strategy(world_size)
    elif isinstance(name, str) and accelerator not in ("tpu", "hpu", "mps") and world_size > 1:
        found = re.fullmatch(r"auto|ddp(?:_find_unused_parameters_(true|false))?", name)
        unused = {} if found is None or found[1] is None else {"find_unused_parameters": found[1] == "true"}
        strategy = name if found is None else LeanDDPStrategy(compression, **unused)
    else:
        strategy = name
    if compression is not None and world_size > 1 and not isinstance(strategy, LeanDDPStrategy):
        raise UserError(
            f"--strategy {name} reduces gradients in its own way and cannot compress them: pass --strategy ddp, or"
            f" leave --gradient-compression {compression} out"
        )
    return strategy
