"""When one rank of a run ends, all ranks end, and rank 0 prints the cause.

A rank that raises leaves the others waiting in a collective call, for half an hour by default. So each rank keeps a
connection to rank 0. A rank that fails reports through it; the kernel closes it for a process that was killed, and
detects a node that is unreachable. Rank 0 prints the cause as its last line, and all processes end.

The ranks find each other through the same connections.
"""

import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch.distributed import TCPStore
from typing_extensions import override

from datamodules.errors import UserError
from recipes.failures.cause import RankReport, classify_exception, failure_cause, first_line
from recipes.failures.protocol import Channel, connection_failure, keep_alive
from recipes.launch.plan import Launch
from recipes.launch.rank_zero import print_error

__all__ = [
    "Coordinator",
    "ExpectedEnd",
    "FailureReporter",
    "Member",
    "RunConnection",
    "exit_run",
    "monitored",
    "use_monitor",
]

_TICK = 0.2
_IDENTIFY_WITHIN = 10.0  # Seconds for a new connection to say which rank it is.
_MAX_TEXT = 10_000
_KINDS = {"user_error", "exception", "exception_pending", "exit", "consequence"}

log = logging.getLogger("lightning_recipes.failures")

_current: "RunConnection | None" = None
_translate: Callable[[str], str] = str
_after_loss: Callable[[], str] = str


