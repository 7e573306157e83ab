"""Pseudo-terminal whose output is discarded, so that progress bars are drawn as for a user; and handling of Ctrl-C."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

__all__ = ["interruptible", "unread_terminal"]


@contextlib.contextmanager
def unread_terminal() -> Iterator[None]:
    """Redirect output to a pseudo-terminal that another process reads, or to nowhere on a system without one.

    Raises:
        RuntimeError: a command line in the block has ended the program; the message is its last line.
    """
    try:
        import pty
    except ImportError:  # Windows.
        with (
            open(os.devnull, "w") as nowhere,  # noqa: PTH123
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield
        return
    inside, outside = pty.openpty()
    # A process, since a thread would compete with the measured loop for the GIL. A session of its own keeps Ctrl-C
    # away.
    with tempfile.TemporaryFile() as output:
        reader = subprocess.Popen(
            ["cat"], stdin=inside, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(inside)
        try:
            with (
                os.fdopen(outside, "w") as screen,
                contextlib.redirect_stdout(screen),
                contextlib.redirect_stderr(screen),
            ):
                yield
        except SystemExit as ended:
            reader.wait()
            output.seek(0)
            last = output.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the command line ended with status {ended.code}: {''.join(last)}") from ended
        finally:
            reader.kill()
            reader.wait()


class _Interrupted(Exception):
    """Exception for Ctrl-C that no framework handles itself."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt after Ctrl-C in the block. A Trainer or command line would end the program instead."""

    def interrupt(*_: Any) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupted as ended:
        raise KeyboardInterrupt from ended
    finally:
        signal.signal(signal.SIGINT, before)
