"""A pseudo-terminal whose output is discarded, so that progress bars draw as they do for a user."""

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
    """Sends what is printed to a pseudo-terminal that another process empties; to nowhere where there is none.

    Raises:
        RuntimeError: a command line inside has ended the program; with its last message.
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
    # A process, since a thread would take turns with the loop that is measured; out of reach of Ctrl-C.
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
    """Ctrl-C, as an exception that no framework takes for its own affair."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside is a KeyboardInterrupt outside: Trainers and command lines would end the program themselves."""

    def interrupt(*_: Any) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupted as ended:
        raise KeyboardInterrupt from ended
    finally:
        signal.signal(signal.SIGINT, before)
