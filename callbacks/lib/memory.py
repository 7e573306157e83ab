"""How much memory a process has taken at most, and how much more the machine has."""

import sys
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["available_memory", "peak_memory"]


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on its GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    # Linux starts the peak of `getrusage` at the memory of the process that started this one.
    most = _high_water_mark() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _high_water_mark() -> int | None:
    """The peak of this process in kB as Linux knows it; None on another system."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def available_memory() -> int:
    """Bytes of the host that programs may still take."""
    import psutil

    return int(psutil.virtual_memory().available)
