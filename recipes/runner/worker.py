"""Process of a run, forked by our agent or started by another launcher, and its group with the other ranks.

The ranks form the process group, compare their versions, and receive the record of the run from rank 0.
"""

import hashlib
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from datamodules.errors import UserError, first_line, spelled
from datamodules.lightning import pl, rank_zero_only
from datamodules.notes import warn
from recipes.runner.errors import Failure, exit_now
from recipes.runner.launch import LOOPBACK, Launch
from recipes.runner.variables import is_by_torchrun, of_a_worker, store_prefix_of_torchrun

_PACKAGES = ("recipes", "callbacks", "datamodules")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Handed:
    """Data that an agent passes to each of its workers.

    Args:
        launch: the launch of the agent.
        task: a pickled `recipes.runner.run.Task`.
        store_prefix: the prefix of this start's keys in the store of the agents.
        starts_again: whether this is a restart of the node's processes.
        environ: the environment variables of a worker, without the variables of its rank.
    """

    launch: Launch
    task: bytes
    store_prefix: str = ""
    starts_again: bool = False
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))


def work(handed: Handed) -> None:
    """Execute a run as one of its ranks; torch's agent has set the variables of the rank.

    Raises:
        SystemExit: the run has ended with a status other than 0.
    """
    of_rank = of_a_worker(os.environ)
    # The fork server has the environment of its own start; the program needs the environment of the agent's command.
    os.environ.clear()
    os.environ.update(handed.environ | of_rank)
    agent = multiprocessing.parent_process()
    assert agent is not None
    _end_after(agent.join)  # A killed agent must not leave workers that train on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank_zero_only.rank = int(os.environ["RANK"])  # type: ignore[attr-defined]
    try:
        task = pickle.loads(handed.task)
        task.carry_out_as_worker(handed.launch, handed.store_prefix, handed.starts_again)
    except RankZeroFailed as ended:
        Failure("user", "rank 0 has ended, and its output says why", int(ended.code or 1)).write()
        raise
    except Exception as error:
        failure = Failure.of(error)
        failure.write()
        if failure.kind == "user":
            sys.exit(failure.status)
        if failure.kind not in ("lost", "signal"):
            traceback.print_exc()
        exit_now(failure.status)  # A regular exit would wait for the ranks in the process group.


def _end_after(wait: Callable[[], None]) -> None:
    """End this process as soon as a function returns, even if its main thread waits."""

    def watch() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the launcher").start()


def end_with_torchrun() -> None:
    """End this process after its torchrun has ended: the next torchrun's processes would train beside it."""
    if not is_by_torchrun(os.environ) or os.name == "nt":
        return
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(3.0)  # At a regular end, torchrun may exit before its processes.

    _end_after(wait)


@contextmanager
def rendezvous_errors_reported(launch: Launch, timeout: float) -> Iterator[None]:
    """Convert the error of processes that do not find each other to one line.

    Raises:
        UserError: a process does not answer in time, or another run has the port.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"the processes did not meet at {launch.address}:{launch.port} within {timeout:g} s: {first_line(error)};"
            f" start all of them, check firewalls and that {spelled('master_addr')} is an address of node 0, pass"
            f" another {spelled('master_port')} if this one is in use, or wait longer with"
            f" {spelled('rendezvous_timeout')}"
        ) from error


def open_store(address: str, port: int, timeout: float, serves: bool, **options: Any) -> dist.TCPStore:
    """Open a store: the first process of a run serves it, the other processes connect to it.

    Torch's store would listen on all interfaces. If the address is a loopback address, this store listens only there.

    Args:
        port: the port of the store; 0 for a free port.
        timeout: seconds to wait for the process that serves the store.

    Raises:
        OSError: the port is in use, or the address does not belong to this machine.
        RuntimeError: the processes did not meet.
    """
    if serves:
        if is_loopback(address):
            listener = socket.create_server((LOOPBACK, port))
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port))
        port = listener.getsockname()[1]
        # An address of another machine is an error now, not after a minute of waiting.
        socket.create_connection((address, port), timeout=5.0).close()
        options["master_listen_fd"] = listener.detach()  # Torch's own socket would listen on all interfaces.
    return dist.TCPStore(address, port, is_master=serves, timeout=timedelta(seconds=timeout), **options)


def is_loopback(address: str) -> bool:
    """Return whether an address or a host name means the machine itself."""
    return address == "::1" or address.startswith("127.") or address.split(".")[0] == "localhost"


def interface_towards(address: str) -> str | None:
    """Return the interface on the route to an address; None if it cannot be determined."""
    import psutil  # Imported here: only runs of several processes need it.

    try:
        # AF_INET sorts before AF_INET6: not every network with IPv6 addresses routes them.
        family, _, _, _, target = min(socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM))
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Nothing is sent.
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # An IPv6 address may end in % and its interface.
        if own_address in [entry.address.split("%")[0] for entry in addresses]:
            return str(name)
    return None


def code_version(files: Iterable[Path]) -> str:
    """Return the first twelve digits of a SHA-256 of source files, independent of their folders."""
    sources = sorted(path.name.encode() + b"\0" + path.read_bytes() for path in set(files))
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]


def _sources(classes: Iterable[type]) -> list[Path]:
    """Return the files of this library, of the program and of the user's classes."""
    root = Path(__file__).parents[2]
    files = [path for name in _PACKAGES for path in (root / name).rglob("*.py")]
    modules = [sys.modules.get("__main__"), *(sys.modules.get(cls.__module__) for cls in classes)]
    user_files = [Path(getattr(module, "__file__", None) or "") for module in modules]
    return files + [path for path in user_files if path.suffix == ".py" and path.is_file()]


