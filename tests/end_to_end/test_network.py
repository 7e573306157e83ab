"""What a run opens to the network: processes of one machine use the loopback interface only."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.nodes import Shell
from tests.support.ranks import free_port


def _processes(roots: list[int]) -> Iterator[psutil.Process]:
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            yield from [process, *process.children(recursive=True)]


def _listening(roots: list[int]) -> set[tuple[str, int]]:
    """The addresses and ports where the processes of a run accept connections; not those of a launcher."""
    found = set()
    for process in _processes(roots):
        with contextlib.suppress(psutil.Error):
            if "torchrun" not in process.name() and "torchrun" not in " ".join(process.cmdline()[:2]):
                sockets = process.net_connections(kind="inet")
                found |= {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


def _addresses_while(roots: list[int], runs: Callable[[], bool]) -> set[str]:
    found: set[str] = set()
    while runs():
        found |= {address for address, _ in _listening(roots)}
        time.sleep(0.03)
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_processes_of_one_machine_listen_on_loopback_only(tmp_path: Path, nodes: int) -> None:
    fit = ["--name", "run", "--max-epochs", "5", "--devices", str(2 // nodes)]
    where = ["--num-nodes", str(nodes), "--master-addr", "localhost", "--master-port", str(free_port())]
    each = [[*fit, *where, "--node-rank", str(node)] if nodes > 1 else fit for node in range(nodes)]
    shells = [Shell(tmp_path, f"node{node}", args, {}) for node, args in enumerate(each)]
    pids = [shell.process.pid for shell in shells if shell.process.pid is not None]
    addresses = _addresses_while(pids, lambda: any(shell.process.is_alive() for shell in shells))
    assert [shell.wait().status for shell in shells] == [0] * nodes, shells[0].read("err")
    assert addresses == {"127.0.0.1"}
