"""When a rank of a run ends, all end, and the user reads why.

A rank that raises leaves the others waiting in a collective call, for half an hour by default. Each rank therefore
keeps a connection to rank 0. One that fails says so through it; the system closes it for a process that was killed, and
finds a node that is cut off. Rank 0 names the cause as its last line and all processes end.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch.distributed import TCPStore
from typing_extensions import override

from recipes.failures.cause import Report, judge, report_of
from recipes.failures.messages import Strange, end_of, keep_alive, listen, receive, send
from recipes.launch.plan import Launch

__all__ = ["Watch", "Watched", "leave", "watch", "watched"]

_TICK = 0.2
_GREETING = 30.0  # Seconds for a connection to say who it is.
_KINDS = {"user", "raised", "raising", "left", "followed"}

_current: "Watch | None" = None


def end_process(status: int, line: str = "") -> None:
    """End this process at once, whatever its main thread waits for; `line` is the last that it prints."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if line:
        with contextlib.suppress(Exception):
            print(line, file=sys.stderr, flush=True)  # noqa: T201
    os._exit(status)


@dataclass
class _Member:
    """A connection to rank 0: who is at its other end, once that is known, and what has arrived of its next message."""

    came: float
    rest: bytes = b""
    who: dict[str, Any] = field(default_factory=dict)
    left: bool = False


class Watch:
    """One rank's part in the watch over a run.

    Args:
        launch: which rank this is.
        store: where rank 0 writes down the port on which it listens, and what a rank says first to be heard.
        address: of rank 0.
    """

    def __init__(self, launch: Launch, store: TCPStore, address: str) -> None:
        self.launch, self.host = launch, socket.gethostname()
        # Its server runs in rank 0 as long as somebody holds it.
        self.store = store
        self.reports: list[Report] = []
        self.over = False
        self._lock = threading.Lock()
        if launch.rank == 0:
            self.listener = listen(launch.world_size)
            self.listener.setblocking(False)
            # It listens to the whole network, and one message ends the run.
            self.token = secrets.token_hex(16)
            store.set("watch", json.dumps([self.listener.getsockname()[1], self.token]))
            loop = self._lead
        else:
            port, token = json.loads(store.get("watch"))
            self.connection = keep_alive(socket.create_connection((address, port), timeout=30))
            self.connection.settimeout(None)
            who = {"rank": launch.rank, "node": launch.node_rank, "host": self.host}
            send(self.connection, who | {"token": token})
            loop = self._follow
        self.thread = threading.Thread(target=loop, daemon=True, name="watch")
        self.thread.start()

    def report(self, error: BaseException, *, handling: bool = False) -> None:
        """Say that this rank ends with an exception; `handling`: it still puts its house in order."""
        kind, line, status = report_of(error)
        self._tell("raising" if handling and kind == "raised" else kind, line, status)

    def leave(self, status: int) -> None:
        """Say goodbye: this rank's end is no failure. With a status other than 0 the others are to end as well."""
        if status:
            self._tell("left", "", status)
        self.over = True
        if self.launch.rank != 0:
            send(self.connection, {"bye": status})
            return
        self.thread.join(5)

    def wait(self) -> None:
        """Wait for the end of this process, which the watch brings about."""
        self.thread.join(30)

    def _tell(self, kind: str, line: str, status: int) -> None:
        if self.launch.rank == 0:
            self._add(Report(0, 0, self.host, kind, line, status))
        else:
            send(self.connection, {"kind": kind, "line": line, "status": status})

    def _add(self, report: Report) -> None:
        with self._lock:
            # What a rank says later is the better founded.
            self.reports = [
                old for old in self.reports if old.rank != report.rank or report.kind in ("lost", "cut off")
            ]
            if not any(old.rank == report.rank for old in self.reports):
                now = time.monotonic()
                self.reports.append(Report(**{**vars(report), "at": now}))

    def _hear(self, member: _Member, message: dict[str, Any]) -> None:
        """Take in a message of a rank; the first says who it is."""
        if not member.who:
            if not hmac.compare_digest(str(message.pop("token", "")).encode(), self.token.encode()):
                raise Strange("it is no rank of this run")
            member.who = {name: message[name] for name in ("rank", "node", "host")}
        elif "bye" in message:
            member.left = True
        elif message.get("kind") in _KINDS:
            self._add(Report(**member.who, **message))

    def _lead(self) -> None:
        """Rank 0: hear everybody, judge, and end the run."""
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        members: dict[socket.socket, _Member] = {}

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            members.pop(connection, None)
            connection.close()

        def hear(connection: socket.socket) -> None:
            member = members[connection]
            try:
                messages, member.rest = receive(connection, member.rest)
                for message in messages:
                    self._hear(member, message)
            except (OSError, EOFError) as end:
                drop(connection)
                if member.who and not member.left:
                    self._add(Report(**member.who, kind=end_of(end)))

        while not self.over:
            for key, _ in selector.select(_TICK):
                if key.fileobj is not self.listener:
                    hear(key.fileobj)  # type: ignore[arg-type]
                    continue
                try:
                    connection = keep_alive(self.listener.accept()[0])
                except OSError:  # It has gone already, or there are too many open files.
                    time.sleep(_TICK)
                    continue
                members[connection] = _Member(time.monotonic())
                selector.register(connection, selectors.EVENT_READ)
            now = time.monotonic()
            for connection in [c for c, m in members.items() if not m.who and now > m.came + _GREETING]:
                drop(connection)
            with self._lock:
                cause = judge(self.reports, time.monotonic())
            if cause is not None:
                line = "" if cause.kind == "left" or (cause.rank == 0 and cause.kind == "user") else cause.describe()
                for connection in members:
                    send(connection, {"status": cause.status, "line": line})
                if cause.rank == 0 and cause.kind == "user":
                    line = f"error: {cause.line}"
                end_process(cause.status, line)
        status = next((report.status for report in self.reports if report.rank == 0), 0)
        for connection in members:
            send(connection, {"status": status, "line": ""} if status else {"bye": 0})

    def _follow(self) -> None:
        """The other ranks: end when rank 0 says so, or when it is gone."""
        rest = b""
        # The first of each node has a terminal of its own; the others share it.
        speaks = self.launch.local_rank == 0
        while not self.over:
            try:
                messages, rest = receive(self.connection, rest)
            except (OSError, EOFError) as end:
                if self.over:
                    return
                first = Report(0, 0, "the master's host", end_of(end))
                alone = self.launch.node_rank == 0 and self.launch.local_rank == 1
                end_process(1, first.describe() if speaks or alone else "")
                return
            for message in messages:
                if "bye" in message:
                    return
                end_process(message["status"], message["line"] if speaks else "")


class Watched(pl.Callback):
    """Reports an exception when it is raised, before anything is put in order that might wait for the other ranks."""

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if _current is not None:
            _current.report(exception, handling=True)


def watch(launch: Launch, store: TCPStore, address: str) -> None:
    """Begin to watch over this process and the others of its run."""
    global _current
    _current = Watch(launch, store, address)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Whatever ends the block reaches the other ranks: with an exception all end, and rank 0 says why."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if _current is not None:
            _current.leave(report_of(error)[2])
        raise
    except BaseException as error:
        if _current is not None:
            kind = report_of(error)[0]
            if kind == "raised":
                traceback.print_exc()
            _current.report(error)
            _current.wait()
        raise
    if _current is not None:
        _current.leave(0)


def leave(status: int) -> None:
    """End this process at once and in agreement with the others: with its loggers and workers closed by the caller."""
    if _current is not None:
        _current.leave(status)
    end_process(status)