def end_process(status: int, line: str = "") -> None:
    """End this process at once, whatever its main thread waits for; `line` is printed last."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if line:
        with contextlib.suppress(Exception):
            print_error(line)
    os._exit(status)


class RunConnection(ABC):
    """What one rank knows of its run: the values that rank 0 has published, and whether the run is over.

    Args:
        launch: which rank this is.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.host = launch, socket.gethostname()
        self.over = False
        self.monitors = False
        """Whether the end of a rank ends the run: from the end of the rendezvous on."""
        self.ending = False
        """Whether the monitor handles the loss of a rank, after which it ends this process."""
        self.changed = threading.Condition()
        self.published: dict[str, Any] = {}
        self._finished = threading.Event()
        self.thread = threading.Thread(target=self._monitor, daemon=True, name="failure monitor")

    def wait_for(self, name: str, deadline: float) -> Any:
        """A value that rank 0 publishes.

        Args:
            deadline: in seconds of `time.monotonic`.

        Raises:
            TimeoutError: after the deadline.
            EOFError: the connection to rank 0 was lost before.
        """
        self._wait_until(lambda: name in self.published, deadline)
        return self.published[name]

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        with self.changed:
            while not condition():
                if self.over:
                    raise EOFError
                if (rest := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                # In short pieces, so that signals are handled meanwhile.
                self.changed.wait(min(rest, _TICK))

    def report(self, error: BaseException, *, handling: bool = False) -> None:
        """Report that this rank ends with an exception; `handling`: it is still being handled."""
        kind, line, status = classify_exception(error)
        kind = "exception_pending" if handling and kind == "exception" else kind
        # Only our own messages name parameters; another exception is reported as it is.
        line = _translate(line) if kind == "user_error" else line
        self._send_report(kind, line[:_MAX_TEXT], status)

    def leave(self, status: int) -> None:
        """Report that this rank exits on purpose. With a status other than 0 the other ranks end as well."""
        if self.ending:
            self.wait()
        if status:
            self._send_report("exit", "", status)
        self.over = True
        self._say_goodbye(status)

    def wait(self) -> None:
        """Wait until the monitor ends this process.

        Slurm sends SIGTERM to a job that the monitor requeues, often before the monitor has printed why.
        """
        deadline = time.monotonic() + 30
        while (rest := deadline - time.monotonic()) > 0:
            try:
                self._finished.wait(rest)  # `Thread.join` that a signal interrupts takes the thread for ended.
                return
            except (KeyboardInterrupt, SystemExit):
                if not self.ending:
                    raise

    def _monitor(self) -> None:
        try:
            self._run()
        finally:
            self._finished.set()

    def _handle_loss(self, line: str) -> str:
        """Print that a process was lost, and do something about it; the monitor has to survive that.

        The line comes first: Slurm may end the program that writes a job's output as soon as it has requeued the job.

        Returns:
            What was done, in words.
        """
        self.ending = True
        with contextlib.suppress(Exception):
            print_error(line)
        try:
            return _after_loss()
        except Exception as error:
            return first_line(error)

    @abstractmethod
    def _send_report(self, kind: str, line: str, status: int) -> None: ...

    @abstractmethod
    def _say_goodbye(self, status: int) -> None: ...

    @abstractmethod
    def _run(self) -> None: ...


@dataclass
class _Peer:
    """A connection to rank 0: the rank at its other end, once it has said which."""

    channel: Channel
    connected_at: float
    who: dict[str, Any] = field(default_factory=dict)
    left: bool = False


class Coordinator(RunConnection):
    """Rank 0's end of the connections: accepts the ranks of the run, receives their reports, and ends the run.

    Args:
        listener: where the ranks connect; closed when all have.
    """

    def __init__(self, launch: Launch, listener: socket.socket) -> None:
        super().__init__(launch)
        self.records: dict[int, dict[str, Any]] = {}
        """What each rank says of itself, by rank."""
        self.claimed_twice: int | None = None
        """A rank that two processes claim to be."""
        self.reports: list[RankReport] = []
        self.store: TCPStore | None = None
        """What torch.distributed uses; its server runs as long as the object exists."""
        self._listener: socket.socket | None = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._lock = threading.Lock()
        self.thread.start()

    def publish(self, name: str, value: Any) -> None:
        """Send a value to all ranks, also to those that connect later."""
        with self.changed:
            self.published[name] = value
            for peer in list(self._peers.values()):
                if peer.who:
                    peer.channel.send({"published": {name: value}})

    @override
    def _send_report(self, kind: str, line: str, status: int) -> None:
        self._add(RankReport(0, 0, self.host, kind, line, status))

    @override
    def _say_goodbye(self, status: int) -> None:
        self.thread.join(5)

    def _add(self, report: RankReport) -> None:
        with self._lock:
            # The last report of a rank is the most accurate one.
            self.reports = [
                old for old in self.reports if old.rank != report.rank or report.kind in ("lost", "unreachable")
            ]
            if not any(old.rank == report.rank for old in self.reports):
                now = time.monotonic()
                self.reports.append(RankReport(**{**vars(report), "at": now}))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # Too many files are open.
            time.sleep(_TICK)
            return
        connection.setblocking(True)
        try:
            channel = Channel(keep_alive(connection))
        except OSError:  # It was closed at the other end.
            connection.close()
            return
        self._peers[connection] = _Peer(channel, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        with self.changed:
            peer = self._peers.pop(connection)
        peer.channel.close()

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            for message in peer.channel.receive():
                if peer.who:
                    self._receive(peer, message)
                elif not self._welcome(peer, message):
                    self._drop(connection)
                    return
        except (OSError, EOFError) as end:
            self._drop(connection)
            if peer.who and not peer.left:
                self._lost(peer, end)

    def _welcome(self, peer: _Peer, message: dict[str, Any]) -> bool:
        """Take a process as the rank that it says it is; False where that is taken, or no rank."""
        who = {name: message.get(name) for name in ("rank", "node", "host")}
        if not isinstance(who["rank"], int) or not isinstance(who["node"], int) or not isinstance(who["host"], str):
            return False
        with self.changed:
            if who["rank"] == 0 or any(other.who.get("rank") == who["rank"] for other in self._peers.values()):
                self.claimed_twice = who["rank"]
                self.changed.notify_all()
                text = f"two processes claim to be rank {who['rank']} (node {who['node']}); give each node its own"
                peer.channel.send({"refused": f"{text} `node_rank`"})
                return False
            peer.who = who
            peer.channel.send({"published": self.published})
        return True

    def _lost(self, peer: _Peer, end: OSError | EOFError) -> None:
        if self.monitors:
            self._add(RankReport(**peer.who, kind=connection_failure(end)))
        else:
            with self.changed:
                # It may be started again in time.
                self.records.pop(peer.who["rank"], None)

    def _receive(self, peer: _Peer, message: dict[str, Any]) -> None:
        if "record" in message:
            with self.changed:
                self.records[peer.who["rank"]] = peer.who | message["record"]
                self.changed.notify_all()
        elif "exit" in message:
            peer.left = True
        elif message.get("kind") in _KINDS:
            self._add(RankReport(**peer.who, **message))

    def _close_when_complete(self) -> None:
        """Once all ranks have joined, nobody else can."""
        if self._listener is None or not self.monitors or len(self.records) < self.launch.world_size - 1:
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        for connection in [connection for connection, peer in self._peers.items() if not peer.who]:
            self._drop(connection)

    @override
    def _run(self) -> None:
        while not self.over:
            for key, _ in self._selector.select(_TICK):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif connection in self._peers:
                    self._read(connection)
            now = time.monotonic()
            late = [c for c, p in self._peers.items() if not p.who and now > p.connected_at + _IDENTIFY_WITHIN]
            for connection in late:
                self._drop(connection)
            self._close_when_complete()
            with self._lock:
                cause = failure_cause(self.reports, time.monotonic())
            if cause is not None:
                self._end_run(cause)
        status = next((report.status for report in self.reports if report.rank == 0), 0)
        self._send_to_all({"status": status, "line": ""} if status else {"exit": 0})

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            if peer.who:
                peer.channel.send(message)

    def _end_run(self, cause: RankReport) -> None:
        line = "" if cause.kind == "exit" or (cause.rank == 0 and cause.kind == "user_error") else cause.describe()
        own = line
        if cause.kind in ("lost", "unreachable"):
            own = self._handle_loss(line)
            line = f"{line}; {own}" if own else line
        self._send_to_all({"status": cause.status, "line": line})
        if cause.rank == 0 and cause.kind == "user_error":
            own = f"error: {cause.line}"
        end_process(cause.status, own)


class Member(RunConnection):
    """The end of another rank: it ends this process when rank 0 says so, or when the connection is lost.

    Args:
        channel: to rank 0, after the greeting.
        record: what rank 0 compares with the other ranks.
    """

    def __init__(self, launch: Launch, channel: Channel, record: dict[str, Any]) -> None:
        super().__init__(launch)
        self.channel = channel
        self._accepted = False
        self._failure: Exception | None = None
        channel.send({"rank": launch.rank, "node": launch.node_rank, "host": self.host})
        channel.send({"record": record})
        self.thread.start()

    def wait_until_accepted(self, deadline: float) -> None:
        """Wait until rank 0 has accepted this process as a rank.

        Args:
            deadline: in seconds of `time.monotonic`.

        Raises:
            UserError: another process is that rank.
            OSError, EOFError: the connection was lost, or no rank 0 is there.
        """
        try:
            self._wait_until(lambda: self._accepted, deadline)
        except EOFError as lost:
            raise (self._failure or lost) from None

    @override
    def _send_report(self, kind: str, line: str, status: int) -> None:
        self.channel.send({"kind": kind, "line": line, "status": status})

    @override
    def _say_goodbye(self, status: int) -> None:
        self.channel.send({"exit": status})

    @override
    def _run(self) -> None:
        while not self.over:
            try:
                messages = self.channel.receive()
            except (OSError, EOFError) as end:
                self._lost(end)
                return
            for message in messages:
                if "published" in message:
                    with self.changed:
                        self._accepted = True
                        self.published |= message["published"]
                        self.changed.notify_all()
                elif "refused" in message:
                    self._lost(UserError(message["refused"]))
                    return
                elif "exit" in message:
                    return
                else:
                    end_process(message["status"], message["line"] if self._prints else "")

    @property
    def _prints(self) -> bool:
        """The first rank of each node has a terminal of its own; the others share it."""
        return self.launch.local_rank == 0

    def _lost(self, end: Exception) -> None:
        with self.changed:
            if self.over:
                return
            if not self.monitors:
                self._failure, self.over = end, True
                self.changed.notify_all()
                self.channel.close()
                return
        failure = connection_failure(end) if isinstance(end, (OSError, EOFError)) else "lost"
        first = RankReport(0, 0, "the master's host", failure)
        alone = self.launch.node_rank == 0 and self.launch.local_rank == 1
        end_process(1, self._handle_loss(first.describe()) if self._prints or alone else "")


class ExpectedEnd(Exception):
    """Ends a training on purpose, on all ranks at once: no failure."""


class FailureReporter(pl.Callback):
    """Reports an exception when it is raised, before any clean-up that might wait for the other ranks."""

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if _current is not None and not isinstance(exception, ExpectedEnd):
            _current.report(exception, handling=True)


def use_monitor(connection: RunConnection) -> None:
    """From now on, the end of this process is reported to the other ranks, and theirs ends this one.

    Raises:
        UserError: rank 0 has ended already.
    """
    global _current
    with connection.changed:
        connection.monitors = True
        if connection.over:
            raise UserError("rank 0 ended during the rendezvous; see its own output")
    _current = connection


@contextlib.contextmanager
def monitored(translate: Callable[[str], str] = str, after_loss: Callable[[], str] = str) -> Iterator[None]:
    """Report to the other ranks how the block ends: after an exception all end, and rank 0 prints the cause.

    Args:
        translate: turns the parameters in messages into flags.
        after_loss: called before a process ends because another one was lost, on rank 0 or, where that was lost, on one
            rank or several of each node; what it returns is printed after the cause.
    """
    global _translate, _after_loss
    _translate, _after_loss = translate, after_loss
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if _current is not None:
            _current.leave(classify_exception(error)[2])
        raise
    except BaseException as error:
        if _current is not None:
            kind = classify_exception(error)[0]
            if kind == "exception":
                traceback.print_exc()
            _current.report(error)
            _current.wait()
        raise
    else:
        if _current is not None:
            _current.leave(0)
    finally:
        # A signal may have ended the report above.
        if _current is not None and _current.ending:
            _current.wait()


def exit_run(status: int) -> None:
    """End this process at once and report that to the other ranks; the caller has closed its loggers and workers."""
    if _current is not None:
        _current.leave(status)
    end_process(status)
