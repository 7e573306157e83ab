"""Report why a process of a run failed: to the agent that started it, and to the user.

One failure causes others: the remaining ranks lose their connection to the failed one, and then fail as well. A rank
that fails in that way waits a moment, so that the agent sees the cause first.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from callbacks.lib.signals import SIGNALS
from datamodules.errors import RunFailedError, UserError, first_line
from recipes.runner.printing import print_error, rank_of_process

# Gloo and NCCL raise a plain RuntimeError, so that only its text tells a lost connection.
_LOST_CONNECTION = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed"),
    *("connection was likely closed", "remote process exited or there was a network error", "failed to recv"),
    *("failed to send", "recvvalue failed", "sendbytes failed"),
)
_TIMED_OUT = re.compile("timed out|application timeout", re.IGNORECASE)
_CAUSE_IS_SEEN = 2.0  # An agent looks at its workers ten times a second.


class LostConnectionError(RuntimeError):
    """The error of a rank that lost its connection to another one."""


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an exception may only reflect the end of another rank.

    Example:
        >>> is_lost_connection(RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"))
        True
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _LOST_CONNECTION)


@contextmanager
def failures_reported(
    after_loss: Callable[[], str] | None = None, after_error: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Record the exception that ends this process for the agent that started it, if any.

    Args:
        after_loss: called where another rank was lost; returns what was done, in words. None in a worker of our agent,
            which calls it itself.
        after_error: called with an error of this rank, in one line, before the other ranks notice its end.
    """
    try:
        yield
    except Exception as error:
        consequence = is_lost_connection(error)
        recorded: Exception = error
        # `is_users` compares names of classes, so that an error of a subclass is recorded as its base class.
        if isinstance(error, RunFailedError):
            recorded = RunFailedError(str(error))
        elif isinstance(error, UserError):
            recorded = UserError(str(error))
        elif consequence:
            recorded = LostConnectionError(short(error))
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            recorded = TimeoutError(f"another rank did not answer within the collective timeout ({first_line(error)})")
        get_error_handler().record_exception(recorded)
        if after_error and not consequence and not isinstance(recorded, TimeoutError):
            after_error(first_line(error))
        if consequence and after_loss:
            print_loss(
                f"error: rank {rank_of_process()} lost its connection to another rank, which has ended or cannot be"
                f" reached: {short(error)}",
                after_loss,
            )
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            with suppress(ValueError):  # Handlers need the main thread.
                for signum in SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
            if consequence:
                time.sleep(_CAUSE_IS_SEEN)
            elif rank_of_process() > 0:
                # Most errors of a user occur on all ranks, and the message of rank 0 names no rank.
                time.sleep(0.5)
        raise


def short(error: BaseException) -> str:
    """Return 120 characters of an exception's first line: gloo explains at length what a lost connection is."""
    return first_line(error)[:120]


def print_loss(line: str, after_loss: Callable[[], str]) -> None:
    """Print that a process was lost, and do something about it, such as a requeue by Slurm.

    The line comes first, and signals are ignored: Slurm ends the processes of a job as soon as it has requeued it.

    Args:
        after_loss: returns what was done, in words.
    """
    handlers: dict[int, Any] = {}
    with suppress(ValueError):  # Handlers need the main thread.
        handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in SIGNALS}
    print_error(line)
    note = after_loss()
    if note:
        print_error(note)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def exit_now(status: int) -> None:
    """End this process without the interpreter's own clean-up, which takes a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def message_of(failure: ProcessFailure) -> tuple[str, str]:
    """Return the kind of a worker's exception and its message; empty texts where it left none."""
    content = failure.error_file_data.get("message")
    if not isinstance(content, dict):  # torch writes a text where the worker left no error file.
        return "", ""
    kind, _, message = str(content.get("message", "")).partition(": ")
    return kind, message


def is_users(failure: ProcessFailure) -> bool:
    """Return whether the user has to correct something, so that a restart would not help."""
    return message_of(failure)[0] in (UserError.__name__, RunFailedError.__name__)


def was_lost(failure: ProcessFailure) -> bool:
    """Return whether the worker, or one that it was connected to, ended without an error of its own."""
    return failure.exitcode < 0 or message_of(failure)[0] == LostConnectionError.__name__


def describe_failure(failure: ProcessFailure, rank: int, node: str) -> tuple[str, str]:
    """Return which worker has failed and why; empty texts for one that ended on a signal and has printed it.

    Args:
        failure: the failure that torch's agent has recorded.
        rank: the rank of the worker.
        node: the worker's node, in words.

    Returns:
        The worker in words, for an error that only this rank may have, else an empty text; and the message.
    """
    worker = f"rank {rank} ({node})"
    kind, message = message_of(failure)
    if is_users(failure):
        return "" if rank == 0 else worker, message
    if kind == LostConnectionError.__name__:
        return "", f"{worker} lost its connection to another rank, which has ended or cannot be reached: {message}"
    if kind:
        first_line_of_message = message.splitlines()[0] if message else ""
        return "", f"{worker} failed: {kind}: {first_line_of_message}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        out_of_memory = ", perhaps because the machine ran out of memory" if name == "SIGKILL" else ""
        return "", f"{worker} was killed by {name}{out_of_memory}"
    if failure.exitcode - 128 in SIGNALS:
        return "", ""
    return "", f"{worker} exited with status {failure.exitcode}"
