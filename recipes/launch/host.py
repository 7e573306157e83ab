"""What is settled before anything starts: who started us, precision, memory allocation, and who prints.

`launch_plan` says which part of the run this process is, `rendezvous` has the ranks meet, `watch` ends them together.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only

from callbacks.lib import lightning_internals
from datamodules.errors import UserError
from recipes.failures.monitor import leave, watch, watched
from recipes.failures.rendezvous import meet
from recipes.launch.devices import machine
from recipes.launch.interfaces import interface_towards
from recipes.launch.plan import MARK, Command, Launch, LaunchSettings, check_precision, plan_launch

__all__ = [
    "Command",
    "Launch",
    "LaunchSettings",
    "Precision",
    "backend_of",
    "begin",
    "bf16_unit",
    "check_precision",
    "is_rank_zero",
    "leave",
    "machine",
    "plan_launch",
    "resolve_precision",
    "set_collective_timeout",
    "stop_gpu_search",
    "tune_allocator",
    "watched",
]

Precision = Literal[
    "auto",
    "32",
    "64",
    "16-mixed",
    "bf16-mixed",
    "16-true",
    "bf16-true",
    "32-true",
    "64-true",
    "transformer-engine",
    "transformer-engine-float16",
    32,
    64,
]

log = logging.getLogger("lightning_recipes.launch")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def is_rank_zero() -> bool:
    """Whether this process speaks for the run.

    `begin` tells Lightning's ``rank_zero_only``, which this asks and which everything that rank 0 does alone goes
    through; before that the launchers' variables have to do.
    """
    return not getattr(rank_zero_only, "rank", 0) and os.environ.get("NODE_RANK", "0") == "0"


def begin(launch: Launch, runs: Callable[[], dict[str, Any]], settings: LaunchSettings, command: Command) -> Launch:
    """Take the part in the run that was planned: meet the other ranks, and watch over them.

    Sets the environment variables from which Lightning's own environment reads the same.

    Args:
        runs: finds what has to be the same on all ranks, by name; called only where there are several.

    Returns:
        The launch, with the address and the port that were chosen.

    Raises:
        UserError: the ranks do not meet, or do not run the same.
    """
    rank_zero_only.rank = launch.rank  # type: ignore[attr-defined]
    for name in ("NODE_RANK", "LOCAL_RANK", *(("RANK", "WORLD_SIZE") if launch.spawns else ())):
        os.environ.pop(name, None)
    if launch.address is None:
        return launch
    if launch.elastic and launch.num_nodes > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # An agent tells the address of its store in its first round only. We are its child, too late to set it.
        log.warning(
            "warning: this torchrun takes in no node that comes back or comes later; for that, start it on every node"
            " with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    meeting = meet(launch, runs(), settings.rendezvous_timeout, command)
    address, port = meeting.address, meeting.port
    if (address, port) != (launch.address, launch.port):
        # Of our own making, so torch shall not look for the agent behind it.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=str(launch.node_rank))
    os.environ[MARK] = launch.launcher
    if launch.num_nodes > 1 and (interface := interface_towards(address)):
        # Gloo takes the address of the host's name, which on many systems is 127.0.0.1 and no use to other nodes.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not launch.spawns:
        os.environ["LOCAL_RANK"] = str(launch.local_rank)
    watch(launch, meeting.store, address)
    if meeting.problem:
        raise UserError(f"it does not run the same as rank 0: {meeting.problem}")
    return replace(launch, address=address, port=port)


def backend_of(trainer: pl.Trainer) -> str:
    """What carries the collective calls: nccl, gloo or another."""
    named = getattr(trainer.strategy, "process_group_backend", None)
    device = trainer.strategy.root_device.type
    return named or torch.distributed.Backend.default_device_backend_map.get(device, "gloo")


def set_collective_timeout(trainer: pl.Trainer, seconds: float) -> None:
    """How long a rank waits for the others in a collective call."""
    lightning_internals.set_collective_timeout(trainer.strategy, timedelta(seconds=seconds))


def tune_allocator() -> bool:
    """Have glibc keep large blocks instead of returning them to the system at every step.

    Training on a CPU otherwise spends a fifth to a half of its time in page faults: 1.2 to 2.1 times faster with this,
    for up to 8 % more memory. It must run before the first large allocation.

    Returns:
        Whether it was done: on Linux with glibc, unless the user has set MALLOC_MMAP_THRESHOLD_ already.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(done)


def stop_gpu_search() -> None:
    """Where there is no NVIDIA GPU, have torch remember that instead of looking again in every step.

    Adam asks in each step whether a GPU records a graph. Importing Lightning sets PYTORCH_NVML_BASED_CUDA_CHECK, which
    makes a torch built for CUDA search the disk for a driver's library each time: 0.1 to 0.6 ms, as much as all the
    rest of a small step. The variable keeps processes forkable that have a GPU; without one there is nothing to keep.
    """
    if not torch.cuda.is_available():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def bf16_unit() -> str:
    """What multiplies bf16 in this CPU; empty where nothing does, and bf16 would be slower than float32."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def resolve_precision(precision: str | int, accelerator: Any = "auto") -> tuple[str, str]:
    """What "auto" means on this machine, and why.

    bf16-mixed where the hardware multiplies bf16 faster than float32: NVIDIA from Ampere on, and CPUs with AMX or
    AVX512-BF16. Other values are returned as they are, without a reason.
    """
    if precision != "auto":
        return str(precision), ""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bf16-mixed", f"{name} is fast at it"
        return "32-true", f"{name} has no fast bf16"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    if on_cpu and (unit := bf16_unit()):
        return "bf16-mixed", f"this CPU has {unit}"
    return "32-true", "no fast bf16 here"
