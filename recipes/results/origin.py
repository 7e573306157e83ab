"""Where a run comes from: its hardware, and the versions of what it uses."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from recipes.version import __version__

__all__ = ["differences", "environment", "hardware", "versions"]


def _device(trainer: pl.Trainer) -> str:
    """The kind of the devices."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"


def hardware(trainer: pl.Trainer) -> str:
    """The kind and number of the devices, and the threads of each process where they compute."""
    threads = torch.get_num_threads()
    on_cpu = f" with {threads} thread{'s' if threads > 1 else ''}"
    return f"{trainer.world_size} x {_device(trainer)}{on_cpu if trainer.strategy.root_device.type != 'cuda' else ''}"


def _processor() -> str:
    """The model of the CPU and the instructions that torch uses of it."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not on Linux.
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def environment(trainer: pl.Trainer) -> dict[str, Any]:
    """What may change the bits of a run that is trained again or resumed, and how it was split, which does not."""
    return {
        "device": _device(trainer),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        **{name: version for name, version in versions().items() if name != "python"},
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
    }


def differences(before: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What may change the bits and differs between two values of `environment`, in words; empty where nothing does."""
    return "; ".join(
        f"{name} {value}, and {before[name]} in the run"
        for name, value in here.items()
        if name not in ("devices", "num_nodes") and before.get(name, value) != value
    )


def versions() -> dict[str, str]:
    """The versions of this package, Python, torch and Lightning; with a GPU those of CUDA, cuDNN and NCCL."""
    return {
        "lightning-recipes": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "lightning": pl.__version__,
        **(_cuda_versions() if torch.cuda.is_available() else {}),
    }


def _cuda_versions() -> dict[str, str]:
    """The versions of what runs on NVIDIA's GPUs (and of their equivalents on AMD's), without those not found."""
    cudnn = torch.backends.cudnn.version()
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    found = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": str(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }
    return {name: version for name, version in found.items() if version}
