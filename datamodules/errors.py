"""Exceptions for user errors, which are printed without a traceback, and hints for system errors.

Messages spell each setting with `spelled`: as a parameter in Python, and as a flag on a command line, which calls
`spelling_as_flags` once.
"""

import errno
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from sysconfig import get_paths
from types import TracebackType
from typing import Any, ClassVar

from typing_extensions import override

_PACKAGES = [str(Path(__file__).parents[1] / name) for name in ("recipes", "callbacks", "datamodules")]

_flags: frozenset[str] = frozenset()
"""The settings that are flags. Global, because threads and loader workers also spell settings."""


class MISSING:
    """Placeholder for the value of a setting without a value, since None is a value."""


@contextmanager
def spelling_as_flags(names: Iterable[str]) -> Iterator[None]:
    """Spell these settings as flags in the messages of this process. Other settings are spelled as in Python."""
    global _flags
    before = _flags
    _flags = frozenset(names)
    try:
        yield
    finally:
        _flags = before


def flag_of(name: str) -> str:
    """Return the flag of a parameter, such as --max-epochs for max_epochs."""
    return f"--{name.replace('_', '-')}"


def spelled(name: str, value: Any = MISSING) -> str:
    """Return a setting as the reader of a message would type it, with or without a value.

    Example:
        >>> f"pass {spelled('batch_size', 4)} or another {spelled('optimizer')}"
        'pass batch_size=4 or another `optimizer`'
        >>> with spelling_as_flags(["batch_size", "weights", "flip"]):
        ...     print(spelled("batch_size"), spelled("weights", "my file"), spelled("flip", False), spelled("other", 4))
        --batch-size --weights 'my file' --no-flip other=4
    """
    if name not in _flags:
        return f"`{name}`" if value is MISSING else f"{name}={value!r}"
    if value is MISSING:
        return flag_of(name)
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {shlex.quote(value) if isinstance(value, str) else value}"


class UserError(ValueError):
    """Error that the user can correct before the run starts, in parameters, data or environment.

    The message says what was found, what was expected and what to pass instead: ``SETTING: problem; to_type``. All
    settings in it are spelled with `spelled`. An error in a file or an input begins with its name: ``SUBJECT problem``.

    Args:
        problem: what was found and what was expected; the whole message if there is no setting and no subject.
        setting: name of the setting.
        value: value of the setting.
        to_type: what to pass instead.
        commands: what to type instead, one command per line.
        subject: name of the file or the input that has the problem.
    """

    exit_status: ClassVar[int] = 2

    def __init__(
        self,
        problem: str = "",
        *,
        setting: str = "",
        value: Any = MISSING,
        to_type: str = "",
        commands: Sequence[str] = (),
        subject: str = "",
    ) -> None:
        self.problem = problem
        self.subject = subject
        self.setting = setting
        self.value = value
        self.to_type = to_type
        self.commands = tuple(commands)
        text = f"{subject} {problem}" if subject else problem
        text = f"{spelled(setting, value)}: {text}" if setting else text
        # One argument, the finished text: exceptions are pickled by their arguments and attributes.
        super().__init__(f"{text}; {to_type}" if to_type else text)

    @override
    def __str__(self) -> str:
        return "".join([str(self.args[0]), *(f"\n  {command}" for command in self.commands)])

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks show: the message without a traceback."""
        return [f"{type(self).__name__}: {self}"]


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends a program. The traceback of a `UserError` has the frames of the program only."""
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    # Read here, not on import: this takes longer than everything else that the error for a wrong flag needs.
    libraries = tuple(folder + os.sep for folder in (*_PACKAGES, get_paths()["purelib"]))
    frames = traceback.extract_tb(trace)
    of_program = list(takewhile(lambda frame: not frame.filename.startswith(libraries), frames))
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(of_program)]
    sys.stderr.write("".join([*lines, f"{kind.__name__}: {error}\n"]))


# As `_render_traceback_` does in a notebook. A hook that another library has installed is kept.
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _print_uncaught


class RunFailedError(UserError):
    """Error that ends a run after it has started, such as NaN weights or a full disk."""

    exit_status: ClassVar[int] = 1


def first_line(error: BaseException) -> str:
    r"""Return the type of an exception and the first line of its message, or NCCL's line after "Last error:".

    Example:
        >>> first_line(ValueError("NCCL error in: NCCLUtils.cpp:93\nLast error:\nDuplicate GPU detected"))
        'ValueError: Duplicate GPU detected'
    """
    # NCCL's message begins with the C++ source line. The cause comes after "Last error:".
    message = str(error).rpartition("Last error:")[2]
    lines = [line for line in message.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


_NO_MEMORY = (
    *("out of memory", "Cannot allocate memory", "can't allocate memory", "Storage size calculation overflowed"),
    *("Overflow when unpacking long", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host is out of memory.

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
    """Return a hint for an error about files, processes or memory of the system; None for any other error."""
    if not isinstance(error, (MemoryError, OSError, RuntimeError, TypeError)):
        return None
    number = getattr(error, "errno", None)
    text = str(error)
    # torch passes the tensors of workers as file descriptors. Python reports "0 items of ancdata" if none is left.
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text or "received 0 items of ancdata" in text:
        return (
            "too many files are open; allow more, as ulimit -n 65536 does, or run with fewer loader workers or devices"
        )
    if number == errno.EAGAIN or "can't start new thread" in text or "Resource temporarily unavailable" in text:
        return (
            "the system rejects another process or thread; allow more, as ulimit -u 4096 or"
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
