"""What is settled before anything starts: memory allocation, precision, and who prints."""

import ctypes
import os
import sys
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only

__all__ = ["Precision", "is_rank_zero", "resolve_precision", "stop_gpu_search", "tune_allocator"]

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

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def is_rank_zero() -> bool:
    """Whether this process speaks for the run, by the variables that launchers set."""
    return not getattr(rank_zero_only, "rank", 0) and os.environ.get("NODE_RANK", "0") == "0"


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


def resolve_precision(precision: str | int, accelerator: Any = "auto") -> tuple[str, str]:
    """What "auto" means on this machine, and why.

    bf16-mixed where the hardware multiplies bf16 faster than float32: NVIDIA from Ampere on, and CPUs with AMX. Other
    values are returned as they are, without a reason.
    """
    if precision != "auto":
        return str(precision), ""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bf16-mixed", f"{name} is fast at it"
        return "32-true", f"{name} has no fast bf16"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    if on_cpu and torch.cpu._is_amx_tile_supported():
        return "bf16-mixed", "this CPU has AMX"
    return "32-true", "no fast bf16 here"
