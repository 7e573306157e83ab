"""The failure monitor of rank 0 accepts reports of the ranks of its run only."""

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from callbacks.lib.signals import Preempted, ending_on_signals
from recipes.failures import monitor
from recipes.failures.monitor import Coordinator, Member, RunConnection, monitored, use_monitor
from recipes.failures.protocol import Channel, listen
from recipes.failures.secret import Secret
from recipes.launch.plan import Launch
from tests.support.ranks import run_ranks

SECRET = Secret(b"known to the ranks", "a test")
GREETING = b"lightning-recipes 1 " + b"0" * 32 + b"\n"
FOREIGN = [
    b"GET / HTTP/1.0\r\n\r\n",
    b'{"kind": "exception", "line": "end", "status": 1}\n',
    GREETING[:30] + b"\n",
    GREETING + b'{"rank": 1, "node": 0, "host": "a"}\n',
    GREETING + b"0" * 64 + b' {"rank": 1, "node": 0, "host": "a"}\n',
    GREETING + b"0" * 64 + b' {"rank": 1, "host": ["a"]}\n' + b"0" * 64 + b' {"kind": "exit", "status": 1}\n',
    GREETING * 2,
    b"[1]\n",
    b"\xff\xfe\x00\n",
    GREETING + b"\xff\xfe \x00\n",
    GREETING + b"0 " + b"[" * 4000 + b"\n",
    GREETING + b'0 {"rank": Infinity, "host": "a"}\n',
    GREETING + b'0 {"rank": ' + b"1" * 4000 + b', "host": "a"}\n',
    b"x" * 300_000,
    GREETING + b"x" * 300_000,
]


def _launch(node: int) -> Launch:
    return Launch("manual", 2, 1, node_rank=node, address="127.0.0.1", port=1)


def _coordinator(launch: Launch | None = None) -> tuple[Coordinator, int]:
    listener = listen(0, loopback=True)
    return Coordinator(launch or _launch(0), listener, SECRET), listener.getsockname()[1]


def _channel(port: int, secret: bytes = SECRET.key) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", port), timeout=10), secret, "rank")
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
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2000)]
    rank = _member(port)
    closed += [_closes(port, data) for data in FOREIGN]
    leader.monitors = True
    open_still = [connection for connection in silent if connection.fileno() >= 0]
    _wait_until(lambda: leader._listener is None)
    before, alive = list(leader.reports), leader.thread.is_alive()
    refused = socket.socket().connect_ex(("127.0.0.1", port))
    rank.report(SystemExit(3))
    _wait_until(lambda: leader.reports)
    return {
        "closed": closed,
        "silent": len(open_still),
        "before": before,
        "alive": alive,
        "refused": refused,
        "after": leader.reports,
    }


def test_connections_of_other_programs_are_closed_and_the_ranks_are_still_received():
    found = run_ranks(_monitored_with_foreign_connections, 1, timeout=100)[0]
    assert found["closed"] == [True] * 2 * len(FOREIGN)
    assert found["silent"] == 2000
    assert found["alive"]
    assert found["before"] == []
    assert found["refused"], "once all ranks have joined, nobody else can"
    assert [(report.rank, report.kind, report.status) for report in found["after"]] == [(1, "exit", 3)]


def _recorded_and_repeated() -> dict[str, Any]:
    """What a process that records and forwards every byte between a rank and rank 0 can do."""
    leader, port = _coordinator()
    sent: list[bytes] = []

    class Recording(socket.socket):
        def sendall(self, data: Any, *args: Any) -> None:
            sent.append(bytes(data))
            super().sendall(data, *args)

    connection = Recording()
    connection.connect(("127.0.0.1", port))
    channel = Channel(connection, SECRET.key, "rank")
    channel.greet()
    member = Member(_launch(1), channel, {})
    member.wait_until_accepted(time.monotonic() + 10)
    member.report(SystemExit(3))
    _wait_until(lambda: leader.reports)
    leader.reports.clear()
    replayed = _closes(port, b"".join(sent))
    # On the connection of the rank itself: the same line again, and one that was changed.
    super(Recording, connection).sendall(sent[-1])
    _wait_until(lambda: 1 not in leader.records)
    return {"replayed": replayed, "reports": leader.reports, "records": dict(leader.records)}


def test_a_message_that_was_recorded_does_nothing_when_it_is_sent_again():
    found = run_ranks(_recorded_and_repeated, 1, timeout=60)[0]
    assert found == {"replayed": True, "reports": [], "records": {}}


def _impostor() -> str:
    """A process in rank 0's place, which does not know the secret and says that the run is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = Channel(socket.create_connection(listener.getsockname()), SECRET.key, "rank")
        impostor = Channel(listener.accept()[0], b"another secret", "rank 0")
        channel.greet()
        impostor.greet()
        impostor.send({"published": {}})
        impostor.send({"status": 7, "line": "the end"})
        try:
            Member(_launch(1), channel, {}).wait_until_accepted(time.monotonic() + 10)
        except OSError as error:
            return str(error)
    return "accepted"


def test_a_rank_does_not_act_on_what_a_process_in_rank_0s_place_says():
    assert run_ranks(_impostor, 1, timeout=60) == ["it does not know the run's secret"]


def test_messages_arrive_in_pieces_of_any_size():
    here, there = socket.socketpair()
    with here, there:
        zero, rank = Channel(here, b"s", "rank 0"), Channel(there, b"s", "rank")
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


class _LosesRank(RunConnection):
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
