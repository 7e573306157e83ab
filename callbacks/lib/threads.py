"""The number of threads that torch computes with on a CPU: kernels divide sums among them, so the bits depend on it.

Lightning's launcher sets cores // processes in each process unless OMP_NUM_THREADS is set, whatever the program has set
before. So one program has other threads, and other bits, on another number of devices. `RunThreads` keeps the number
that the program has set, and a resumed run keeps the number of its checkpoint. Lightning's number stays where nobody
has set one, and a line says so.
"""

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from datamodules.errors import spelled
from datamodules.lightning import pl
from datamodules.notes import warn

VARIABLE = "OMP_NUM_THREADS"
"""The environment variable with a number of threads. Lightning's launcher sets no number where it exists."""

_SECONDS_TO_LOOK = 10.0
_SHARE_OF_WAITS = 0.3

_default: int | None = None
"""The number that nobody had set, where this module has set it again after another one."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_program() -> int | None:
    """Return the number of threads that the environment or the program has set; None where nobody has set one."""
    threads = torch.get_num_threads()
    # torchrun sets 1 for several processes where the variable does not exist.
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(VARIABLE) == "1"
    is_chosen = (VARIABLE in os.environ and not is_torchruns) or (threads != _default and _is_set(threads))
    return threads if is_chosen else None


def _is_set(threads: int) -> bool:
    """Whether the program has called `torch.set_num_threads`, which torch does not tell.

    A new thread takes the number that was set. Where none was, MKL follows OpenMP's number in that thread. Without MKL
    the answer is False.
    """
    if available_cores() == 1 or not torch.backends.mkl.is_available():
        return False
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "omp_set_num_threads"):
        return False
    found = []

    def take_number() -> None:
        openmp.omp_set_num_threads(1 if threads > 1 else 2)  # In this thread only.
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=take_number)
    thread.start()
    thread.join()
    return found == [threads]


def set_threads(threads: int) -> None:
    """Set the number of threads so that Lightning's launcher leaves it."""
    torch.set_num_threads(threads)
    os.environ[VARIABLE] = str(threads)


def _restore(threads: int, *, is_chosen: bool) -> None:
    """Set an earlier number of threads again, which counts as set only if it did before."""
    global _default
    torch.set_num_threads(threads)
    if not is_chosen:
        _default = threads


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restore the number of threads, and its variable, at the end of the ``with`` block."""
    threads = torch.get_num_threads()
    is_chosen = threads_of_program() is not None
    variable = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        _restore(threads, is_chosen=is_chosen)
        os.environ.pop(VARIABLE, None)
        if variable is not None:
            os.environ[VARIABLE] = variable


def core_seconds() -> tuple[float, float] | None:
    """Return for how long the main thread has run on a core, and has waited for one; None where Linux does not say."""
    try:
        run, waited = Path("/proc/self/schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return int(run) / 1e9, int(waited) / 1e9


def counted_threads(threads: int) -> str:
    """Return a number of threads in words.

    Example:
        >>> counted_threads(1), counted_threads(2)
        ('1 thread', '2 threads')
    """
    return f"{threads} thread{'s' if threads > 1 else ''}"


class ThreadsBeforeLaunch:
    """The number of threads that the program has set, noted in the constructors of callbacks.

    A callback's first hook comes after Lightning's launcher, which may have replaced the number.
    """

    def __init__(self) -> None:
        self._number = threads_of_program()
        self._awaits_launcher = VARIABLE not in os.environ

    def restore(self) -> int | None:
        """Undo what Lightning's launcher has set since; return the number that the program has set, None without one.

        The launcher sets its variable with the first number. Later numbers are the program's own.
        """
        was_launched = self._awaits_launcher and VARIABLE in os.environ
        self._awaits_launcher = False
        if not was_launched:
            return threads_of_program()
        if self._number is not None:
            torch.set_num_threads(self._number)
        return self._number


class RunThreads:
    """The number of threads of a fit on CPUs: the number of rank 0, in all processes.

    Args:
        trainer: the Trainer of the fit.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._begun = False
        self._is_chosen = False
        self._replaced: int | None = None
        self._line = ""
        self._seconds: tuple[float, float] | None = None
        """`core_seconds` when the training began; None on one thread, and once the share of waiting was looked at."""
        self._has_looked = False

    def begin(self, before: ThreadsBeforeLaunch) -> None:
        """Settle the number for a fit, in `setup` on all ranks; the first callback that calls it counts."""
        if self._begun or not self._on_cpu:
            return
        self._begun = True
        trainer = self._trainer
        number = before.restore()
        self._is_chosen, threads = trainer.strategy.broadcast((number is not None, torch.get_num_threads()))
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._line = ""
        if trainer.world_size > 1 and not self._is_chosen:
            self._line = (
                f"note: {counted_threads(threads)} in each of {trainer.world_size} processes, the default, on which the"
                f" bits depend: with torch.set_num_threads({threads}) before the callbacks are built, or with"
                f" {VARIABLE}={threads}, one device ends with the same weights"
            )

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue with the number of a checkpoint, unless the program has set another one."""
        saved = state.get("threads")
        threads = torch.get_num_threads()
        if saved is None or saved == threads or not self._begun:
            return
        if self._is_chosen:
            self._line = (
                f"warning: bits may differ from here on: {counted_threads(threads)} in each process, and {saved} in the"
                f" checkpoint; set {saved} to continue as that run"
            )
            return
        self._replaced = threads
        torch.set_num_threads(saved)
        excess = saved * self._trainer.num_devices - available_cores()
        self._line = (
            f"note: {counted_threads(saved)} in each process, as in the checkpoint"
            f"{', more than there are cores' if excess > 0 else ''}: torch.set_num_threads({threads}) before the"
            " callbacks are built changes them, and the bits"
        )

    def report(self) -> None:
        """Print the line about the number, once; when the training begins."""
        if self._line:
            warn(self._line)
            self._line = ""
        if self._begun and not self._has_looked and self._seconds is None and torch.get_num_threads() > 1:
            self._seconds = core_seconds()

    def report_waits(self) -> None:
        """Print, once in a fit, that other programs use the cores, for which the threads wait one after the other."""
        now = core_seconds() if self._seconds else None
        if self._seconds is None or now is None:
            return
        run, waited = now[0] - self._seconds[0], now[1] - self._seconds[1]
        if run + waited < _SECONDS_TO_LOOK:
            return
        self._seconds = None
        self._has_looked = True
        share = waited / (run + waited)
        if share > _SHARE_OF_WAITS:
            threads = torch.get_num_threads()
            warn(
                f"note: other programs use the cores: this process waited for one in {share:.0%} of its time, and its"
                f" {threads} threads wait for each other; a run with {spelled('threads', 1)} may be faster"
            )

    def state(self) -> dict[str, int]:
        """Return the number for a checkpoint, where it is settled."""
        return {"threads": torch.get_num_threads()} if self._begun else {}

    def end(self) -> None:
        """Restore the number that a checkpoint's has replaced."""
        if self._replaced is not None:
            _restore(self._replaced, is_chosen=False)
            self._replaced = None
        self._begun = False
        self._seconds = None
        self._has_looked = False

    @property
    def _on_cpu(self) -> bool:
        return self._trainer.strategy.root_device.type == "cpu"
