"""The failure monitor of rank 0 accepts reports of the ranks of its run only."""

import json
import socket
import time
from typing import Any

import pytest
from torch.distributed import TCPStore

from recipes.failures.monitor import FailureMonitor
from recipes.failures.protocol import ProtocolError, receive
from recipes.launch.plan import Launch
from tests.support.ranks import run_ranks

FOREIGN = [
    b"GET / HTTP/1.0\r\n\r\n",
    b'{"kind": "exception", "line": "end", "status": 1}\n',
    b'{"rank": 1, "node": 0, "host": "a", "token": "guessed"}\n{"kind": "exception", "line": "end", "status": 1}\n',
    b'{"rank": 1, "node": 0, "host": "a", "token": 7}\n',
    b"[1]\n",
    b"\xff\xfe\x00\n",
    b"[" * 100_000 + b"\n",
    b"x" * 300_000,
]


def _closes(port: int, data: bytes) -> bool:
    """Whether the monitor closes a connection that sends this."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as foreign:
        try:
            foreign.sendall(data)
            return not foreign.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True


def _monitored_with_foreign_connections() -> dict[str, Any]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leader = FailureMonitor(Launch("manual", 2, 1, address="127.0.0.1", port=store.port), store, "127.0.0.1")
    rank = FailureMonitor(Launch("manual", 2, 1, node_rank=1, address="127.0.0.1", port=store.port), store, "127.0.0.1")
    port = leader.listener.getsockname()[1]
    closed = [_closes(port, data) for data in FOREIGN]
    before, alive = list(leader.reports), leader.thread.is_alive()
    rank.report(SystemExit(3))
    deadline = time.monotonic() + 10
    while not leader.reports and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"closed": closed, "before": before, "alive": alive, "after": leader.reports}


def test_connections_of_other_programs_are_closed_and_the_ranks_are_still_received():
    found = run_ranks(_monitored_with_foreign_connections, 1, timeout=100)[0]
    assert found["closed"] == [True] * len(FOREIGN)
    assert found["alive"]
    assert found["before"] == []
    assert [(report.rank, report.kind, report.status) for report in found["after"]] == [(1, "exit", 3)]


def test_messages_arrive_in_pieces_and_a_line_without_an_end_is_refused():
    here, there = socket.socketpair()
    with here, there:
        message = json.dumps({"line": "ä" * 100}).encode() + b"\n"
        there.sendall(message[:50])
        messages, rest = receive(here, b"")
        assert messages == []
        there.sendall(message[50:] + b'{"bye"')
        assert receive(here, rest) == ([{"line": "ä" * 100}], b'{"bye"')
        there.sendall(b"x")
        with pytest.raises(ProtocolError):
            receive(here, b"x" * (1 << 16))
        there.close()
        with pytest.raises(EOFError):
            receive(here, b"")
