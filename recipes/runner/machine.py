"""This machine: its devices, precision, threads and memory."""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from datamodules.errors import UserError

Precision = Literal[
    "auto", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true", "16", "bf16", "32", "64", 16, 32, 64
]
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed"}
"""Names of precisions as other programs write them."""


@dataclass(frozen=True)
class Machine:
    """The kind of device that a run uses here, and how many there are.

    Args:
        kind: as torch names it, or the name of another accelerator.
        count: devices of that kind; None where any number of processes is possible, as on CPUs.
    """

    kind: str
    count: int | None = None


def detect_machine(accelerator: Any = "auto") -> Machine:
    """The devices that ``--accelerator`` stands for on this machine."""
    name = accelerator if isinstance(accelerator, str) else type(accelerator).__name__.lower()
    name = name.removesuffix("accelerator")
    if name in ("gpu", "cuda", "auto") and torch.cuda.is_available():
        return Machine("cuda", torch.cuda.device_count())
    if name in ("gpu", "mps", "auto") and torch.backends.mps.is_available():
        return Machine("mps", 1)
    if name in ("gpu", "cuda", "mps"):
        return Machine("mps" if name == "mps" else "cuda", 0)
    return Machine("cpu" if name == "auto" else name)


def _named(devices: Any) -> list[int] | None:
    """The indices of the devices, where they are given as such; else None."""
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        return [int(part) for part in parts] if all(part.isdigit() for part in parts) else None
    return list(devices) if isinstance(devices, (list, tuple)) else None


def number_of_devices(devices: Any, here: Machine) -> int:
    """How many devices of this machine ``--devices`` means: a number, all of them, or a list of indices.

    Raises:
        UserError: none at all.

    Example:
        >>> gpus = Machine("cuda", 8)
        >>> [number_of_devices(d, gpus) for d in ("auto", -1, 2, "2", "0,3", [5])]
        [8, 8, 2, 2, 2, 1]
        >>> number_of_devices("auto", Machine("cpu"))
        1
    """
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return max(1, here.count or 1)
    if (named := _named(devices)) is not None:
        text = str(len(named))
    # The Trainer refuses what is not a number.
    count = int(text) if text.lstrip("-").isdigit() else 1
    if count < 1:
        raise UserError(f"devices={devices} requests none; pass 1 or more, auto, or indices such as 0,1")
    return count


def devices_of(count: int, asked: Any, here: Machine) -> int | list[int]:
    """The devices of `count` processes that a launcher has started: those that were asked for by index, or the first.

    Example:
        >>> devices_of(2, "4,5", Machine("cuda", 8)), devices_of(2, "auto", Machine("cuda", 8))
        ([4, 5], 2)
    """
    named = _named(asked)
    return named if named and len(named) == count and here.kind != "cpu" else count


def bf16_unit() -> str:
    """The instruction set of this CPU for bf16; empty where it has none, and bf16 is slower than float32."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def resolve_precision(precision: str | int, accelerator: Any = "auto") -> tuple[str, str]:
    """The precision that "auto" stands for on this machine, and the reason.

    bf16-mixed where the hardware multiplies bf16 faster than float32: NVIDIA from Ampere on, and CPUs with AMX or
    AVX512-BF16. Other values are returned unchanged, without a reason.

    Raises:
        UserError: 16-mixed on a CPU, where Lightning would take another one.
    """
    precision = _SHORT.get(str(precision), precision)
    if precision == "16-mixed" and detect_machine(accelerator).kind == "cpu":
        raise UserError("16-mixed needs a GPU, and this run is on the CPU; pass precision=bf16-mixed")
    if precision != "auto":
        return str(precision), ""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bf16-mixed", f"{name} has fast bf16"
        return "32-true", f"{name} has no fast bf16"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    if on_cpu and (unit := bf16_unit()):
        return "bf16-mixed", f"this CPU has {unit}"
    return "32-true", "no fast bf16 here"


def default_threads(env: Mapping[str, str], processes: int) -> int:
    """The threads of one process: OMP_NUM_THREADS, or the cores that PyTorch finds, shared by the processes of a node.

    PyTorch finds the physical cores of the process's affinity. torchrun sets OMP_NUM_THREADS to 1 for several processes
    where it is not set. Slurm may bind each task to cores of its own, as many as SLURM_CPUS_PER_TASK.
    """
    cores = torch.get_num_threads()
    if "OMP_NUM_THREADS" in env:
        return cores
    of_task = env.get("SLURM_CPUS_PER_TASK", "")
    return min(cores, int(of_task)) if of_task.isdigit() else max(1, cores // processes)


def tune_allocator() -> bool:
    """Have glibc keep large blocks instead of returning them to the system at every step.

    Otherwise training on a CPU spends a fifth to a half of its time in page faults. With this it is 1.2 to 2.1 times
    faster, for up to 8 % more memory. Call it before the first large allocation.

    Returns:
        Whether it was done: on Linux with glibc, unless MALLOC_MMAP_THRESHOLD_ is set.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    mmap_threshold, trim_threshold = -3, -1
    return bool(mallopt and mallopt(mmap_threshold, 1 << 30) and mallopt(trim_threshold, 2**31 - 1))


def stop_gpu_search() -> None:
    """On a machine without an NVIDIA GPU, stop torch from looking for one in every step.

    Adam asks in each step whether a GPU records a graph. Importing Lightning sets PYTORCH_NVML_BASED_CUDA_CHECK, which
    makes a torch built for CUDA search the disk for a driver's library each time: 0.1 to 0.6 ms, as much as the rest of
    a small step. The variable keeps processes with a GPU forkable; without a GPU it has no use.
    """
    if not torch.cuda.is_available():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
