"""When one rank of a run ends, all ranks end, and rank 0 prints the cause.

A rank that raises leaves the others waiting in a collective call, for half an hour by default. So each rank keeps a
connection to rank 0. A rank that fails reports through it; the kernel closes it for a process that was killed, and
detects a node that is unreachable. Rank 0 prints the cause as its last line, and all processes end.
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch.distributed import TCPStore
from typing_extensions import override

from recipes.failures.cause import RankReport, classify_exception, failure_cause, first_line
from recipes.failures.protocol import ProtocolError, connection_failure, keep_alive, listen, receive, send
from recipes.launch.plan import Launch

__all__ = ["FailureMonitor", "FailureReporter", "exit_run", "monitored", "start_monitor"]

_TICK = 0.2
_IDENTIFY_WITHIN = 30.0  # Seconds for a new connection to identify itself.
_KINDS = {"user_error", "exception", "exception_pending", "exit", "consequence"}

_current: "FailureMonitor | None" = None
_translate: Callable[[str], str] = str
_after_loss: Callable[[], str] = str


def end_process(status: int, line: str = "") -> None:
    """End this process at once, whatever its main thread waits for; `line` is printed last."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if line:
        with contextlib.suppress(Exception):
            print(line, file=sys.stderr, flush=True)  # noqa: T201
    os._exit(status)


def _loss_handled() -> str:
    """What is done about the loss of a process, for the line that is printed; the monitor has to survive it."""
    try:
        return _after_loss()
    except Exception as error:
        return f"; {first_line(error)}"


@dataclass
class _Member:
    """A connection to rank 0: the rank at its other end, once it has identified itself, and the start of a message."""

    connected_at: float
    rest: bytes = b""
    who: dict[str, Any] = field(default_factory=dict)
    left: bool = False


