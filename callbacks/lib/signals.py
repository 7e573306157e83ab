"""Signals that end a run: handlers that set a flag in place of ending the process, and the requeue by Slurm.

Lightning's own handler of SIGTERM runs a collective, so a signal to one rank alone hangs the run. Slurm itself requeues
a job when a node fails. After a signal before its time limit, or the loss of a process, a job has to request it.
"""

import functools
import os
import re
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals by which schedulers and people end a run; a closed terminal or connection sends SIGHUP."""
_SLURM_ANSWERS = 20.0  # Seconds for Slurm to reply.
_ATTEMPTS = 3  # Of a command that a signal ends.
_kept: list[int] = []


def _install_handler(signums: Iterable[int], handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install a handler, and return the previous handlers."""
    previous_handlers = {}
    for signum in signums:
        # An ignored SIGHUP, as under nohup, stays ignored.
        if signum == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            continue
        previous_handlers[signum] = signal.signal(signum, handler)
    return previous_handlers


def restore_handlers(handlers: Mapping[int, Any]) -> None:
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
        restore_handlers(self._previous_handlers)
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
        restore_handlers(previous_handlers)


class NotRequeued(Exception):
    """Error: Slurm has not requeued a job, for the reason in the message."""


class _Failed(NotRequeued):
    """Error: a command of Slurm failed."""


def _run(*args: str, within: float) -> tuple[int, str, str]:
    """Run ``scontrol`` so that signals do not end it, and return its status, output and errors.

    Raises:
        subprocess.TimeoutExpired: it did not end within so many seconds.
        OSError: it cannot be started.
    """
    # Slurm sends signals to the processes of a job that it ends or requeues, sometimes before the request has returned.
    # A child process, and the program that it executes, inherit which signals are blocked and which are ignored.
    command = ["sh", "-c", 'trap "" TERM INT USR1; exec scontrol "$@"', "sh", *args]
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        # In a new session, a signal to the process group of this process does not end the request.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    try:
        output, errors = process.communicate(timeout=within)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def _scontrol(*args: str, deadline: float) -> str:
    """Return the output of ``scontrol``; run it again if a signal has ended it."""
    command = f"scontrol {' '.join(args)}"
    for _ in range(_ATTEMPTS):
        within = max(0.1, deadline - time.monotonic())
        try:
            status, output, errors = _run(*args, within=within)
        except subprocess.TimeoutExpired as error:
            raise _Failed(f"{command} did not end within {within:.0f} s") from error
        except OSError as error:
            raise _Failed(f"{command}: {error}") from error
        if status >= 0:
            break
    if status:
        raise _Failed(f"{command} ended with {status}: {errors.strip()}")
    return output


def _job_fields(job: str, deadline: float) -> dict[str, str]:
    """Return the fields of ``scontrol show job`` by name."""
    return dict(re.findall(r"(\w+)=(\S*)", _scontrol("show", "job", job, deadline=deadline)))


def _job_id(environ: Mapping[str, str]) -> str:
    """Return the ID of the job; in an array, the ID of the array with the number of the task."""
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


@functools.cache
def _slurm_says_batch(job: str) -> bool:
    try:
        return _job_fields(job, time.monotonic() + _SLURM_ANSWERS).get("BatchFlag") == "1"
    except _Failed:
        return False


def is_batch_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch job of Slurm, and not an interactive one of ``salloc`` or ``srun``."""
    if "SLURM_JOB_ID" not in environ:
        return False
    # Slurm sets ENVIRONMENT in batch scripts, and srun passes it on. It is missing after sbatch --export=NONE and in
    # scripts that set it to another value; then Slurm is asked.
    return environ.get("ENVIRONMENT") == "BATCH" or _slurm_says_batch(_job_id(environ))


def batch_job(environ: Mapping[str, str]) -> str | None:
    """Return the ID of this batch job of Slurm, as ``scontrol`` takes it; None outside of one.

    Example:
        >>> batch_job({"SLURM_JOB_ID": "71", "ENVIRONMENT": "BATCH"})
        '71'
        >>> array = {"SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}
        >>> batch_job({"SLURM_JOB_ID": "73", "ENVIRONMENT": "BATCH"} | array)
        '71_2'
    """
    return _job_id(environ) if is_batch_job(environ) else None


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often this job has been restarted."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def requeue(environ: Mapping[str, str]) -> str | None:
    """Put this batch job back into Slurm's queue. Several ranks may call it.

    Returns:
        The ID of the job; None outside of a batch job.

    Raises:
        NotRequeued: Slurm does not requeue the job, for the reason in the message.
    """
    job = batch_job(environ)
    if job is None:
        return None
    deadline = time.monotonic() + _SLURM_ANSWERS
    fields = _job_fields(job, deadline)
    if _has_been_requeued(fields, environ):
        return job
    if fields.get("Requeue") == "0":
        raise NotRequeued("because the job was submitted without --requeue")
    if fields.get("JobState") != "RUNNING":  # Slurm would restart even a job that somebody has canceled.
        raise NotRequeued(f"because the job is {fields.get('JobState')}")
    try:
        _scontrol("requeue", job, deadline=deadline)
    except _Failed:
        # Another rank may have requeued the job at the same time.
        if not _has_been_requeued(_job_fields(job, deadline), environ):
            raise
    return job


def _has_been_requeued(fields: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    return int(fields.get("Restarts", 0)) > restarts(environ)


def requeue_on(signum: int) -> str:
    """Requeue this batch job if SIGUSR1 has ended it; to be called on one rank.

    Returns:
        The result as a text; empty for other signals and outside of a batch job.
    """
    if signum != signal.SIGUSR1:
        return ""
    try:
        job = requeue(os.environ)
    except NotRequeued as reason:
        return f"not requeued, {reason}"
    return f"requeued as job {job}" if job else ""
