"""Signals that are noted instead of ending the process.

Lightning's own handler of SIGTERM runs a collective: a signal to one rank alone hangs the run.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What schedulers and people send to end a run."""


class Preempted(SystemExit):
    """A signal has ended the run in an orderly way.

    A program that does not catch it ends with 128 + the signal's number, as shells report a signal: 130 for Ctrl-C, 138
    for SIGUSR1 and 143 for SIGTERM (on Linux).

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
    that are forked meanwhile, such as a DataLoader's workers, leave Ctrl-C and SIGUSR1 to this one, and SIGTERM ends
    them as ever.

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
        self._previous = {signum: signal.signal(signum, self._note) for signum in SIGNALS}

    def restore(self) -> None:
        """Restore the handlers that were installed before."""
        for signum, handler in self._previous.items():
            # None: it was installed by C code, and Python cannot put it back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _note(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        self.received = self.received or signum
        if signum == signal.SIGINT:
            # By the system and not by a handler: the second one works where Python waits for other code, too.
            signal.signal(signum, signal.SIG_DFL)
            if self.on_interrupt:
                os.write(2, f"\n{self.on_interrupt}\n".encode())


@contextmanager
def ending_on_signals(*signums: int) -> Iterator[None]:
    """Raises `Preempted` at once where one of the signals arrives, as Python raises KeyboardInterrupt.

    For the time in which nothing is to be saved: before training, and after it.
    """
    pid = os.getpid()

    def end(signum: int, frame: Any) -> None:
        if os.getpid() == pid:
            raise Preempted(signum, at_once=True)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, end) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
