"""The Trainer's strategy: Lightning's DDP with less communication, and FSDP2 over all devices."""

import re
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from callbacks.lib.batch_norm import broadcast_tensors, exempt_from_broadcast, running_buffers
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
        if dist.is_initialized():
            broadcast_tensors(running_buffers(self.model))


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


def state_by_name(state: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The state of an optimiser by names of parameters, as torch saves it under FSDP2, from one by numbers.

    Lightning numbers the parameters in their order in the module; an optimiser does in that of its groups.
    """
    if not all(isinstance(key, int) for group in state["param_groups"] for key in group["params"]):
        return state
    names = {parameter: name for name, parameter in module.named_parameters()}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    named = dict(zip(numbers, ordered, strict=True))
    groups = [{**group, "params": [named[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {named[number]: found for number, found in state["state"].items()}, "param_groups": groups}


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

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Split the weights and the optimiser's state of a file, which any strategy may have saved."""
        assert self.model is not None
        path = self.broadcast(checkpoint_path)
        checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        # Strict, torch would refuse layers that have not trained yet.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if any(state["state"].values()):
                named = state_by_name(state, optimizer, self.model)
                set_optimizer_state_dict(self.model, optimizer, named, options=options)
            else:  # As of SGD without momentum, in which torch looks for a tensor.
                optimizer.load_state_dict({**state, "state": {}})
        return checkpoint

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
