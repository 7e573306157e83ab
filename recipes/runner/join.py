"""Join the run: all ranks find each other in the `TCPStore` of rank 0, and compare settings, data and code there.

The first collective call would wait for ever for a missing rank. So every rank writes its settings and versions, as
JSON, into the store that torch.distributed uses later; rank 0 compares them, and writes what came of it. Calls of a
store that does not answer wait for ever, too: they are made in threads of their own.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import TCPStore
from typing_extensions import override

from datamodules.errors import UserError
from recipes.runner.failure_cause import classify_exception
from recipes.runner.failure_monitor import FailureMonitor, append, end_process
from recipes.runner.launch import LAUNCHER_VARIABLE, Command, Launch, LaunchSettings
from recipes.runner.machine import (
    LOOPBACK,
    address_for_others,
    interface_towards,
    is_loopback,
    listen,
    loopback_interface,
)

UPDATES_DONE = "updates done"
"""The entry of a rank's settings that tells where its resume starts."""

T = TypeVar("T")
_RETRY_AFTER = 0.1
_CONNECT_TIMEOUT = 10.0  # Seconds for rank 0 to answer once its port is open.
_SEEN_WITHIN = 20.0  # Seconds for the other ranks to read the result, whatever they share their processors with.
_RECORDS, _RESULT, _SEEN = (f"lightning_recipes/{name}" for name in ("records", "result", "result seen"))
_PACKAGES = ("recipes", "callbacks", "datamodules")

log = logging.getLogger("lightning_recipes.failures")
_current: FailureMonitor | None = None
_after_loss: Callable[[], str] = str


