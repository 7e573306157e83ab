"""Devices, fast precision, threads and memory allocator of this machine."""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from callbacks.lib.threads import available_cores
from datamodules.errors import UserError, spelled
from recipes.runner.command import Command
from recipes.runner.variables import cores_of_task

Precision = Literal[
    "auto", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true", "16", "bf16", "32", "64", 16, 32, 64
]
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed"}
"""Names of precisions in other programs."""

_MAX_PROCESSES_PER_CORE = 8


@dataclass(frozen=True)
class Machine:
    """Kind and number of the devices that a run uses here.

    Args:
        kind: torch's name of the kind, or the name of another accelerator.
        count: devices of that kind; None if any number of processes is possible, as on CPUs.
    """

    kind: str
    count: int | None = None


def detect_machine(accelerator: Any = "auto") -> Machine:
    """Return the devices of this machine that ``--accelerator`` selects.

    Raises:
        UserError: the kind of device is not supported.
    """
    name = accelerator if isinstance(accelerator, str) else type(accelerator).__name__.lower()
    name = name.removesuffix("accelerator")
    if name in ("tpu", "xla"):
        problem = "no recipe runs on TPUs; expected auto, cpu, gpu, cuda or mps"
        raise UserError(problem, setting="accelerator", value=name)
    if name in ("gpu", "cuda", "auto") and torch.cuda.is_available():
        return Machine("cuda", torch.cuda.device_count())
    if name in ("gpu", "mps", "auto") and torch.backends.mps.is_available():
        return Machine("mps", 1)
    if name in ("gpu", "cuda", "mps"):
        return Machine("mps" if name == "mps" else "cuda", 0)
    return Machine("cpu" if name == "auto" else name)


def _indices(devices: Any) -> list[int] | None:
    """Return the device indices if `devices` is a list of indices, else None."""
    if isinstance(devices, str) and "," in devices:
        texts = [text.strip() for text in devices.split(",") if text.strip()]
        return [int(text) for text in texts] if all(text.isdigit() for text in texts) else None
    return list(devices) if isinstance(devices, (list, tuple)) else None


def number_of_devices(devices: Any, here: Machine) -> int:
    """Return the number of devices that ``--devices`` requests by a number, "auto", -1, or a list of indices.

    Raises:
        UserError: no device is requested.

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
    indices = _indices(devices)
    if indices is not None:
        text = str(len(indices))
    # The Trainer rejects other values.
    count = int(text) if text.lstrip("-").isdigit() else 1
    if count < 1:
        setting = spelled("devices", devices)
        raise UserError(f"{setting} requests none; pass 1 or more, auto, or indices such as 0,1")
    return count


def devices_of(count: int, asked: Any, here: Machine) -> int | list[int]:
    """Return the devices for `count` started processes: the requested indices, or the first devices.

    Example:
        >>> devices_of(2, "4,5", Machine("cuda", 8)), devices_of(2, "auto", Machine("cuda", 8))
        ([4, 5], 2)
    """
    indices = _indices(asked)
    # The list does not fit a run that restarts with fewer processes than indices.
    return indices if indices and len(indices) == count and here.kind != "cpu" else count


def check_cores(processes: int, requested_devices: Any, command: Command) -> None:
    """Reject devices by index on a CPU, and many more processes than cores.

    Args:
        processes: processes to start on this machine.
        requested_devices: ``--devices``.
        command: the user's command, for the corrected command.
    """
    if "," in str(requested_devices):
        raise UserError(
            f"{spelled('devices', requested_devices)} names devices by number, and the processes of a CPU have none:"
            f" {command.using(devices=processes)}"
        )
    cores = available_cores()
    if processes > _MAX_PROCESSES_PER_CORE * cores:
        raise UserError(
            f"{spelled('devices', processes)} starts {processes} processes on {cores} cores, and each of them needs"
            f" memory for a whole model; expected at most {_MAX_PROCESSES_PER_CORE * cores}, and {cores} train fastest:"
            f" {command.using(devices=cores)}"
        )


def bf16_unit() -> str:
    """Return the instruction set of this CPU for fast bf16, or "" if bf16 is slower than float32."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def resolve_precision(precision: str | int, accelerator: Any = "auto") -> tuple[str, str]:
    """Return the precision that "auto" selects on this machine, and the reason.

    "auto" is bf16-mixed on hardware that multiplies bf16 faster than float32: NVIDIA GPUs from Ampere on, and CPUs with
    AMX or AVX512-BF16. Other values are returned unchanged, without a reason.

    Raises:
        UserError: 16-mixed on a CPU; Lightning would use another precision.
    """
    precision = _SHORT.get(str(precision), precision)
    if precision == "16-mixed" and detect_machine(accelerator).kind == "cpu":
        raise UserError(f"16-mixed needs a GPU, and this run is on the CPU; pass {spelled('precision', 'bf16-mixed')}")
    if precision != "auto":
        return str(precision), ""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.cuda.get_device_capability() >= (8, 0):
            return "bf16-mixed", f"{name} has fast bf16"
        return "32-true", f"{name} has no fast bf16"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    unit = bf16_unit() if on_cpu else ""
    if unit:
        return "bf16-mixed", f"this CPU has {unit}"
    return "32-true", "no fast bf16 here"


def shared_cores(env: Mapping[str, str], processes: int, cores: int) -> int:
    """Return the default number of threads of a process: the node's cores divided by its processes.

    Args:
        env: the environment variables. Slurm may bind each task to separate cores, in the number SLURM_CPUS_PER_TASK.
        processes: number of processes on this node.
        cores: torch's default number of threads: the physical cores of the process's affinity.

    Example:
        >>> [shared_cores({}, processes, cores=8) for processes in (1, 3, 16)]
        [8, 2, 1]
    """
    return min(cores, cores_of_task(env) or max(1, cores // processes))


def tune_allocator() -> bool:
    """Configure glibc to keep large blocks instead of returning them to the system at every step.

    Otherwise, training on a CPU spends a fifth to a half of its time in page faults. With this setting, it is 1.2 to
    2.1 times faster, for up to 8 % more memory. Call this before the first large allocation.

    Returns:
        Whether glibc was configured: on Linux with glibc, unless MALLOC_MMAP_THRESHOLD_ is set.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # The constants of malloc.h: M_MMAP_THRESHOLD is -3, and M_TRIM_THRESHOLD is -1.
    return bool(mallopt(-3, 1 << 30) and mallopt(-1, 2**31 - 1))


def stop_gpu_search() -> None:
    """Stop torch from searching for a GPU in every step, on a machine without an NVIDIA GPU.

    In each step, Adam asks whether a GPU records a graph. Importing Lightning sets PYTORCH_NVML_BASED_CUDA_CHECK, with
    which a torch built for CUDA searches the disk for a driver's library each time: 0.1 to 0.6 ms, as much as the rest
    of a small step. The variable keeps processes with a GPU forkable; without a GPU, it is useless.
    """
    if not torch.cuda.is_available():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
