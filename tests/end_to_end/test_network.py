"""What a run opens to the network: one machine the loopback interface only, and no exchange of ours is a pickle."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import distributed

from tests.support.command_lines import COMMON, Typed, type_line
from tests.support.nodes import Shell
from tests.support.ranks import free_port, run_ranks


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
    fit += ["--val-check-interval=3", "--max-time=00:01:00:00", "--name=run", "--patience=9"]
    resume = ["--resume", "runs/mnist/run/checkpoints/last.ckpt", "--max-epochs=2", "--logger=csv"]
    commands = [[*fit, "--logger=csv"], resume]
    for ended in run_ranks(_typed_by_ranks, 2, commands, str(tmp_path)):
        assert [command.status for command in ended] == [0] * len(commands), "\n".join(map(str, ended))
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
        time.sleep(0.03)
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_processes_of_one_machine_listen_on_the_loopback_interface_only(tmp_path: Path, nodes: int) -> None:
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // nodes), "MASTER_PORT": str(free_port())}
    where["MASTER_ADDR"] = socket.gethostname() if nodes == 1 else "localhost"
    ranks = [where | {"RANK": str(rank), "LOCAL_RANK": str(rank % (2 // nodes))} for rank in (0, 1)]
    shells = [Shell(tmp_path, f"rank{i}", ["--name", "run", "--max-epochs", "5"], env) for i, env in enumerate(ranks)]
    pids = [shell.process.pid for shell in shells if shell.process.pid is not None]
    addresses = _addresses_while(pids, lambda: any(shell.process.is_alive() for shell in shells))
    assert [shell.wait().status for shell in shells] == [0, 0], shells[0].read("err")
    assert addresses == {"127.0.0.1"}
