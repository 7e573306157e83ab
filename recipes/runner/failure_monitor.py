"""When one rank of a run ends, all ranks end, and rank 0 prints the cause.

A rank that raises leaves the others waiting in a collective call, for half an hour by default. So a thread of each rank
writes heartbeats, and what ends the rank, into the `TCPStore` of rank 0. A process that is killed is noticed at once by
those of its machine, a machine that is lost by its missing heartbeats.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from datamodules.errors import first_line
from recipes.runner.failure_cause import MISSED_AFTER_LOSS, RankReport, classify_exception, failure_cause
from recipes.runner.launch import Launch, print_error

_TICK = 0.2
_BEATS_MISSED = 20  # Of one a second: as long may an interpreter be busy in one call.
_ENDS = {"lost", "unreachable"}
_END_SEEN_WITHIN = 15.0  # Seconds for the other ranks to read that the run is over; 5 where that is a failure.
_LOG, _LINES, _END, _SEEN = (f"lightning_recipes/{name}" for name in ("log", "lines", "end", "seen"))


def end_process(status: int, line: str = "") -> None:
    """End this process at once, whatever its main thread waits for; `line` is printed last."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if line:
        with contextlib.suppress(Exception):
            print_error(line)
    os._exit(status)


def append(store: Any, key: str, message: dict[str, Any]) -> None:
    """Add a line of JSON to a value of a store."""
    store.append(key, json.dumps(message) + "\n")