def compare_ranks(launch: Launch, classes: Iterable[type]) -> None:
    """Raise, on all ranks, if versions or code differ from rank 0.

    Args:
        classes: the user's classes, whose files belong to the code.

    Raises:
        UserError: a rank differs.
    """
    own = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "the code": code_version(_sources(classes)),
        "nodes": launch.num_nodes,
        "devices of the node": launch.devices,
    }
    records: list[Any] = [None] * launch.world_size
    dist.all_gather_object(records, (launch.where, own))
    expected = records[0][1]
    for rank, (where, versions) in enumerate(records):
        for name in own:
            if versions[name] != expected[name]:
                raise UserError(
                    f"the ranks differ: rank {rank} ({where}): {name} is {versions[name]}, on rank 0 {expected[name]}."
                    " Start all with one command and one version of the code"
                )


def _store_of_run(launch: Launch, timeout: float) -> dist.Store:
    """Open the store for the process group; each start of the processes has its own keys."""
    of_torchrun = "" if launch.store_prefix else store_prefix_of_torchrun(os.environ)
    if of_torchrun and launch.restarts and launch.num_nodes > 1:
        warn(
            "warning: with this torchrun no node can join later or again; for that, start it on every node with"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, or use this program's own --num-nodes,"
            " --node-rank, --master-addr and --max-restarts"
        )
    prefix = launch.store_prefix or of_torchrun
    assert launch.address is not None
    assert launch.port is not None
    if prefix:
        agents_store = dist.TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, agents_store)
    # All processes of one node are on one machine, for any address of its name.
    address = launch.address if launch.num_nodes > 1 else LOOPBACK
    return open_store(address, launch.port, timeout, serves=launch.rank == 0, world_size=launch.world_size)


def init_distributed(launch: Launch, timeout: float, classes: Iterable[type] = ()) -> Launch:
    """Form the process group with the other ranks, and compare the versions.

    Args:
        timeout: seconds to wait for the other ranks.
        classes: the user's classes, whose files belong to the code.

    Returns:
        The launch with the port of the rendezvous.

    Raises:
        UserError: a rank is missing, or has another version.
    """
    rank_zero_only.rank = launch.rank  # type: ignore[attr-defined]
    if launch.world_size == 1:
        return launch
    if not dist.is_initialized():
        launch = _form_group(launch, timeout)
    compare_ranks(launch, classes)
    return launch


def _form_group(launch: Launch, timeout: float) -> Launch:
    # Lightning's TorchElasticEnvironment reads these variables when the Trainer is built.
    os.environ.update(NODE_RANK=str(launch.node_rank), GROUP_RANK=str(launch.node_rank))
    os.environ.update(LOCAL_RANK=str(launch.local_rank), RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size))
    # Gloo would listen at the address of the host's name, which other nodes may not reach.
    interface = interface_towards((launch.address if launch.num_nodes > 1 else None) or LOOPBACK)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if launch.num_nodes == 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # An error of a worker may reflect the end of another rank, which its agent reports.
    with nullcontext() if launch.store_prefix else rendezvous_errors_reported(launch, timeout):
        store = _store_of_run(launch, timeout)
        limit = timedelta(seconds=launch.collective_timeout)
        dist.init_process_group(store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit)
    port = getattr(store, "port", launch.port)
    os.environ.update(MASTER_ADDR=launch.address or LOOPBACK, MASTER_PORT=str(port))
    return replace(launch, port=port)


def check_files(launch: Launch, folder: str | None, checkpoint: str | None) -> None:
    """Compare the disks of the nodes: the run's folder and the checkpoint to resume from.

    A missing folder on another node is a warning: only rank 0 writes, but a resume would fail.

    Raises:
        UserError: a node does not find the checkpoint.
    """
    if launch.num_nodes == 1:
        return
    absent = [path for path in (checkpoint, folder) if path is not None and not Path(path).exists()]
    of_ranks: list[Any] = [None] * launch.world_size
    dist.all_gather_object(of_ranks, (launch.where, absent))
    for where, absent in of_ranks:
        if checkpoint in absent:
            raise UserError(
                f"{where} does not find the checkpoint {checkpoint}: pass a {spelled('run_dir')} that all nodes share,"
                f" or {spelled('resume', 'FILE')}"
            )
        if absent:
            warn(
                f"warning: {where} does not find the run's folder {folder}, and a resume reads its checkpoint on every"
                f" node: pass a {spelled('run_dir')} that all nodes share"
            )
            return


class RankZeroFailed(SystemExit):
    """Exit of a rank after rank 0 has ended with an error, which rank 0 reports."""


def shut_down_distributed() -> None:
    """End the process group of this process, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_from_rank_zero(compute: Callable[[], _T]) -> _T:
    """Compute a value on rank 0, such as the record of the run, and return it on all ranks.

    Args:
        compute: the function, which is called on rank 0 only.

    Raises:
        RankZeroFailed: `compute` has raised a `UserError`, and rank 0 has ended; on the other ranks.
    """
    # A single process has no process group.
    if not dist.is_initialized():
        return compute()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = compute()
        except UserError as error:
            dist.broadcast_object_list([None, error.exit_status])
            raise
    dist.broadcast_object_list(answer)
    value, status = answer
    if status is not None:
        with suppress(RuntimeError):
            dist.barrier()  # Fails when rank 0 ends, so its error is printed before a launcher notices this end.
        raise RankZeroFailed(status)
    result: _T = value
    return result
