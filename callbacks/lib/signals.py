"""Signal handlers that set a flag instead of ending the process.

Lightning's own handler of SIGTERM runs a collective, so a signal to one rank alone hangs the run.
"""

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals by which schedulers and people end a run; a closed terminal or connection sends SIGHUP."""


def _install_handler(signums: Iterable[int], handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install a handler, and return the previous handlers."""
    previous_handlers = {}
    for signum in signums:
        # An ignored SIGHUP, as under nohup, stays ignored.
        if signum == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            continue
        previous_handlers[signum] = signal.signal(signum, handler)
    return previous_handlers


def _restore_handlers(handlers: Mapping[int, Any]) -> None:
    """Install previous handlers again."""
    for signum, handler in handlers.items():
        # None stands for a handler of C code, which Python cannot install.
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _leave_closed_terminal() -> None:
    """Redirect output to a closed terminal to the null device, since each write would raise an error."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class Preempted(SystemExit):
    """Exit exception of a run that was stopped in an orderly way after a signal.

    A program that does not catch it ends with 128 + the signal's number, as shells report a signal: 130 for Ctrl-C, 138
    for SIGUSR1, 143 for SIGTERM and 129 for SIGHUP (on Linux).

    Args:
        signum: the signal.
        checkpoint: the checkpoint that was saved, if any.
        trained: whether training had ended, and only the work after it was left out.
        at_once: whether this process alone has acted on the signal, outside of a Trainer's loops.
    """

    def __init__(
        self, signum: int, checkpoint: str | None = None, trained: bool = False, at_once: bool = False
    ) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.checkpoint = checkpoint
        self.trained = trained
        self.at_once = at_once

    @property
    def signal_name(self) -> str:
        """Name of the signal, such as SIGTERM; Ctrl-C for SIGINT."""
        return name_of(self.signum)


def name_of(signum: int) -> str:
    """Return the name of a signal for messages.

    Example:
        >>> name_of(signal.SIGINT), name_of(signal.SIGTERM)
        ('Ctrl-C', 'SIGTERM')
    """
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


class SignalFlag:
    """Flag that holds the first of `SIGNALS` to this process, from `install` to `restore`.

    Handlers need the main thread; in other threads nothing is installed. A second Ctrl-C ends the process at once. In
    processes that are forked meanwhile, such as a DataLoader's workers, SIGTERM acts as usual and the other signals are
    ignored.
    """

    def __init__(self) -> None:
        self.on_interrupt = ""
        """Text that Ctrl-C prints on standard error."""
        self.received = 0
        self._pid = 0
        self._previous_handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Clear the flag, and set it at the first signal from now on."""
        if self._previous_handlers or threading.current_thread() is not threading.main_thread():
            return
        self.received = 0
        self._pid = os.getpid()
        self._previous_handlers = _install_handler(SIGNALS, self._set)

    def restore(self) -> None:
        """Restore the previous handlers."""
        _restore_handlers(self._previous_handlers)
        self._previous_handlers = {}

    def _set(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            # In a forked worker: the run's process alone decides when the run ends, and SIGTERM acts as usual.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        _leave_closed_terminal()
        self.received = self.received or signum
        if signum == signal.SIGINT:
            # The system ends the process at the second Ctrl-C: a handler in Python would wait for running C code.
            signal.signal(signum, signal.SIG_DFL)
            if self.on_interrupt:
                # Clears the line of progress, to which the terminal has appended ^C.
                start = "\r\x1b[K" if os.isatty(2) else "\n"
                os.write(2, f"{start}{self.on_interrupt}\n".encode())


_kept: list[int] = []


def keep_until_imported(signum: int) -> None:
    """Keep a signal that arrives while a program imports its modules; `ending_on_signals` acts on it."""
    _install_handler([signum], lambda number, _: _kept.append(number))


@contextmanager
def ending_on_signals(*signums: int) -> Iterator[None]:
    """Raise `Preempted` at once when a signal arrives, as Python raises KeyboardInterrupt.

    For the time before and after training, in which there is nothing to save.
    """
    pid = os.getpid()

    def end(signum: int, frame: Any) -> None:
        if os.getpid() == pid:
            _leave_closed_terminal()
            raise Preempted(signum, at_once=True)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = _install_handler(signums, end)
    try:
        if _kept:
            end(_kept.pop(), None)
        yield
    finally:
        _restore_handlers(previous_handlers)
