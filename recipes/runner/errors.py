"""Reports of exceptions as one line: the printing rank, the format of messages, and the reason of a failure.

After the failure of one rank, the other ranks lose their connection to it and fail too. Each record therefore has the
kind of the failure, and `first_cause` finds the original failure.
"""

import io
import json
import logging
import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from callbacks.lib.signals import SIGNALS, name_of
from datamodules.errors import UserError, first_line
from datamodules.lightning import pl, rank_zero_only
from recipes.runner.variables import error_file_of_agent, is_on_another_node

_LIGHTNING = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_PACKAGES = tuple(Path(__file__).parents[2] / name for name in ("recipes", "callbacks", "datamodules"))
_level: ContextVar[int] = ContextVar("_level", default=logging.INFO)
# Gloo and NCCL raise a plain RuntimeError, so only its text identifies a lost connection.
_LOST_CONNECTION = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed"),
    *("connection was likely closed", "remote process exited or there was a network error", "failed to recv"),
    *("failed to send", "recvvalue failed", "sendbytes failed"),
)
_TIMED_OUT = re.compile("timed out|application timeout", re.IGNORECASE)
_OTHER_WEIGHTS = "Error(s) in loading state_dict"
_KINDS = ("user", "killed", "failed", "timed out", "signal", "unreachable", "lost")
_SIGPIPE_STATUS = 128 + 13
"""Exit status that a shell reports for a program whose reader has ended."""
_CAUSE_IS_SEEN = 3.0  # Seconds for another launcher to notice the rank that caused the failure of this rank.


def is_rank_zero() -> bool:
    """Return whether this process is rank 0 of its run.

    `recipes.runner.worker` sets Lightning's ``rank_zero_only.rank``, which this reads. Before, the variables of the
    launchers decide.
    """
    return not getattr(rank_zero_only, "rank", 0) and not is_on_another_node(os.environ)


def rank_of_process() -> int:
    """Return the global rank of this process, or 0 before it is known."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def rank_zero_print(message: str) -> None:
    """Print a line on rank 0."""
    if is_rank_zero():
        print(message, flush=True)  # noqa: T201


def print_error(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def relative_path(path: str | Path) -> str:
    """Return a path relative to the current folder if it is inside this folder, else unchanged."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class _OneLine(logging.Handler):
    """Handler that prints each of our log messages as a plain line."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # A message about one rank, such as a damaged file, is logged on this rank only.
        if is_rank_zero() or getattr(record, "any_rank", False):
            print(record.getMessage(), file=sys.stderr)  # noqa: T201


@contextmanager
def warnings_only() -> Iterator[None]:
    """Print only warnings: no messages, no progress and nothing on standard output."""
    before = _level.set(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        _level.reset(before)


def prints_progress() -> bool:
    """Return whether more than warnings are printed."""
    return _level.get() < logging.WARNING


def escape_output() -> None:
    """Make standard output escape unknown characters, like standard error: a file's name may contain any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def configure_logging() -> None:
    """Print our messages and warnings as plain lines, and suppress tips and deprecation warnings of other packages."""
    for name in _LIGHTNING:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in (f"{pl.__name__}.profilers", f"{pl.__name__}.callbacks.model_summary", "lightning_recipes"):
        logger = logging.getLogger(name)
        logger.setLevel(_level.get())
        logger.handlers = [_OneLine()]
        logger.propagate = False
    # A second run in this process must not wrap the first run's function.
    default_showwarning = getattr(warnings.showwarning, "default", warnings.showwarning)

    def show_ours(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: Any, **kwargs: Any
    ) -> None:
        if not any(map(Path(filename).is_relative_to, _PACKAGES)):
            default_showwarning(message, category, filename, lineno, *args, **kwargs)
        elif is_rank_zero():
            print(f"warning: {message}", file=sys.stderr)  # noqa: T201

    show_ours.default = default_showwarning  # type: ignore[attr-defined]
    warnings.showwarning = show_ours
    for module in ("joblib", *_LIGHTNING, "torch", "tensorboard", "torchmetrics"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    # Pillow warns of large images; the data modules reject images by their own limit.
    warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
    warnings.filterwarnings("ignore", message=r".*(isinstance\(treespec, LeafSpec\)|trace might not generalize).*")


def _cut(text: str, longest: int) -> str:
    """Return a text; in a text of more than `longest` characters, the middle is replaced by dots."""
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[: longest - 5 - half]} ... {text[-half:]}"


def error_lines(error: UserError) -> str:
    """Format the message of an error as one printable line, followed by the commands to type, one per line."""
    return "\n  ".join(map(one_line, [str(error.args[0]), *error.commands]))


def one_line(message: str) -> str:
    """Format a message, which may contain values of any kind and length, as one printable line.

    The middle is left out of words of more than 500 characters, and of a text of more than 10,000.

    Example:
        >>> print(one_line("no file \x1b[31mred\\n"))
        no file \\x1b[31mred\\n
        >>> one_line("--lr " + "9" * 1000 + " is not a number")[-24:]
        '99999999 is not a number'
    """
    characters = []
    for character in message:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    words = "".join(characters).split(" ")
    return _cut(" ".join(_cut(word, 500) for word in words), 10_000)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an exception may only reflect the end of another rank.

    Example:
        >>> is_lost_connection(RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"))
        True
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _LOST_CONNECTION)


