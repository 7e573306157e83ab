"""The failure monitor in the store of rank 0, and what reaches its port by mistake."""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from callbacks.lib.signals import Preempted, ending_on_signals
from recipes.runner import join
from recipes.runner.failure_monitor import FailureMonitor
from recipes.runner.join import monitored
from recipes.runner.launch import Launch
from recipes.runner.machine import listen
from tests.support.ranks import run_ranks

FOREIGN = [
    b"GET / HTTP/1.0\r\n\r\n",
    b'{"kind": "exception", "line": "end", "status": 1}\n',
    b"\xff\xfe\x00\n",
    b"x" * 300_000,
    b"\x00" * 1000,
]


def _launch(node: int, devices: int = 1) -> Launch:
    return Launch("manual", 2, devices, node_rank=node, address="127.0.0.1", port=1)


def _store() -> TCPStore:
    listener = listen(0, loopback=True)
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), False, True, listener.detach())


def _monitor(store: TCPStore, node: int) -> FailureMonitor:
    if node:
        store = TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=5), False)
    return FailureMonitor(_launch(node), store)


def _wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _send(port: int, data: bytes) -> None:
    """Send what another program may, and see whether the store closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=0.2) as foreign:
        try:
            foreign.sendall(data)
            while foreign.recv(100):
                pass
        except OSError:
            pass


def _monitored_with_foreign_connections() -> dict[str, Any]:
    store = _store()
    for data in FOREIGN:
        _send(store.port, data)
    zero, one = _monitor(store, 0), _monitor(store, 1)
    zero.start(), one.start()
    _wait_until(lambda: zero._others)
    for data in FOREIGN:
        _send(store.port, data)
    before = list(zero.reports)
    one.report(SystemExit(3))
    _wait_until(lambda: zero.reports)
    return {"before": before, "after": zero.reports}


def test_what_other_programs_send_is_ignored_and_the_ranks_are_still_received():
    found = run_ranks(_monitored_with_foreign_connections, 1)[0]
    assert found["before"] == []
    assert [(report.rank, report.kind, report.status) for report in found["after"]] == [(1, "exit", 3)]


def _rounds_with_silent_ranks(silent: list[int]) -> dict[str, Any]:
    """What rank 0 of 2 nodes x 2 knows after so many rounds in which only the ranks that are not silent write."""
    store = _store()
    zero = FailureMonitor(_launch(0, devices=2), store)
    for rank in range(1, 4):
        message = {"rank": rank, "node": rank // 2, "host": "h", "kind": "joined", "pid": 0, "namespace": "elsewhere"}
        zero._receive(store, message)
    store.multi_set([zero._beat(rank) for rank in range(4)], [""] * 4)
    found = {}
    for beat in range(1, 30):
        for rank in {0, 1, 2, 3} - set(silent):
            store.set(zero._beat(rank), str(beat))
        zero._count_beats(store)
        if zero.reports and "first" not in found:
            found["first"] = beat
    return found | {"reports": [(report.rank, report.kind) for report in zero.reports]}


@pytest.mark.parametrize(("silent", "lost"), [([3], []), ([2, 3], [2, 3]), ([2], [])])
def test_a_node_is_unreachable_when_all_of_its_ranks_are_silent_and_not_when_one_is_busy(silent, lost):
    found = run_ranks(_rounds_with_silent_ranks, 1, silent)[0]
    assert found["reports"] == [(rank, "unreachable") for rank in lost]
    assert found.get("first", 0) == (21 if lost else 0)


class _LosesRank(FailureMonitor):
    """Handles the loss of a rank while this process still reports how that ended it."""

    def __init__(self, after_loss: Callable[[], str]) -> None:
        super().__init__(_launch(1), _store(), after_loss)

    def report(self, error: BaseException, *, handling: bool = False) -> None:
        self.start()
        time.sleep(10)  # Until the signal.

    def _round(self, store: TCPStore) -> bool:
        self._handle_loss("rank 0 was killed")
        return True


def test_a_requeue_ends_although_its_sigterm_interrupts_the_report(monkeypatch: pytest.MonkeyPatch):
    done = []

    def requeue() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        done.append("requeued")
        return done[0]

    monkeypatch.setattr(join, "_current", _LosesRank(requeue))
    with ending_on_signals(signal.SIGTERM), pytest.raises(Preempted), monitored(after_loss=requeue):
        raise RuntimeError("Connection closed by peer")
    assert done == ["requeued"]