def _namespace() -> str:
    """Equal for processes that know each other by their numbers, and share a network: of one machine or container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot}{Path('/proc/self/ns/pid').readlink()}{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return ""


def _end_of(handle: int) -> str:
    """How a process has ended that this one has started; nothing for others."""
    try:
        end = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return ""
    if end is None:
        return ""
    if end.si_code == os.CLD_EXITED:
        return f"it exited with status {end.si_status}"
    return f"it was killed by {signal.Signals(end.si_status).name}"


class FailureMonitor:
    """What one rank knows of its run: whether the other ranks live, and whether the run is over.

    Args:
        launch: which rank this is.
        store: a connection to rank 0's, where the ranks have met.
        after_loss: called before a process ends because another one was lost; what it returns is printed.
    """

    def __init__(self, launch: Launch, store: TCPStore, after_loss: Callable[[], str] = str) -> None:
        self.launch, self.store = launch, store
        self._after_loss = after_loss
        self.over = False
        self.ending = False
        """Whether the monitor handles the loss of a rank, after which it ends this process."""
        self.reports: list[RankReport] = []
        self._others: dict[int, RankReport] = {}
        self._left: set[int] = set()
        self._watched: set[int] = set()
        self._outbox: list[dict[str, Any]] = []
        self._read_lines = self._rounds = 0
        self._beats: list[bytes] = []
        self._missed = [0] * launch.world_size
        self._next_beat = 0.0
        self._finished = threading.Event()
        self._selector = selectors.DefaultSelector()  # For the ends of the processes on this machine.
        self._wakes, self._waker = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def start(self) -> None:
        """Join the monitored ranks."""
        self._send("joined", pid=os.getpid(), namespace=_namespace())
        for target in (self._monitor, self._watch_contact)[: 1 + bool(self.launch.rank)]:
            threading.Thread(target=target, daemon=True, name="failure monitor").start()

    def report(self, error: BaseException, *, handling: bool = False) -> None:
        """Report that this rank ends with an exception; `handling`: it is still being handled."""
        kind, line, status = classify_exception(error)
        kind = "exception_pending" if handling and kind == "exception" else kind
        self._send(kind, line=line[:10_000], status=status)

    def leave(self, status: int) -> None:
        """Report that this rank exits on purpose. With a status other than 0 the other ranks end as well."""
        if self.ending:
            self.wait()
        if status:
            self._send("exit", status=status)
        self._send("left")
        self.over = True
        self._finished.wait(_END_SEEN_WITHIN + 5.0)

    def wait(self) -> None:
        """Wait until the monitor ends this process.

        Slurm sends SIGTERM to a job that the monitor requeues, often before the monitor has printed why.
        """
        deadline = time.monotonic() + 30
        while (rest := deadline - time.monotonic()) > 0:
            try:
                self._finished.wait(rest)
                return
            except (KeyboardInterrupt, SystemExit):
                if not self.ending:
                    raise

    def _send(self, kind: str, **more: Any) -> None:
        # The main thread must not wait for a node that is cut off, so the monitor's writes.
        who = {"rank": self.launch.rank, "node": self.launch.node_rank, "host": socket.gethostname()}
        self._outbox.append({**who, "kind": kind, **more})
        self._waker.send(b"x")

    def _monitor(self) -> None:
        try:
            store: Any = self.store.clone()
            if self.launch.rank == 0:
                ranks = range(self.launch.world_size)
                store.multi_set([self._beat(rank) for rank in ranks], [""] * len(ranks))
            while not self._round(store):
                pass
        except RuntimeError:  # Of the store, mostly: rank 0 has ended.
            self._lose_rank_0("lost")
        finally:
            self._finished.set()

    def _round(self, store: TCPStore) -> bool:
        """Write, read, and wait a moment; returns whether that was the last round."""
        self._rounds += 1
        self._selector.select(_TICK)
        if self._outbox:  # What it tells may follow from the end of rank 0, which is seen a moment later.
            time.sleep(0.05)
        ended = [key for key, _ in self._selector.select(0)]
        leaving = self.over
        if any(key.data == 0 for key in ended):  # A call of its store would print torch's stack.
            raise RuntimeError("rank 0 has ended")
        while self._outbox:
            self._write(store, self._outbox.pop(0))
        beats = time.monotonic() >= self._next_beat
        if beats:
            self._next_beat = time.monotonic() + 1.0
            store.set(self._beat(self.launch.rank), str(self._rounds))
        # The second rank of a node notices the end of the first, and all that of rank 0.
        if self.launch.local_rank < 2 or 0 not in self._others:
            self._read(store)
        for key in ended:
            if key.fileobj is self._wakes:
                self._wakes.recv(100)
            else:
                self._selector.unregister(key.fileobj)
                self._lose(store, key.data, _end_of(key.fd))
        if self.launch.rank == 0:
            return self._judge(store, leaving, beats)
        if store.check([_END]):
            end = json.loads(store.get(_END))
            store.add(_SEEN, 1)
            if end["status"] and not leaving:
                end_process(end["status"], end["line"] if self.launch.local_rank == 0 else "")
            return True
        if leaving:
            store.add(_SEEN, 1)
        return leaving

    @staticmethod
    def _beat(rank: int) -> str:
        return f"lightning_recipes/beat/{rank}"

    def _write(self, store: TCPStore, message: dict[str, Any]) -> None:
        if self.launch.rank == 0:
            self._receive(store, message)
            if message["kind"] != "joined":  # All watch rank 0.
                return
        append(store, _LOG, message)
        store.add(_LINES, 1)

    def _read(self, store: TCPStore) -> None:
        if store.add(_LINES, 0) <= self._read_lines:  # Each is counted after it was written.
            return
        lines = store.get(_LOG).decode().splitlines()
        for line in lines[self._read_lines :]:
            self._receive(store, json.loads(line))
        self._read_lines = len(lines)

    def _receive(self, store: TCPStore, message: dict[str, Any]) -> None:
        rank, kind = message["rank"], message["kind"]
        if kind == "left":
            self._left.add(rank)
        elif kind == "joined":
            if rank != self.launch.rank:
                self._others[rank] = RankReport(rank, message["node"], message["host"], "lost")
                self._watch(store, rank, message)
        elif self.launch.rank == 0:
            known = next((report for report in self.reports if report.rank == rank), None)
            if known is None or not _ENDS & {known.kind, kind}:
                # The last report of a rank is the most accurate one.
                self.reports = [report for report in self.reports if report is not known]
                self.reports.append(RankReport(**message | {"at": time.monotonic()}))

    def _watch(self, store: TCPStore, rank: int, message: dict[str, Any]) -> None:
        """Notice the end of a process on this machine at once."""
        if not message["namespace"] or message["namespace"] != _namespace():
            return
        try:
            self._selector.register(os.pidfd_open(message["pid"]), selectors.EVENT_READ, rank)
            self._watched.add(rank)
        except ProcessLookupError:
            self._lose(store, rank)
        except (OSError, AttributeError):  # On other systems than Linux its heartbeats tell.
            return

    def _lose(self, store: TCPStore, rank: int, line: str = "", kind: str = "lost") -> None:
        if rank not in self._left:
            self._write(store, vars(self._others[rank]) | {"kind": kind, "line": line})

    def _judge(self, store: TCPStore, leaving: bool, beats: bool) -> bool:
        """On rank 0: find out whether the run is over."""
        if beats:
            self._count_beats(store)
        alone = len(self.reports) < self.launch.world_size or any(r.kind != "consequence" for r in self.reports)
        cause = failure_cause(self.reports, time.monotonic() if alone else math.inf)
        if cause is not None:
            self._end_run(store, cause)
        if leaving:
            self._publish_end(store, next((report.status for report in self.reports if report.rank == 0), 0))
        return leaving

    def _count_beats(self, store: TCPStore) -> None:
        """Notice nodes of which no rank has written a heartbeat for a while; the ends of processes here are watched."""
        beats = store.multi_get([self._beat(rank) for rank in range(self.launch.world_size)])
        for rank in self._others:
            self._missed[rank] = self._missed[rank] + 1 if self._beats and beats[rank] == self._beats[rank] else 0
        self._beats = beats
        # Where a process has ended and not the network, the others have lost their connections to it.
        lost = any(report.kind == "consequence" for report in self.reports)
        limit = MISSED_AFTER_LOSS if lost else _BEATS_MISSED
        for rank, report in self._others.items():
            silent = min(self._missed[other] for other, of in self._others.items() if of.node == report.node)
            if silent >= limit and rank not in self._watched:
                self._lose(store, rank, kind="lost" if lost else "unreachable")

    def _publish_end(self, store: TCPStore, status: int, line: str = "") -> None:
        """End the other ranks; the store, which ends with this process, has to live until they have read it."""
        store.set(_END, json.dumps({"status": status, "line": line}))
        deadline = time.monotonic() + (5.0 if status else _END_SEEN_WITHIN)
        lost = sum(report.kind in _ENDS for report in self.reports)
        while store.add(_SEEN, 0) < len(self._others) - lost and time.monotonic() < deadline:
            time.sleep(0.02)

    def _end_run(self, store: TCPStore, cause: RankReport) -> None:
        said = cause.kind == "exit" or (cause.rank == 0 and cause.kind == "user_error")
        own = line = "" if said else cause.describe()
        if cause.kind in _ENDS:
            own = self._handle_loss(line)
            line = f"{line}; {own}" if own else line
        self._publish_end(store, cause.status, line)
        if cause.rank == 0 and cause.kind == "user_error":
            own = f"error: {cause.line}"
        end_process(cause.status, own)

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
            return self._after_loss()
        except Exception as error:
            return first_line(error)

    def _lose_rank_0(self, kind: str) -> None:
        if self.over or self.ending:
            return
        # The first rank of each node prints: it has a terminal of its own, which the others share.
        launch, line = self.launch, RankReport(0, 0, "the master's host", kind).describe()
        prints = launch.local_rank == 0 or (launch.node_rank == 0 and launch.local_rank == 1)
        end_process(1, self._handle_loss(line) if prints else "")

    def _watch_contact(self) -> None:
        """End this process where rank 0 does not answer: calls of the store then wait for ever."""
        missed = before = 0
        while not self._finished.wait(1.0):
            missed, before = (missed + 1 if self._rounds == before else 0), self._rounds
            if missed == _BEATS_MISSED:
                self._lose_rank_0("unreachable")
