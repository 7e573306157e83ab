"""How much memory a process has taken at most: of its GPU, or of the host."""

import sys
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["peak_memory"]


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on its GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    most = _peak_of_linux() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _peak_of_linux() -> int | None:
    """In kB. Linux starts the peak of `getrusage` at the memory of the process that started this one."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