def code_version(files: Iterable[Path]) -> str:
    """The first twelve digits of a SHA-256 of source files."""
    digest = hashlib.sha256()
    # From the name upwards: where a package lies may differ, and folders of one name hold files of one name.
    for path in sorted(dict.fromkeys(files), key=lambda path: path.parts[::-1]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources(classes: Iterable[type]) -> list[Path]:
    root = Path(__file__).parents[2]
    files = [path for name in _PACKAGES for path in (root / name).rglob("*.py")]
    modules = [sys.modules.get("__main__"), *(sys.modules.get(cls.__module__) for cls in classes)]
    named = [getattr(module, "__file__", None) for module in modules]
    return files + [path for name in named if name and (path := Path(name)).suffix == ".py" and path.is_file()]


def fingerprint(settings: dict[str, Any], classes: Iterable[type] = ()) -> dict[str, Any]:
    """Everything that has to be equal on all ranks, by name.

    Args:
        settings: of the experiment, as plain Python; folders may differ.
        classes: the user's classes, whose files belong to the code.
    """
    same = {k: v for k, v in settings.items() if not k.endswith("_dir")}
    return same | {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "the code": code_version(_sources(classes)),
    }


@dataclass(frozen=True)
class Request:
    """What a process needs to join its run.

    Args:
        settings: settings and versions by name, as values that JSON can hold.
        timeout: seconds to wait for the other ranks.
        command: what the user typed, for the corrected command.
    """

    launch: Launch
    settings: dict[str, Any]
    timeout: float
    command: Command

    @property
    def record(self) -> dict[str, Any]:
        """What rank 0 compares, as it arrives there: the keys of mappings are text in JSON."""
        launch = self.launch
        who = {"rank": launch.rank, "node": launch.node_rank, "host": socket.gethostname()}
        record = who | {"nodes": launch.num_nodes, "devices": launch.devices, "settings": self.settings}
        return dict(json.loads(json.dumps(record)))


class Rendezvous(NamedTuple):
    """The store of the run, where its ranks have met, and how the settings of one that joined later differ."""

    store: TCPStore
    address: str
    port: int
    problem: str = ""


def describe_differences(everyone: dict[int, dict[str, Any]]) -> str:
    """The settings of each rank that differ from those of rank 0; empty where there are none.

    Example:
        >>> ranks = {0: {"node": 0, "host": "a", "settings": {"lr": 0.1, "torch": "2.15"}}}
        >>> ranks[1] = {"node": 1, "host": "b", "settings": {"lr": 0.2, "torch": "2.15"}}
        >>> describe_differences(ranks)
        'rank 1 (node 1, b): lr is 0.2, on rank 0 0.1'
    """
    lines = []
    expected = everyone[0]["settings"]
    for rank, record in sorted(everyone.items()):
        own = record["settings"]
        names = sorted(name for name in expected.keys() | own.keys() if expected.get(name) != own.get(name))
        if names:
            found = ", ".join(f"{name} is {own.get(name)}, on rank 0 {expected.get(name)}" for name in names)
            lines.append(f"rank {rank} (node {record['node']}, {record['host']}): {found}")
    return "; ".join(lines)


def _address(launch: Launch) -> str:
    """Of rank 0, for its own machine or for other nodes."""
    return launch.address if launch.address and launch.num_nodes > 1 else LOOPBACK


def _with_another_port(port: int, command: Command) -> str:
    """What to type where a port is taken."""
    if command.launcher == "torchrun":
        return f"torchrun chooses another one when it is started again, on every node: {command.using()}"
    return f"{'type' if command.launcher == 'slurm' else 'on every node:'} {command.using(master_port=port + 1)}"


def _in_time(function: Callable[[], T], seconds: float) -> T:
    """What a function returns that may wait for ever; signals are handled meanwhile.

    Raises:
        TimeoutError: it has not returned within so many seconds.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True, name="rendezvous").start()
    deadline = time.monotonic() + seconds
    while not future.done() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return future.result(min(0.2, seconds))
    return future.result(0)


def _serve(listener: socket.socket, address: str) -> TCPStore:
    """A store on rank 0, which torch.distributed may share; of itself it would listen on all interfaces."""
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    port = listener.getsockname()[1]  # The store takes the descriptor over, and closes it.
    return TCPStore(address, port, master_listen_fd=listener.detach(), timeout=timedelta(seconds=30), **options)


def _client(address: str, port: int) -> TCPStore:
    options: dict[str, Any] = {"is_master": False, "wait_for_workers": False}
    return _in_time(lambda: TCPStore(address, port, timeout=timedelta(seconds=5), **options), _CONNECT_TIMEOUT)


class _AgentsStore:
    """Where rank 0 tells the others its address under torchrun, which lets it change when processes are started again.

    In the agents' own store the processes of a restart would find the keys of those before them, and gloo would wait
    for ever. The same as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which only the agents read.
    """

    def __init__(self, launch: Launch) -> None:
        self.master = (launch.address or LOOPBACK, launch.port or 0)
        self._store = _client(*self.master)
        # Without the number of restarts: each agent counts only the rounds that it asked for itself.
        self._key = f"lightning_recipes/{os.environ.get('TORCHELASTIC_RUN_ID')}/{launch.world_size}/rank 0"

    @staticmethod
    def is_used() -> bool:
        """Whether torchrun tells its processes to use the agents' store."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def publish(self, address: str, port: int) -> None:
        """Tell the others where rank 0 listens."""
        self._store.set(self._key, json.dumps([address, port]))

    def find(self) -> tuple[str, int] | None:
        """Where rank 0 listens, or did before a restart; None while it has not said so."""
        return tuple(json.loads(self._store.get(self._key))) if self._store.check([self._key]) else None


def _connect(request: Request, address: str, port: int) -> TCPStore:
    """Connect to the store of rank 0.

    Raises:
        UserError: what listens there is not the store of this run.
        OSError: nothing listens there.
    """
    socket.create_connection((address, port), timeout=5.0).close()
    other_port = _with_another_port(port, request.command)
    try:
        store = _client(address, port)
        complete = not request.launch.joins and _in_time(lambda: store.check([_RESULT]), _CONNECT_TIMEOUT)
    except (RuntimeError, TimeoutError) as error:
        raise UserError(f"the service at {address}:{port} is not a run of this program; {other_port}") from error
    if complete:
        raise UserError(f"the run at {address}:{port} has all of its processes already; {other_port}")
    return store


def _no_answer(request: Request, address: str, port: int, error: Exception) -> UserError:
    what = "start the run there too, check `master_addr` and firewalls"
    if request.launch.num_nodes == 1:
        what = (
            "all processes of one node have to run on one machine; with several nodes set LOCAL_WORLD_SIZE to the"
            " number of processes on each"
        )
    reason = str(error) or "the connection was closed"
    return UserError(
        f"node 0 does not answer at {address}:{port} within {request.timeout:g} s ({reason}); {what}, or wait longer:"
        f" {request.command.using(rendezvous_timeout=int(4 * request.timeout))}"
    )


def _exchange(store: Any, request: Request, deadline: float) -> dict[str, Any]:
    """Write the settings of this rank, and wait for what rank 0 makes of all."""
    if not request.launch.joins:
        append(store, _RECORDS, request.record)
    while not store.check([_RESULT]):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_RETRY_AFTER)
    result = dict(json.loads(store.get(_RESULT)))
    store.append(_SEEN, f"{request.launch.rank} ")
    return result


