"""The failure monitor of rank 0, its connections and what reaches them by mistake."""

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from recipes.failures import monitor
from recipes.failures.protocol import Channel, listen

from callbacks.lib.signals import Preempted, ending_on_signals
from recipes.runner.failure_monitor import Coordinator, FailureMonitor, Member, monitored, use_monitor
from recipes.runner.launch import Launch
from tests.support.ranks import run_ranks

GREETING = b"lightning-recipes 1\n"
FOREIGN = [
    b"GET / HTTP/1.0\r\n\r\n",
    b'{"kind": "exception", "line": "end", "status": 1}\n',
    b"\xff\xfe\x00\n",
    b"x" * 300_000,
    GREETING * 2,
    GREETING + b"[1]\n",
    GREETING + b"\xff\xfe \x00\n",
    GREETING + b"[" * 40_000 + b"\n",
    GREETING + b'{"kind": "exit", "status": 1}\n',
    GREETING + b'{"rank": Infinity, "node": 1, "host": "a"}\n',
]


def _launch(node: int) -> Launch:
    return Launch("manual", 2, 1, node_rank=node, address="127.0.0.1", port=1)


def _coordinator(launch: Launch | None = None) -> tuple[Coordinator, int]:
    listener = listen(0, loopback=True)
    return Coordinator(launch or _launch(0), listener), listener.getsockname()[1]


def _channel(port: int) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", port), timeout=10))
    channel.greet()
    return channel


def _member(port: int) -> Member:
    channel = _channel(port)
    channel.connection.settimeout(None)
    member = Member(_launch(1), channel, {})
    member.wait_until_accepted(time.monotonic() + 10)
    return member


def _wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _closes(port: int, data: bytes) -> bool:
    """Whether the monitor closes a connection that sends this."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as foreign:
        try:
            foreign.sendall(data)
            while foreign.recv(100):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


def _monitored_with_foreign_connections() -> dict[str, Any]:
    leader, port = _coordinator()
    closed = [_closes(port, data) for data in FOREIGN]
    rank = _member(port)
    closed += [_closes(port, data) for data in FOREIGN]
    leader.monitors = True
    _wait_until(lambda: leader._listener is None)
    before, alive = list(leader.reports), leader.thread.is_alive()
    refused = socket.socket().connect_ex(("127.0.0.1", port))
    rank.report(SystemExit(3))
    _wait_until(lambda: leader.reports)
    return {
        "closed": closed,
        "before": before,
        "alive": alive,
        "refused": refused,
        "after": leader.reports,
    }


def test_connections_of_other_programs_are_closed_and_the_ranks_are_still_received():
    found = run_ranks(_monitored_with_foreign_connections, 1, timeout=100)[0]
    assert found["closed"] == [True] * 2 * len(FOREIGN)
    assert found["alive"]
    assert found["before"] == []
    assert found["refused"], "once all ranks have joined, nobody else can"
    assert [(report.rank, report.kind, report.status) for report in found["after"]] == [(1, "exit", 3)]


def test_messages_arrive_in_pieces_of_any_size():
    here, there = socket.socketpair()
    with here, there:
        zero, rank = Channel(here), Channel(there)
        zero.greet(), rank.greet()
        sent = [{"hello": 1}, {"line": "ä" * 20_000}, {"bye": [1, None]}]
        for message in sent:
            rank.send(message)
        found: list[dict[str, Any]] = []
        while len(found) < 3:
            found += zero.receive()
        assert found == sent
        zero.send(sent[2])
        assert rank.receive() == [sent[2]]


class _LosesRank(FailureMonitor):
    """Handles the loss of a rank while this process still reports how that ended it."""

    def _send_report(self, kind: str, line: str, status: int) -> None:
        self.thread.start()
        time.sleep(10)  # Until the signal.

    def _say_goodbye(self, status: int) -> None: ...

    def _run(self) -> None:
        self._handle_loss("rank 0 was killed")


def test_a_requeue_ends_although_its_sigterm_interrupts_the_report(monkeypatch: pytest.MonkeyPatch):
    done = []

    def requeue() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        done.append("requeued")
        return done[0]

    monkeypatch.setattr(monitor, "_current", None)
    monkeypatch.setattr(monitor, "_after_loss", str)
    use_monitor(_LosesRank(_launch(1)))
    with ending_on_signals(signal.SIGTERM), pytest.raises(Preempted), monitored(after_loss=requeue):
        raise RuntimeError("Connection closed by peer")
    assert done == ["requeued"]
