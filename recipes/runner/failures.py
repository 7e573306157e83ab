"""How a process of a run fails: what it leaves for the agent that started it, and what is printed.

One failure causes others: the ranks that remain lose their connection to the one that failed, and fail too. A rank
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
from recipes.runner.worker import is_worker

_LOST_CONNECTION = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed"),
    *("connection was likely closed", "remote process exited or there was a network error", "failed to recv"),
    *("failed to send", "recvvalue failed", "sendbytes failed"),
)
_TIMED_OUT = re.compile("timed out|application timeout", re.IGNORECASE)
_CAUSE_IS_SEEN = 2.0  # Seconds: an agent looks at its workers ten times in one.


class LostConnectionError(RuntimeError):
    """Another rank has ended."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception may only reflect the end of another rank.

    Example:
        >>> is_lost_connection(RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"))
        True
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _LOST_CONNECTION)


@contextmanager
def failures_reported(after_loss: Callable[[], str]) -> Iterator[None]:
    """Leave what ends this process for the agent that started it, if any, and let the agent see the cause first.

    Args:
        after_loss: called where another rank was lost and no agent of ours does it; returns what was done, in words.
    """
    try:
        yield
    except Exception as error:
        consequence = is_lost_connection(error)
        said: Exception = error
        if isinstance(error, UserError):  # Without the names of its subclasses.
            said = RunFailedError(error) if isinstance(error, RunFailedError) else UserError(error)
        elif consequence:
            said = LostConnectionError(short(error))
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            said = TimeoutError(f"another rank did not answer within the collective timeout ({first_line(error)})")
        get_error_handler().record_exception(said)
        if consequence and not is_worker(os.environ):
            print_loss(
                f"error: rank {rank_of_process()} lost its connection to another rank, which has ended or cannot be"
                f" reached: {short(error)}",
                after_loss,
            )
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            with suppress(ValueError):  # Handlers need the main thread.
                for signum in SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
            # Most errors of a user occur on all ranks, and rank 0 tells them best.
            time.sleep(_CAUSE_IS_SEEN if consequence else 0.5 * (rank_of_process() > 0))
        raise


def short(error: BaseException) -> str:
    """The beginning of the first line of an exception: gloo explains at length what a lost connection is."""
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
    if note := after_loss():
        print_error(note)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def exit_now(status: int) -> None:
    """End this process without the interpreter's own clean-up, which takes a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def message_of(failure: ProcessFailure) -> tuple[str, str]:
    """The kind of a worker's exception and its message; of a worker that left none, nothing."""
    content = failure.error_file_data.get("message")
    if not isinstance(content, dict):  # torch's word for none.
        return "", ""
    kind, _, message = str(content.get("message", "")).partition(": ")
    return kind, message


def is_users(failure: ProcessFailure) -> bool:
    """Whether the user has to correct something: starting the worker again would not help."""
    return message_of(failure)[0] in (UserError.__name__, RunFailedError.__name__)


def was_lost(failure: ProcessFailure) -> bool:
    """Whether the worker, or one that it was connected to, ended without an error of its own."""
    return failure.exitcode < 0 or message_of(failure)[0] == LostConnectionError.__name__


def describe_failure(failure: ProcessFailure, rank: int, node: str) -> str:
    """The line that is printed for a worker that failed; empty for one that ended on a signal, and said so.

    Args:
        rank: of the worker.
        node: where it ran, in words.
    """
    where = f"rank {rank} ({node})"
    kind, message = message_of(failure)
    if is_users(failure):
        return f"error: {message}" if rank == 0 else f"error on {where}: {message}"
    if kind == LostConnectionError.__name__:
        return f"error: {where} lost its connection to another rank, which has ended or cannot be reached: {message}"
    if kind:
        first = message.splitlines()[0] if message else ""
        return f"error: {where} failed: {kind}: {first}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        out_of_memory = ", perhaps because the machine ran out of memory" if name == "SIGKILL" else ""
        return f"error: {where} was killed by {name}{out_of_memory}"
    if failure.exitcode - 128 in SIGNALS:
        return ""
    return f"error: {where} exited with status {failure.exitcode}"
