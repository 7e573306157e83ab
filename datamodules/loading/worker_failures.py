"""What is said where worker processes cannot start, cannot send a batch, die, or do not answer."""

import errno
import math
import os
import signal
import traceback
from collections.abc import Sequence
from typing import Any

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from datamodules.errors import system_failure

__all__ = [
    "cannot_start",
    "check_workers_here_only",
    "describe_failure",
    "describe_worker",
    "end_half_started",
    "free_shared_memory",
    "listed",
    "no_room",
    "too_many_workers",
]

_MOUNT = "/dev/shm"
_MORE = "start the container with more of it, as docker run --shm-size=1g does"


def free_shared_memory() -> float:
    """Bytes free for tensors that processes share; infinite where the system does not keep them in a mounted folder."""
    try:
        found = os.statvfs(_MOUNT)
    except (OSError, AttributeError):
        return math.inf
    return found.f_bavail * found.f_frsize if found.f_blocks else math.inf  # A size of 0 is no limit.


def _amount(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} kB"


def too_many_workers(num_workers: int, needed: int, free: float, enough_for: int) -> str:
    """Why so many workers are refused.

    Args:
        needed: bytes of the batches that they load ahead.
        free: bytes of shared memory before they started.
        enough_for: the number of workers for which it is enough.
    """
    return (
        f"{num_workers} workers load batches of {_amount(needed)} ahead into shared memory, and {_MOUNT} has"
        f" {_amount(free)}; pass num_workers={enough_for}, or {_MORE}"
    )


def no_room(num_workers: int, size: int, reason: str) -> str:
    """Why a worker could not send a batch of `size` bytes."""
    if os.strerror(errno.ENOSPC) not in reason:
        return system_failure(OSError(reason)) or f"a worker cannot send its batch ({reason}); pass num_workers=0"
    return (
        f"{_MOUNT} has no room for the batches of {num_workers} workers, {_amount(size)} each"
        f" ({_amount(free_shared_memory())} are free); pass num_workers=0, or {_MORE}"
    )


def cannot_start(num_workers: int, error: Exception) -> str:
    """Why workers could not be started."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS):
        return (
            f"{num_workers} workers cannot start: {_MOUNT} cannot be written ({error.strerror}); pass num_workers=0, or"
            f" {_MORE}"
        )
    return f"{num_workers} workers cannot start: {system_failure(error) or error}; or pass num_workers=0"


def end_half_started(error: BaseException) -> None:
    """End the workers of an iterator that was made by half, which would complain when it is dropped.

    Args:
        error: what the constructor of the iterator has raised.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        batches = frame.f_locals.get("self")
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            batches._shutdown = True
            if getattr(batches, "_worker_pids_set", False):
                check_workers_here_only(batches)
            for process in getattr(batches, "_workers", ()):
                process.kill()


def check_workers_here_only(batches: Any) -> None:
    """Have the death of a worker raised where its batch is awaited.

    torch also raises it in a signal's handler, in the midst of whatever the process does: of a collective call, or of
    writing a file.
    """
    signal_handling._remove_worker_pids(id(batches))
    batches._worker_pids_set = False


def listed(rows: Sequence[int]) -> str:
    """Sample numbers, the first few of them.

    Example:
        >>> listed([5, 93, 17, 4, 28])
        '5, 93, 17, ...'
    """
    return ", ".join(map(str, rows[:3])) + ", ..." * (len(rows) > 3)


def describe_worker(batches: Any, worker: int) -> str:
    """The worker by its number and process."""
    return f"worker {worker} (process {batches._workers[worker].pid})"


def describe_failure(batches: Any, worker: int, what: str, waited: float) -> str:
    """Why a worker did not deliver a batch.

    Args:
        batches: the iterator of the DataLoader.
        worker: the one that was to load the batch; another one may have died.
        what: the batch in words.
        waited: seconds.
    """
    dead = [number for number, process in enumerate(batches._workers) if not process.is_alive()]
    if worker not in dead and not dead:
        return (
            f"{describe_worker(batches, worker)} did not load {what} within {waited:.0f} s; it hangs in reading files"
            " or in a transform: pass num_workers=0 to see where"
        )
    number = worker if worker in dead else dead[0]
    code = batches._workers[number].exitcode
    if code == errno.EAGAIN:  # See `_start_worker` of the loaders.
        return f"{describe_worker(batches, number)} cannot run: {system_failure(OSError(errno.EAGAIN, ''))}"
    how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
    hint = (
        "; the system may have run out of memory: pass fewer `num_workers`"
        if code == -getattr(signal, "SIGKILL", 9)
        else "; pass num_workers=0 to see where"
    )
    loading = f", while {what} was to be loaded" if number == worker else ""
    return f"{describe_worker(batches, number)} {how}{loading}{hint}"
