"""Errors whose message tells the user what to do; the command line prints them without a traceback."""

import errno
from typing import ClassVar


class UserError(ValueError):
    """The run could not start: parameters, data or the environment are wrong, and the user can correct them.

    The message says what was found, what was expected and what to pass instead. It names parameters as Python does,
    ``batch_size=256`` or `` `batch_size` ``: ``--batch_size=256`` is what to type on the command line.
    """

    exit_status: ClassVar[int] = 2

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show of it: the message, as the command line does."""
        return [f"{type(self).__name__}: {self}"]


class RunFailedError(UserError):
    """The run started and failed on the way, such as by divergence or a full disk."""

    exit_status: ClassVar[int] = 1


def first_line(error: BaseException) -> str:
    r"""An exception in a line: its kind and the first line of its message, of NCCL's what it calls the last error.

    Example:
        >>> first_line(ValueError("NCCL error in: NCCLUtils.cpp:93\nLast error:\nDuplicate GPU detected"))
        'ValueError: Duplicate GPU detected'
    """
    lines = [line for line in str(error).rpartition("Last error:")[2].splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


_NO_MEMORY = (
    *("out of memory", "Cannot allocate memory", "can't allocate memory", "Storage size calculation overflowed"),
    *("Overflow when unpacking long", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("out of memory"))
        (True, False)
    """
    if not isinstance(error, (MemoryError, OSError, RuntimeError, TypeError)):
        return False
    refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    # Not by torch.OutOfMemoryError: this module is imported before torch.
    return refused or type(error).__name__ == "OutOfMemoryError" or any(part in str(error) for part in _NO_MEMORY)


def system_failure(error: BaseException) -> str | None:
    """What to do about an error by which the system refuses files, processes or memory; None for another error."""
    if not isinstance(error, (MemoryError, OSError, RuntimeError, TypeError)):
        return None
    number, text = getattr(error, "errno", None), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text or "received 0 items of ancdata" in text:
        return (
            "too many files are open; allow more, as ulimit -n 65536 does, or run with fewer loader workers or devices"
        )
    if number == errno.EAGAIN or "can't start new thread" in text or "Resource temporarily unavailable" in text:
        return (
            "the system refuses another process or thread; allow more, as ulimit -u 4096 or"
            " docker run --pids-limit does, or run with fewer loader workers or devices, and OMP_NUM_THREADS=1"
        )
    if is_out_of_memory(error):
        reason = f" ({text.splitlines()[0].strip()[:200]})" if text else ""
        return f"there is not enough memory{reason}; pass smaller sizes, or fewer loader workers or devices"
    if isinstance(error, OSError) and number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room, or choose another folder"
    if text.startswith("DataLoader worker (pid"):
        return f"{text.splitlines()[0].strip()} It may have run out of memory: run with fewer loader workers"
    return None
