"""This machine: its devices, precision, threads and memory, its network, and processes whose parent has ended."""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from datamodules.errors import UserError

Precision = Literal["auto", "32", "64", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true", 32, 64]


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
        raise UserError(f"--devices {devices} requests none; pass 1 or more, auto, or indices such as 0,1")
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
    if precision == "16-mixed" and detect_machine(accelerator).kind == "cpu":
        raise UserError("16-mixed needs a GPU, and this run is on the CPU; pass --precision bf16-mixed")
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


LOOPBACK = "127.0.0.1"
_ELSEWHERE = "198.51.100.1"  # An address for documentation (RFC 5737), behind the default route.


def listen(port: int, *, loopback: bool) -> socket.socket:
    """A listener at a port, or at a free one for 0: on 127.0.0.1, or on all IPv4 and IPv6 addresses of this machine.

    Raises:
        OSError: the port is in use.
    """
    backlog = socket.SOMAXCONN
    if not loopback and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server((LOOPBACK if loopback else "", port), backlog=backlog)


def own_address(address: str, port: int = 1) -> str:
    """The address of this machine on the route to `address`; nothing is sent."""
    # IPv4 first: not every network with IPv6 addresses routes them.
    found = sorted(socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM), key=lambda info: info[0])
    family, place = found[0][0], found[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an address or a name leads every machine to itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address.split(".")[0] == "localhost"


def address_for_others(address: str, port: int = 1) -> str:
    """The address to publish to other nodes, given the address of one of them, or of this machine.

    Debian resolves a machine's own name to 127.0.1.1, a loopback address: then the name is published.
    """
    own = own_address(address, port)
    return address if is_loopback(own) else own


def loopback_interface() -> str | None:
    """The name of the loopback interface; None where it has another one than on Linux and macOS."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_towards(address: str) -> str | None:
    """The interface on the route to another machine; None where it cannot be determined.

    For an address of this machine, the interface that has it. Where this machine's own name resolves to the loopback
    interface, the interface of the default route.
    """
    if os.name == "nt":  # gloo takes no interface there.
        return None
    import psutil  # Here, since only runs on several nodes need it.

    try:
        own = own_address(address)
        if is_loopback(own) and not is_loopback(address):
            own = own_address(_ELSEWHERE)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    # An IPv6 address may be followed by % and its interface.
    return next((name for name, found in interfaces if any(a.address.split("%")[0] == own for a in found)), None)


# Processes whose parent has ended end too: Lightning's launcher has not registered a child yet when a signal ends it
# while starting one, and the workers of a torchrun that was killed would train beside those that replace them.

_PARENT = "LIGHTNING_RECIPES_PARENT"
_WAIT = 3.0  # In a regular end of the run the parent may be the first process to exit.


def declare_parent(env: MutableMapping[str, str]) -> None:
    """Record this process as the parent of the processes that it will start."""
    env[_PARENT] = str(os.getpid())


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def drop_inherited_variables(env: MutableMapping[str, str]) -> None:
    """Remove our variables if they were set by a process that is not the parent of this one.

    A program that calls `run` and starts other programs later passes its environment on to them.
    """
    told = env.get(_PARENT, "")
    if not told.isdigit() or int(told) in (os.getpid(), os.getppid()) or not _is_alive(int(told)):
        return
    for name in [name for name in env if name.startswith("LIGHTNING_RECIPES_") and name != "LIGHTNING_RECIPES_DATA"]:
        del env[name]


def parent_of_rank(env: Mapping[str, str]) -> int | None:
    """The process whose end has to end this one: the first rank of the node, or torchrun; None where there is none.

    Example:
        >>> parent_of_rank({"LIGHTNING_RECIPES_PARENT": "71", "LOCAL_RANK": "1"})
        71
        >>> parent_of_rank({"LOCAL_RANK": "1"}) is None
        True
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return os.getppid()
    # The variable is also set in the process that set it, the first rank of the node.
    told = env.get(_PARENT, "")
    given = told.isdigit() and told != str(os.getpid()) and env.get("LOCAL_RANK", "0") != "0"
    return int(told) if given else None


def exit_with_parent(env: Mapping[str, str]) -> None:
    """End this process a few seconds after its parent has."""
    parent = parent_of_rank(env)
    if parent is None or os.name == "nt":  # On Windows the parent of an orphan does not change.
        return
    threading.Thread(target=_guard, args=(parent,), daemon=True, name="parent").start()


def _guard(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_WAIT)
    with contextlib.suppress(OSError):
        os.write(2, f"error: process {os.getpid()} ends, because process {parent} that started it has ended\n".encode())
    # The main thread may wait in a call that no exception interrupts.
    os._exit(1)