def _join(request: Request, find: Callable[[], tuple[str, int] | None], deadline: float, *, moves: bool) -> Rendezvous:
    """Join rank 0, and wait for its result.

    Args:
        find: where rank 0 listens; None while that is not known.
        moves: who listens there may be another one than rank 0, which will be found elsewhere later.
    """
    failure = UserError(f"rank 0 did not start within {request.timeout:g} s; see its own output")
    while True:
        if place := find():
            try:
                store = _connect(request, *place)
                break
            except OSError as error:
                failure = _no_answer(request, *place, error)
            except UserError as error:
                failure = error
                if not moves:
                    raise
        if time.monotonic() >= deadline:
            raise failure
        time.sleep(_RETRY_AFTER)
    address, port = place
    launch, until = request.launch, deadline + request.timeout
    try:
        result = _in_time(lambda: _exchange(store, request, until), until - time.monotonic() + 5.0)
        if result["problem"]:
            raise UserError(result["problem"])
        # Another process of the node started a process that joins, and told it where the run's own store is.
        of_run = store if launch.joins else _client(address, result["port"])
    except TimeoutError as error:
        text = f"rank 0 at {address}:{port} did not finish the rendezvous within {2 * request.timeout:g} s"
        raise UserError(text) from error
    except RuntimeError as error:
        raise UserError(f"rank 0 at {address}:{port} ended during the rendezvous; see its own output") from error
    both = {0: result["record"], launch.rank: request.record}
    return Rendezvous(of_run, address, port, describe_differences(both) if launch.joins else "")


