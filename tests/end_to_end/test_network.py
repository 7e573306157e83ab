"""What a process on the network that does not belong to a run can do: nothing to its results, and run no code."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from tests.support.agents import shell_environment, wait_until
from tests.support.command_lines import COMMON, Typed, type_line
from tests.support.nodes import Shell
from tests.support.ranks import free_port, run_ranks

RECIPE = ["-m", "tests.support.launch_recipe", "--accelerator", "cpu", "--precision", "32", "--name", "run"]
STRANGER = """
import os, sys
import torch.distributed as dist

mark = sys.argv.pop()

class Evil:
    def __reduce__(self):
        return os.system, (f"touch {mark}",)

def evil(out, obj, *args, **kwargs):
    return gather(out, Evil(), *args, **kwargs)

gather, dist.all_gather_object = dist.all_gather_object, evil
import runpy
sys.argv = ["launch_recipe", *sys.argv[1:]]
runpy.run_module("tests.support.launch_recipe", run_name="__main__")
"""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pickle was sent or received")


def _typed_by_ranks(commands: list[list[str]], folder: str) -> list[Typed]:
    """Command lines, one after the other, on ranks that cannot exchange pickles."""
    distributed.distributed_c10d._object_to_tensor = _refuse
    distributed.distributed_c10d._tensor_to_object = _refuse
    launched, ended = dict(os.environ), []
    for args in commands:
        os.environ.clear()
        os.environ.update(launched)
        ended.append(type_line("recipes:MNISTClassifier", "datamodules:MNISTDataModule", [*args, *COMMON], folder))
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return ended


def test_no_command_on_two_ranks_exchanges_a_pickle(tmp_path: Path) -> None:
    fit = ["--max-epochs=1", "--limit-train-batches=6", "--save-top-k=2", "--save-every", "1 seconds"]
    fit += ["--val-check-interval=3", "--max-time=00:01:00:00", "--name=run", "--early-stopping=val/loss"]
    resume = ["--resume", "runs/mnist/run/checkpoints/last.ckpt", "--max-epochs=2", "--logger=csv"]
    commands = [[*fit, "--logger=csv"], resume]
    for ended in run_ranks(_typed_by_ranks, 2, commands, str(tmp_path)):
        assert [command.status for command in ended] == [0] * len(commands), ended
    assert (tmp_path / "runs/mnist/run/results.json").is_file()


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
        time.sleep(0.01)
    return found


def test_processes_of_one_node_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
    ranks = [where | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    shells = [Shell(tmp_path, f"rank{i}", ["--name", "run", "--max-epochs", "20"], env) for i, env in enumerate(ranks)]
    pids = [shell.process.pid for shell in shells if shell.process.pid is not None]
    addresses = _addresses_while(pids, lambda: any(shell.process.is_alive() for shell in shells))
    assert [shell.wait().status for shell in shells] == [0, 0], shells[0].read("err")
    assert addresses == {"127.0.0.1"}
    assert [path.name for path in (tmp_path / "runs").glob(".secret*")] == [f".secret-{os.getuid()}"]


def _popen(folder: Path, name: str, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("w") as log:
        variables = shell_environment() | (env or {})
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [[sys.executable, *RECIPE, "--devices", "2"], ["torchrun", "--standalone", "--nproc-per-node", "2", *RECIPE]],
    ids=["started here", "torchrun"],
)
def test_however_it_is_started(tmp_path: Path, start: list[str]) -> None:
    run = _popen(tmp_path, "run", [*start, "--max-epochs", "100"])
    addresses = _addresses_while([run.pid], lambda: run.poll() is None)
    assert run.returncode == 0, (tmp_path / "run.log").read_text()
    assert addresses == {"127.0.0.1"}


class _Siege:
    """A stranger at every port of some processes: garbage, and thousands of connections that stay open."""

    def __init__(self, roots: list[int]) -> None:
        self.connections: list[socket.socket] = []
        self.ports = {port for _, port in _listening(roots)}
        for port in self.ports:
            for data in (b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 5000, os.urandom(5000), b""):
                self._send(port, data)
            for _ in range(2000 // len(self.ports)):
                self._send(port, b"")

    def _send(self, port: int, data: bytes) -> None:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            self.connections.append(connection)
            connection.sendall(data)

    def __enter__(self) -> "_Siege":
        return self

    def __exit__(self, *args: object) -> None:
        for connection in self.connections:
            connection.close()


def _write_into_the_store(port: int) -> None:
    """The store of torch.distributed is open."""
    store = distributed.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set("result", json.dumps({"problem": "a stranger"}))
    store.add("arrived/1", 1)


@pytest.mark.slow
def test_strangers_are_refused_and_the_run_goes_on_with_the_true_node(tmp_path: Path) -> None:
    port, secret = str(free_port()), {"LIGHTNING_RECIPES_SECRET": "known to both of its nodes"}
    flags = ["--accelerator", "cpu", "--precision", "32", "--name", "run", "--max-epochs", "400", "--num-nodes", "2"]
    flags += ["--master-addr", "127.0.0.1", "--master-port", port]
    module = [sys.executable, "-m", "tests.support.launch_recipe", *flags]
    zero = _popen(tmp_path, "zero", [*module, "--node-rank", "0", "--rendezvous-timeout", "240"], secret)
    try:
        wait_until(lambda: ("::", int(port)) in _listening([zero.pid]), "node 0")
        mark = tmp_path / "mark"
        command = [sys.executable, "-c", STRANGER, *flags, "--node-rank", "1", str(mark)]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        stranger = _popen(elsewhere, "stranger", command)
        assert stranger.wait(120) == 2
        said = (elsewhere / "stranger.log").read_text()
        assert f"this process does not know the secret of the run at 127.0.0.1:{port}" in said
        with _Siege([zero.pid]) as siege:
            assert siege.ports == {int(port)}
            one = _popen(tmp_path, "one", [*module, "--node-rank", "1"], secret)
            metrics = tmp_path / "runs/failing/run/metrics.csv"
            wait_until(lambda: metrics.exists() or zero.poll() is not None, "the first update", 240)
        # gloo listens on the interface towards node 0; once all ranks have joined, the rendezvous listens no more.
        (store,) = [port for address, port in _listening([zero.pid, one.pid]) if address == "::"]
        assert store != int(port)
        _write_into_the_store(store)
        with _Siege([zero.pid, one.pid]):
            assert (zero.wait(240), one.wait(240)) == (0, 0), (tmp_path / "zero.log").read_text()
    finally:
        for process in (zero, *(process for name in ("stranger", "one") if (process := locals().get(name)))):
            process.kill()
    log = (tmp_path / "zero.log").read_text()
    assert log.count("warning: refused a process at 127.0.0.1 that claims to be rank 1") == 1
    assert "epoch 400/400" in log
    assert not mark.exists()
    assert torch.load(tmp_path / "runs/failing/run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 400 * 4
