"""Exceptions for user errors, which the command line prints without a traceback, and hints for system errors."""

import errno
from typing import ClassVar


class UserError(ValueError):
    """Error that the user can correct before the run starts, in parameters, data or environment.

    The message says what was found, what was expected and what to pass instead. Parameters are written as in Python,
    ``batch_size=256`` or `` `batch_size` ``. On the command line, that is ``--batch_size=256``.
    """

    exit_status: ClassVar[int] = 2

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks show: the message without a traceback."""
        return [f"{type(self).__name__}: {self}"]


class RunFailedError(UserError):
    """Error that ends a run after it has started, such as divergence or a full disk."""

    exit_status: ClassVar[int] = 1


def first_line(error: BaseException) -> str:
    r"""Return the type of an exception and the first line of its message; for NCCL, the line after "Last error:".

    Example:
        >>> first_line(ValueError("NCCL error in: NCCLUtils.cpp:93\nLast error:\nDuplicate GPU detected"))
        'ValueError: Duplicate GPU detected'
    """
    # NCCL's message begins with the C++ source line, and names the cause only after "Last error:".
    message = str(error).rpartition("Last error:")[2]
    lines = [line for line in message.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


_NO_MEMORY = (
    *("out of memory", "Cannot allocate memory", "can't allocate memory", "Storage size calculation overflowed"),
    *("Overflow when unpacking long", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has no memory left.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("out of memory"))
        (True, False)
    """
    if not isinstance(error, (MemoryError, OSError, RuntimeError, TypeError)):
        return False
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # The class is compared by name, since this module is imported before torch.
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return any(message in str(error) for message in _NO_MEMORY)


def system_failure(error: BaseException) -> str | None:
    """Return a hint for an error about files, processes or memory of the system, and None for any other error."""
    if not isinstance(error, (MemoryError, OSError, RuntimeError, TypeError)):
        return None
    number = getattr(error, "errno", None)
    text = str(error)
    # torch passes tensors of workers as file descriptors; "0 items of ancdata" is how Python reports that none is left.
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