class FailureMonitor:
    """Connects one rank to rank 0, and ends this process when the run ends.

    Args:
        launch: which rank this is.
        store: where rank 0 publishes the port on which it listens, and the token that identifies ranks of this run.
        address: of rank 0.
    """

    def __init__(self, launch: Launch, store: TCPStore, address: str) -> None:
        self.launch, self.host = launch, socket.gethostname()
        # Keep a reference: the server of the store runs in rank 0 as long as the object exists.
        self.store = store
        self.reports: list[RankReport] = []
        self.over = False
        self._lock = threading.Lock()
        if launch.rank == 0:
            self.listener = listen(launch.world_size)
            self.listener.setblocking(False)
            # The port is open to the network, and one message can end the run.
            self.token = secrets.token_hex(16)
            store.set("monitor", json.dumps([self.listener.getsockname()[1], self.token]))
            loop = self._serve
        else:
            port, token = json.loads(store.get("monitor"))
            self.connection = keep_alive(socket.create_connection((address, port), timeout=30))
            self.connection.settimeout(None)
            who = {"rank": launch.rank, "node": launch.node_rank, "host": self.host}
            send(self.connection, who | {"token": token})
            loop = self._listen
        self.thread = threading.Thread(target=loop, daemon=True, name="failure monitor")
        self.thread.start()

    def report(self, error: BaseException, *, handling: bool = False) -> None:
        """Report that this rank ends with an exception; `handling`: it is still being handled."""
        kind, line, status = classify_exception(error)
        kind = "exception_pending" if handling and kind == "exception" else kind
        # Only our own messages name parameters; another exception is reported as it is.
        self._send_report(kind, _translate(line) if kind == "user_error" else line, status)

    def leave(self, status: int) -> None:
        """Report that this rank exits on purpose. With a status other than 0 the other ranks end as well."""
        if status:
            self._send_report("exit", "", status)
        self.over = True
        if self.launch.rank != 0:
            send(self.connection, {"exit": status})
            return
        self.thread.join(5)

    def wait(self) -> None:
        """Wait until the monitor ends this process."""
        self.thread.join(30)

    def _send_report(self, kind: str, line: str, status: int) -> None:
        if self.launch.rank == 0:
            self._add(RankReport(0, 0, self.host, kind, line, status))
        else:
            send(self.connection, {"kind": kind, "line": line, "status": status})

    def _add(self, report: RankReport) -> None:
        with self._lock:
            # The last report of a rank is the most accurate one.
            self.reports = [
                old for old in self.reports if old.rank != report.rank or report.kind in ("lost", "unreachable")
            ]
            if not any(old.rank == report.rank for old in self.reports):
                now = time.monotonic()
                self.reports.append(RankReport(**{**vars(report), "at": now}))

    def _receive(self, member: _Member, message: dict[str, Any]) -> None:
        """Process a message; the first one on a connection identifies the rank."""
        if not member.who:
            if not hmac.compare_digest(str(message.pop("token", "")).encode(), self.token.encode()):
                raise ProtocolError("it is not a rank of this run")
            member.who = {name: message[name] for name in ("rank", "node", "host")}
        elif "exit" in message:
            member.left = True
        elif message.get("kind") in _KINDS:
            self._add(RankReport(**member.who, **message))

    def _serve(self) -> None:
        """Rank 0: receive reports, find the cause, and end the run."""
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        members: dict[socket.socket, _Member] = {}

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            members.pop(connection, None)
            connection.close()

        def read(connection: socket.socket) -> None:
            member = members[connection]
            try:
                messages, member.rest = receive(connection, member.rest)
                for message in messages:
                    self._receive(member, message)
            except (OSError, EOFError) as end:
                drop(connection)
                if member.who and not member.left:
                    self._add(RankReport(**member.who, kind=connection_failure(end)))

        while not self.over:
            for key, _ in selector.select(_TICK):
                if isinstance(key.fileobj, socket.socket) and key.fileobj is not self.listener:
                    read(key.fileobj)
                    continue
                try:
                    connection = keep_alive(self.listener.accept()[0])
                except OSError:  # It is closed already, or too many files are open.
                    time.sleep(_TICK)
                    continue
                members[connection] = _Member(time.monotonic())
                selector.register(connection, selectors.EVENT_READ)
            now = time.monotonic()
            for connection in [c for c, m in members.items() if not m.who and now > m.connected_at + _IDENTIFY_WITHIN]:
                drop(connection)
            with self._lock:
                cause = failure_cause(self.reports, time.monotonic())
            if cause is not None:
                line = (
                    "" if cause.kind == "exit" or (cause.rank == 0 and cause.kind == "user_error") else cause.describe()
                )
                if cause.kind in ("lost", "unreachable"):
                    line += _loss_handled()
                for connection in members:
                    send(connection, {"status": cause.status, "line": line})
                if cause.rank == 0 and cause.kind == "user_error":
                    line = f"error: {cause.line}"
                end_process(cause.status, line)
        status = next((report.status for report in self.reports if report.rank == 0), 0)
        for connection in members:
            send(connection, {"status": status, "line": ""} if status else {"exit": 0})

    def _listen(self) -> None:
        """Other ranks: end when rank 0 says so, or when its connection is lost."""
        rest = b""
        # The first rank of each node has a terminal of its own; the others share it.
        prints = self.launch.local_rank == 0
        while not self.over:
            try:
                messages, rest = receive(self.connection, rest)
            except (OSError, EOFError) as end:
                if self.over:
                    return
                first = RankReport(0, 0, "the master's host", connection_failure(end))
                alone = self.launch.node_rank == 0 and self.launch.local_rank == 1
                end_process(1, first.describe() + _loss_handled() if prints or alone else "")
                return
            for message in messages:
                if "exit" in message:
                    return
                end_process(message["status"], message["line"] if prints else "")


class FailureReporter(pl.Callback):
    """Reports an exception when it is raised, before any clean-up that might wait for the other ranks."""

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if _current is not None:
            _current.report(exception, handling=True)


def start_monitor(launch: Launch, store: TCPStore, address: str) -> None:
    """Start the monitor of this process."""
    global _current
    _current = FailureMonitor(launch, store, address)


@contextlib.contextmanager
def monitored(translate: Callable[[str], str] = str, after_loss: Callable[[], str] = str) -> Iterator[None]:
    """Report to the other ranks how the block ends: after an exception all end, and rank 0 prints the cause.

    Args:
        translate: turns the parameters in messages into flags.
        after_loss: called before a process ends because another one was lost, on rank 0 or, where that was lost, on one
            rank or several of each node; what it returns is added to the line that is printed.
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
    if _current is not None:
        _current.leave(0)


def exit_run(status: int) -> None:
    """End this process at once and report that to the other ranks; the caller has closed its loggers and workers."""
    if _current is not None:
        _current.leave(status)
    end_process(status)
