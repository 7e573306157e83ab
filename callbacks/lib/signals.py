"""Handle signals with a flag instead of ending the process.

Lightning's own handler of SIGTERM runs a collective: a signal to one rank alone hangs the run.
"""

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""What schedulers and people send to end a run; a closed terminal or connection sends SIGHUP."""


def _installed(signums: Iterable[int], handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Installs a handler, and returns those of before; a SIGHUP that is ignored, as under nohup, stays ignored."""
    hung_up = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return {signum: signal.signal(signum, handler) for signum in signums if signum not in hung_up}


def _put_back(handlers: Mapping[int, Any]) -> None:
    """Installs handlers again; None stands for one of C code, which Python cannot install."""
    for signum, handler in handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _leave_closed_terminal() -> None:
    """Gives up what is written to a terminal that was closed, where each write would raise an error."""
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class Preempted(SystemExit):
    """A signal has ended the run in an orderly way.

    A program that does not catch it ends with 128 + the signal's number, as shells report a signal: 130 for Ctrl-C, 138
    for SIGUSR1, 143 for SIGTERM and 129 for SIGHUP (on Linux).

    Args:
        signum: the signal.
        checkpoint: what was saved for it, if anything.
        trained: whether it came as training ended, and what comes after training was left out.
        at_once: whether this process alone has acted on it, outside of a Trainer's loops.
    """

    def __init__(
        self, signum: int, checkpoint: str | None = None, trained: bool = False, at_once: bool = False
    ) -> None:
        super().__init__(128 + signum)
        self.signum, self.checkpoint, self.trained, self.at_once = signum, checkpoint, trained, at_once

    @property
    def signal_name(self) -> str:
        """As in SIGTERM, and Ctrl-C for SIGINT."""
        return name_of(self.signum)


def name_of(signum: int) -> str:
    """A signal's name for people.

    Example:
        >>> name_of(signal.SIGINT), name_of(signal.SIGTERM)
        ('Ctrl-C', 'SIGTERM')
    """
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


class SignalFlag:
    """Notes the first of `SIGNALS` to this process, from `install` to `restore`.

    Handlers need the main thread; elsewhere nothing is installed. A second Ctrl-C ends the process at once. Processes
    that are forked meanwhile, such as a DataLoader's workers, leave the others to this one, and SIGTERM ends them as
    ever.
    """

    def __init__(self) -> None:
        self.on_interrupt = ""
        """What Ctrl-C prints on standard error."""
        self.received = 0
        self._pid = 0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Note signals from now on, and forget those of before."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self.received, self._pid = 0, os.getpid()
        self._previous = _installed(SIGNALS, self._note)

    def restore(self) -> None:
        """Restore the handlers that were installed before."""
        _put_back(self._previous)
        self._previous = {}

    def _note(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        _leave_closed_terminal()
        self.received = self.received or signum
        if signum == signal.SIGINT:
            # By the system and not by a handler: the second one works where Python waits for other code, too.
            signal.signal(signum, signal.SIG_DFL)
            if self.on_interrupt:
                # A terminal's line of progress, behind which it shows ^C, gives way.
                start = "\r\x1b[K" if os.isatty(2) else "\n"
                os.write(2, f"{start}{self.on_interrupt}\n".encode())


@contextmanager
def ending_on_signals(*signums: int) -> Iterator[None]:
    """Raises `Preempted` at once where one of the signals arrives, as Python raises KeyboardInterrupt.

    For the time in which nothing is to be saved: before training, and after it.
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
    previous = _installed(signums, end)
    try:
        yield
    finally:
        _put_back(previous)