def difference_of_weights(error: RuntimeError) -> str:
    """Return the first difference in torch's error about weights of another network; "" for other errors."""
    if _OTHER_WEIGHTS not in str(error):
        return ""
    # torch's first line has only the module; the second line has the first differing tensor.
    return str(error).splitlines()[1].strip()[:200]


def reader_is_gone() -> bool:
    """Return whether the reader of standard output or standard error has ended, as in ``| head``.

    Later output is discarded: Python flushes the streams once more at its end.
    """
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    gone = [descriptor for descriptor, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(gone)


@dataclass(frozen=True)
class Failure:
    """The reason for the end of a process of a run.

    Args:
        kind: "user" for an error that the user has to correct, "killed" by the system, "failed" for another error,
            "timed out" waiting for a rank, "signal" after which the workers have saved, "unreachable" for node 0, or
            "lost" its connection.
        message: the reason in words, to which `of_rank` adds the process.
        status: the exit status.
    """

    kind: str
    message: str
    status: int = 1

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure of a process that an exception ends."""
        if isinstance(error, UserError):
            return cls("user", error_lines(error), error.exit_status)
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            return cls("signal", "ended on SIGPIPE", _SIGPIPE_STATUS)
        reason = one_line(first_line(error))
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            late = "failed: TimeoutError: another rank did not answer within the collective timeout"
            return cls("timed out", f"{late} ({reason})")
        if is_lost_connection(error):
            # A short text in place of Gloo's long explanation.
            lost = "lost its connection to another rank, which has ended or cannot be reached"
            return cls("lost", f"{lost}: {reason[:120]}")
        return cls("failed", f"failed: {reason}")

    @classmethod
    def of_exit(cls, status: int) -> "Failure":
        """Return the failure of a process that has left no record."""
        if status < 0:
            name = signal.Signals(-status).name
            out_of_memory = ", perhaps because the machine ran out of memory" if name == "SIGKILL" else ""
            return cls("killed", f"was killed by {name}{out_of_memory}")
        if status - 128 in SIGNALS:
            return cls("signal", f"ended on {name_of(status - 128)}", status)
        return cls("failed", f"exited with status {status}", status)

    def write(self) -> None:
        """Write this record for the agent that has started this process, if there is one (ours or torchrun)."""
        path = error_file_of_agent(os.environ)
        if path:
            # torch reads the message and the time, and reports the earliest record as the cause.
            Path(path).write_text(json.dumps(asdict(self) | {"timestamp": int(time.time())}))

    @classmethod
    def read(cls, path: str) -> "Failure | None":
        """Return the record of a process, or None."""
        with suppress(OSError, ValueError, KeyError):
            fields = json.loads(Path(path).read_text())
            return cls(fields["kind"], fields["message"], fields["status"])
        return None

    def of_rank(self, rank: int, node: str) -> "Failure":
        """Return this failure with its process in the message, except for an error of the user on rank 0.

        Usually, such an error is the same on all ranks.
        """
        if self.kind == "user":
            return replace(self, message=f"rank {rank} ({node}): {self.message}") if rank else self
        return replace(self, message=f"rank {rank} ({node}) {self.message}")


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the other failures; among several, the failure of the lowest rank."""

    def order(failure: Failure) -> int:
        return _KINDS.index(failure.kind)

    return min(failures, key=order)


@contextmanager
def failures_reported(after_loss: Callable[[], str], after_error: Callable[[str], None]) -> Iterator[None]:
    """Record the exception that ends this process, unless our agent has started the process.

        Args:
            after_loss: a function that is called if another rank was lost, and returns what it did, in words.
    after_error: a function that is called with an error of this rank, in one line, before other ranks notice its
                end.
    """
    try:
        yield
    except Exception as error:
        failure = Failure.of(error)
        failure.write()
        if failure.kind == "signal":
            # Without a message, like other Unix programs on SIGPIPE. Saved checkpoints remain.
            sys.exit(failure.status)
        if failure.kind == "lost":
            print_loss(f"error: rank {rank_of_process()} {failure.message}", after_loss)
        elif failure.kind != "timed out":
            after_error(first_line(error))
        started_by_torchrun = error_file_of_agent(os.environ) is not None
        if started_by_torchrun:
            with suppress(ValueError):  # Handlers need the main thread.
                for signum in SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
        # A launcher reports the process that ends first. Most user errors occur on all ranks, and rank 0 prints them.
        if rank_of_process() or (started_by_torchrun and failure.kind == "lost"):
            time.sleep(_CAUSE_IS_SEEN)
        raise


def print_loss(line: str, after_loss: Callable[[], str]) -> None:
    """Print that a process was lost, and respond, for example with a requeue by Slurm.

    The line comes first, and signals are ignored: Slurm ends the processes of a job as soon as it has requeued it.

    Args:
        after_loss: a function that responds, and returns what it did, in words.
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
    """End this process without the interpreter's clean-up, which takes a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