def _problem(request: Request, everyone: dict[int, dict[str, Any]], *, late: bool) -> str | None:
    """Why the ranks that have come cannot train together, and what to type; None while others may still come."""
    launch, command = request.launch, request.command
    for record in everyone.values():
        nodes, devices, node = record["nodes"], record["devices"], record["node"]
        if (nodes, devices) == (launch.num_nodes, launch.devices):
            continue
        text = (
            f"node {node} ({record['host']}) was started as one of {nodes} nodes x {devices} devices, node 0 as one of"
            f" {launch.num_nodes} x {launch.devices}; every node needs the same numbers"
        )
        if launch.launcher == "manual":
            here: dict[str, Any] = {"devices": min(devices, launch.devices), "num_nodes": launch.num_nodes}
            there = here | {"master_addr": launch.address, "master_port": launch.port, "node_rank": node}
            text += f": on node 0 {command.using(**here)} and on node {node} {command.using(**there)}"
        return text
    if absent := [rank for rank in launch.first_ranks if rank not in everyone]:
        if not late:
            return None
        of_nodes = sorted({rank // launch.devices for rank in absent})
        what, where = (
            f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            for noun, numbers in (("rank", absent), ("node", of_nodes))
        )
        count = len(launch.first_ranks)
        text = f"{count - len(absent)} of {count} processes joined within {request.timeout:g} s"
        text += f"; missing: {what} on {where}"
        if launch.launcher != "manual":
            return text
        flags = {"node_rank": of_nodes[0], "master_addr": launch.address, "master_port": launch.port}
        return f"{text}; type there: {command.using(**flags)}"
    if not (difference := describe_differences(everyone)):
        return ""
    # Settings that were left open come from the checkpoint, so ranks with another one differ in these, too.
    if len({record["settings"].get(UPDATES_DONE) for record in everyone.values()}) > 1:
        return (
            f"the ranks do not find the same checkpoint: {difference}. Pass a `run_dir` that all nodes share, or"
            " resume=FILE"
        )
    return f"the ranks have different settings: {difference}. Start all with one command and one version of the code"


def _compare(store: TCPStore, request: Request, deadline: float) -> str:
    """On rank 0: wait for the other ranks and compare. Returns the problem; empty where there is none."""
    while True:
        everyone: dict[int, dict[str, Any]] = {}
        for record in map(json.loads, store.get(_RECORDS).decode().splitlines()):
            rank = record["rank"]
            if rank in everyone:
                return (
                    f"two processes claim to be rank {rank} (node {record['node']}); give each node its own `node_rank`"
                )
            everyone[rank] = record
        problem = _problem(request, everyone, late=time.monotonic() > deadline)
        if problem is not None:
            return problem
        time.sleep(_RETRY_AFTER)


def _host(request: Request, deadline: float, agents: _AgentsStore | None) -> Rendezvous:
    """On rank 0: compare the other ranks, which find it at the run's port, and tell all of them the result.

    The store of the run has a port of its own, so that the run's port is free again for a next run of this program.
    """
    launch, port = request.launch, 0 if agents else request.launch.port or 0
    address = _address(launch)
    loopback = is_loopback(address)
    try:
        listener = listen(port, loopback=loopback)
    except OSError as error:
        raise UserError(
            f"port {port} of this machine is in use ({error.strerror}), perhaps by another run;"
            f" {_with_another_port(port, request.command)}"
        ) from error
    port = listener.getsockname()[1]
    if agents:
        address = LOOPBACK if loopback else address_for_others(*agents.master)
        agents.publish(address, port)
    try:
        socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT / 2).close()
    except OSError as error:
        raise UserError(
            f"node 0 cannot connect to itself at {address}:{port} ({error}); `master_addr` has to be an address of the"
            f" node with node_rank=0: {request.command.using(master_addr=socket.gethostname())}"
        ) from error
    of_run = _serve(listen(0, loopback=loopback), address)
    rendezvous: Any = _serve(listener, address)
    append(rendezvous, _RECORDS, request.record)
    rendezvous.append(_SEEN, "0 ")
    problem = _compare(rendezvous, request, deadline)
    for store in (rendezvous, of_run):
        store.set(_RESULT, json.dumps({"problem": problem, "record": request.record, "port": of_run.port}))
    count, until = rendezvous.get(_RECORDS).count(b"\n"), time.monotonic() + (5.0 if problem else _SEEN_WITHIN)
    seen = rendezvous.get(_SEEN).split()
    while len(seen) < count and time.monotonic() < until:  # The store ends with this function.
        time.sleep(_RETRY_AFTER / 10)
        seen = rendezvous.get(_SEEN).split()
    if problem:
        raise UserError(problem)
    if ended := set(launch.first_ranks) - set(map(int, seen)):
        raise UserError(f"rank {min(ended)} ended during the rendezvous; see its own output")
    return Rendezvous(of_run, address, port)


def rendezvous(request: Request) -> Rendezvous:
    """Wait for all ranks and make sure that their settings are equal.

    Processes that another process of their node has started join after that; for them the problem is returned.

    Raises:
        UserError: on every rank: a rank is missing, or has other settings.
    """
    launch = request.launch
    deadline = time.monotonic() + request.timeout
    agents = _AgentsStore(launch) if launch.launcher == "torchrun" and _AgentsStore.is_used() else None
    if launch.rank == 0:
        return _host(request, deadline, agents)
    place = (_address(launch), launch.port or 0)
    return _join(request, agents.find if agents else lambda: place, deadline, moves=agents is not None)


def share(monitor: FailureMonitor | None, name: str, compute: Callable[[], Any]) -> Any:
    """A value that rank 0 computes and all ranks get, such as a setting that depends on files.

    If rank 0 fails meanwhile, the failure monitor ends the others.

    Args:
        monitor: of this rank; None where the run is one process.
        name: of the value; each may be shared once.
        compute: called on rank 0 only; its result has to fit into JSON.

    Raises:
        UserError: rank 0 did not finish within the collective timeout.
    """
    if monitor is None:
        return compute()
    timeout = monitor.launch.collective_timeout
    store, key = monitor.store, f"lightning_recipes/shared/{name}"
    if monitor.launch.rank == 0:
        value = compute()
        store.set(key, json.dumps(value))
        return value
    deadline = time.monotonic() + timeout
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise UserError(f"rank 0 did not share {name} within {timeout:g} s; see its own output")
        time.sleep(_RETRY_AFTER / 2)
    return json.loads(store.get(key))


def join_run(
    launch: Launch, settings: Callable[[], dict[str, Any]], options: LaunchSettings, command: Command
) -> tuple[Launch, FailureMonitor | None]:
    """Wait for the other ranks, and start the failure monitor.

    Sets the environment variables from which Lightning's own environment reads the same.

    Args:
        settings: returns what has to be equal on all ranks, by name; called only where there are several.
        options: with the rendezvous timeout.

    Returns:
        The launch with its address and port, and the monitor of the other ranks; None where the run is one process.

    Raises:
        UserError: a rank is missing, or its settings differ.
    """
    global _current
    rank_zero_only.rank = launch.rank  # type: ignore[attr-defined]
    for name in ("NODE_RANK", "LOCAL_RANK", *(("RANK", "WORLD_SIZE") if launch.spawns else ())):
        os.environ.pop(name, None)
    if launch.address is None:
        return launch, None
    if launch.elastic and launch.num_nodes > 1 and _AgentsStore.is_used():
        # An agent publishes the address of its store in its first round only. We are its child, too late to set it.
        log.warning(
            "warning: with this torchrun no node can join later or again; for that, start it on every node with"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    joined = rendezvous(Request(launch, settings(), options.rendezvous_timeout, command))
    address, port = joined.address, joined.store.port
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        # The store is our own, so torch must not expect torchrun's agent behind it.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), NODE_RANK=str(launch.node_rank))
    name, value = (LAUNCHER_VARIABLE, launch.launcher) if launch.spawns else ("LOCAL_RANK", str(launch.local_rank))
    os.environ[name] = value
    _choose_interface(launch, address)
    _current = FailureMonitor(launch, joined.store, _after_loss)
    _current.start()
    if joined.problem:
        raise UserError(f"the settings of this process differ from those of rank 0: {joined.problem}")
    return replace(launch, address=address, port=joined.port), _current


def _choose_interface(launch: Launch, address: str) -> None:
    """Have gloo and NCCL listen where the other ranks are, unless the user has chosen an interface."""
    if launch.num_nodes > 1:
        # Gloo takes the address of the host's name, which on many systems is 127.0.0.1 and unreachable for other nodes.
        interface, names = interface_towards(address), ["GLOO_SOCKET_IFNAME"]
    else:
        interface, names = loopback_interface(), ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    if interface:
        for name in names:
            os.environ.setdefault(name, interface)


class ExpectedEnd(Exception):
    """Ends a training on purpose, on all ranks at once: no failure."""


class FailureReporter(pl.Callback):
    """Reports an exception when it is raised, before any clean-up that might wait for the other ranks."""

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if _current is not None and not isinstance(exception, ExpectedEnd):
            _current.report(exception, handling=True)


@contextlib.contextmanager
def monitored(after_loss: Callable[[], str] = str) -> Iterator[None]:
    """Report to the other ranks how the block ends: after an exception all end, and rank 0 prints the cause.

    Args:
        after_loss: called before a process ends because another one was lost, on rank 0 or, where that was lost, on one
            rank or several of each node; what it returns is printed after the cause.
    """
    global _after_loss
    _after_loss = after_loss
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if _current is not None:
            _current.leave(classify_exception(error)[2])
        raise
    except BaseException as error:
        if _current is not None:
            if classify_exception(error)[0] == "exception":
                traceback.print_exc()
            _current.report(error)
            _current.wait()
        raise
    else:
        if _current is not None:
            _current.leave(0)
    finally:
        # A signal may have ended the report above.
        if _current is not None and _current.ending:
            _current.wait()


def exit_run(status: int) -> None:
    """End this process at once and report that to the other ranks; the caller has closed its loggers and workers."""
    if _current is not None:
        _current.leave(status)
    end_process(status)
