"""How much memory a process has taken at most, and how much more it may take: of its GPU, or of the host.

A process of the host that takes too much is killed by the kernel, without an exception. So the limits are read: those
of its cgroups, its own (``ulimit``), and what the machine has left.
"""

import ctypes
import gc
import math
import sys
from contextlib import suppress
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    "MemoryPeak",
    "available_memory",
    "is_limited_by_ulimit",
    "peak_memory",
    "release_memory",
    "used_memory",
]

# Where each version of cgroups is, and its files: limit, usage, and the key of cached files, which give way.
_CGROUPS = {
    "": (("", "unified"), "memory.max", "memory.current", "inactive_file"),
    "memory": (("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}

# Of a limit of the process. It counts addresses, and fragments that the allocator keeps take a part of them.
_OF_LIMIT = 0.75


def used_memory(device: torch.device) -> int:
    """Bytes that this process holds now: tensors on its GPU, or memory of the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on its GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    # Linux starts the peak of `getrusage` at the memory of the process that started this one.
    most = _kernel_status("VmHWM").get("VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return most if sys.platform == "darwin" else most * 1024


def _kernel_status(*names: str) -> dict[str, int]:
    """What Linux knows of this process, in kB; nothing on another system."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    status = dict(line.split(":", 1) for line in lines)
    return {name: int(status[name].split()[0]) for name in names if name in status}


def _process_use() -> dict[int, int]:
    """Bytes that count against the limits of this process (``ulimit -d`` and ``-v``), by limit in bytes."""
    use = _kernel_status("VmData", "VmSize")
    kinds = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")) if use else ()
    limits = {resource.getrlimit(kind)[0]: 1024 * use[name] for kind, name in kinds}
    return {limit: used for limit, used in limits.items() if limit != resource.RLIM_INFINITY}


def release_memory(device: torch.device) -> None:
    """Give back what Python and the allocators keep for later."""
    gc.collect()  # Frames of an exception refer to each other.
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    elif sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class MemoryPeak:
    """What a process takes at most from here on, in bytes beyond what it holds now.

    On a GPU that is what the allocator reserves, so fragmentation is counted. On a host whose peak cannot be set back,
    an earlier and higher one counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release_memory(device)
        self._before = used_memory(device)

    def reset(self) -> None:
        """Forget the peak, and give back what the allocator keeps."""
        release_memory(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):  # Linux only.
                Path("/proc/self/clear_refs").write_text("5")

    def taken(self) -> int:
        """Bytes beyond those at the beginning, since the last `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) - self._before
        return max(0, peak_memory(self.device) - self._before)


def _number(path: Path) -> int | None:
    """A file's number; None where there is none, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def cgroup_memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that each memory cgroup of this process still allows, of version 1 or 2; cached files are not counted."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in lines:
        for name in {""} & {controllers} or {"memory"} & set(controllers.split(",")):
            places, limit_file, usage_file, cache = _CGROUPS[name]
            for place in places:
                top = root / place
                # In a container the path may be that of the host: then its upper part is not there.
                for folder in (top / path.strip("/"), *(top / path.strip("/")).parents):
                    if not folder.is_relative_to(top):
                        break
                    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
                    if limit is None or usage is None:
                        continue
                    cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    found.append(limit - usage + int(cached.get(cache, 0)))
    return found


def is_limited_by_ulimit(device: torch.device) -> bool:
    """Whether a limit of this process is the nearest: an allocation beyond it fails, and the kernel kills nothing."""
    return device.type == "cpu" and _own_memory() <= available_memory(device)


def _own_memory() -> float:
    """Bytes that the limits of this process still allow."""
    return min((_OF_LIMIT * (limit - used) for limit, used in _process_use().items()), default=math.inf)


def available_memory(device: torch.device, processes: int = 1) -> int:
    """Bytes that this process may still take.

    Args:
        processes: those on this machine that take as much at the same time; they share the host's memory.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil

    shared = min([psutil.virtual_memory().available, *cgroup_memory()]) // processes
    return int(max(0, min(shared, _own_memory())))
