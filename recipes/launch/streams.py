"""Standard streams that outlive what they write to: a full disk, a pipe whose reader has ended, a closed terminal.

In Python a `print` raises there, and a training ends for a line of its log. Standard streams that the shell has closed
are worse: the next file that is opened gets their number, and what other code prints goes into it.
"""

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any

from typing_extensions import Buffer, override

__all__ = ["end_after_printing", "output_failure", "print_error", "secure_streams", "unwritten_streams"]

_NAMES = ("stdin", "stdout", "stderr")


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write, and keeps the first reason."""

    failure: OSError | None = None
    failures = 0

    @override
    def write(self, data: Buffer, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # A pipe or terminal that another program has set to non-blocking.
                    select.select((), (self,), ())
                rest = rest[written or 0 :]
        except OSError as error:
            self.failure = self.failure or error
            self.failures += 1
        return size


def _lossy_file(stream: Any) -> _LossyFile | None:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _LossyFile) else None


def _is_replaceable(stream: Any, descriptor: int) -> bool:
    """Whether a stream is the interpreter's own, and not that of a notebook, a test or a redirection."""
    if type(stream) is not io.TextIOWrapper:
        return False
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return type(raw) is io.FileIO and raw.fileno() == descriptor


def _lossy(stream: io.TextIOWrapper | None, descriptor: int) -> io.TextIOWrapper:
    raw = _LossyFile(descriptor, "w", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if hasattr(stream.buffer, "raw") else raw,
        encoding=stream.encoding,
        # Not strict: an ASCII terminal shows what it does not have as an escape.
        errors="backslashreplace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def secure_streams() -> None:
    """Replace the process's standard output and error by streams that never raise, and open those that are closed.

    What cannot be written is dropped, see `unwritten_streams`; what the encoding does not have is escaped. To be called
    before other files are opened; calling it again does nothing. Streams that somebody has replaced stay.
    """
    for descriptor, name in enumerate(_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free.
        stream = getattr(sys, name)
        if name != "stdin" and (stream is None or _is_replaceable(stream, descriptor)):
            secured = _lossy(stream, descriptor)
            setattr(sys, name, secured)
            setattr(sys, f"__{name}__", secured)


def unwritten_streams() -> dict[str, str]:
    """Why standard output or error could not be written, or not all of it, by the stream's name."""
    found = {}
    for stream, name in ((sys.stdout, "standard output"), (sys.stderr, "standard error")):
        with contextlib.suppress(Exception):
            stream.flush()
        file = _lossy_file(stream)
        if file is not None and file.failure is not None:
            found[name] = file.failure.strerror or str(file.failure)
    return found


def output_failure() -> str | None:
    """Why standard output could not be written; None where it was, or where its reader has seen enough."""
    reason = unwritten_streams().get("standard output")
    return None if reason in (None, os.strerror(errno.EPIPE)) else reason


def end_after_printing() -> None:
    """End a program that has printed all that it was asked for; with status 1 where that could not be written."""
    if problem := output_failure():
        print_error(f"error: standard output could not be written: {problem}")
        sys.exit(1)


def print_error(line: str) -> None:
    """Print a line on standard error; where that is closed, on standard output."""
    for stream in (sys.stderr, sys.stdout):
        file = _lossy_file(stream)
        before = file.failures if file is not None else 0
        print(line, file=stream, flush=True)
        if file is None or file.failures == before:
            return
