"""Rendezvous of the ranks before the first collective call, which would wait for ever for a missing rank.

Rank 0 serves a key-value store at the master's address, which torch.distributed uses afterwards. Every rank writes its
settings and versions there; rank 0 compares them and publishes the result.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from datamodules.errors import UserError
from recipes.launch.interfaces import address_for_others
from recipes.launch.plan import Launch
from recipes.launch.settings import Command

__all__ = ["UPDATES_DONE", "Rendezvous", "describe_differences", "rendezvous", "share"]

UPDATES_DONE = "updates done"
"""The entry of a rank's settings that tells where its resume starts."""

_PREFIX = "lightning_recipes"
_POLL_INTERVAL = 0.05
_CONNECT_TIMEOUT = 10.0  # Seconds for a store to answer once its port is open.


def describe_differences(everyone: dict[int, dict[str, Any]], launch: Launch) -> str:
    """The settings of each rank that differ from those of rank 0; empty where there are none.

    Example:
        >>> launch = Launch("manual", 2, 1)
        >>> ranks = {0: {"host": "a", "settings": {"lr": 0.1, "torch": "2.15"}}}
        >>> ranks[1] = {"host": "b", "settings": {"lr": 0.2, "torch": "2.15"}}
        >>> describe_differences(ranks, launch)
        'rank 1 (node 1, b): lr is 0.2, on rank 0 0.1'
    """
    lines = []
    expected = everyone[0]["settings"]
    for rank, record in sorted(everyone.items()):
        names = [n for n in expected.keys() | record["settings"].keys() if expected.get(n) != record["settings"].get(n)]
        if names:
            found = ", ".join(
                f"{name} is {record['settings'].get(name)}, on rank 0 {expected.get(name)}" for name in sorted(names)
            )
            lines.append(f"rank {rank} (node {rank // launch.devices}, {record['host']}): {found}")
    return "; ".join(lines)


def _reach(address: str, port: int, deadline: float, timeout: float, command: Command) -> None:
    """Wait until the port at the master's address is open."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"node 0 does not answer at {address}:{port} within {timeout:g} s ({error}); start the run there"
                    " too, check `master_addr` and firewalls, or wait longer:"
                    f" {command.using(rendezvous_timeout=int(4 * timeout))}"
                ) from error
            time.sleep(0.2)


def _with_another_port(port: int, command: Command) -> str:
    """What to type where a port is taken."""
    if command.launcher == "torchrun":
        return f"torchrun chooses another one when it is started again, on every node: {command.using()}"
    return f"{'type' if command.launcher == 'slurm' else 'on every node:'} {command.using(master_port=port + 1)}"


def _serve(address: str, port: int, command: Command) -> TCPStore:
    """The store on rank 0; torch.distributed shares it, since it runs in the same process."""
    try:
        # Probed first for the reason: torch's message takes a page.
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"port {port} of this machine is in use ({error.strerror}), perhaps by another run;"
            f" {_with_another_port(port, command)}"
        ) from error
    try:
        timeout = timedelta(seconds=5)
        return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout)
    except (DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"node 0 cannot connect to itself at {address}:{port} ({reason}); `master_addr` has to be an address of the"
            f" node with node_rank=0: {command.using(master_addr=socket.gethostname())}"
        ) from error


def _join(address: str, port: int, command: Command) -> TCPStore:
    """The store on another rank.

    A thread connects, because torch waits for ever for an answer from a service that sends nothing.
    """
    found: list[TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(DistError, RuntimeError):
            found.append(TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_TIMEOUT)))

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(_CONNECT_TIMEOUT)
    if not found:
        raise UserError(
            f"the service at {address}:{port} is not a run of this program; {_with_another_port(port, command)}"
        )
    return found[0]


def _await(store: TCPStore, key: str, deadline: float) -> str | None:
    """The value of a key, polled so that Ctrl-C is handled meanwhile; None after the deadline."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_INTERVAL)
    return store.get(key).decode()


def _own_store_address(launch: Launch, deadline: float, command: Command, timeout: float) -> tuple[str, int]:
    """Agree on the address of a store that rank 0 serves in place of torchrun's agent.

    In the agent's store the processes of a restart find the keys of the processes before them, and gloo waits for ever.
    The same as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which only the agent reads.
    """
    assert launch.address is not None
    assert launch.port is not None
    agents = TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False)
    # Without the number of restarts: each agent counts only the rounds that it asked for itself.
    key = f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RUN_ID')}/{launch.world_size}/store"
    if launch.rank == 0:
        address = address_for_others(launch.address, launch.port)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        agents.set(key, json.dumps([address, port]))
        return address, port
    while True:
        place = _await(agents, key, deadline)
        if place is None:
            raise UserError(f"rank 0 did not start within {timeout:g} s; see its own output")
        address, port = json.loads(place)
        try:
            # The entry of processes that have ended is replaced as soon as rank 0 has started again.
            socket.create_connection((address, port), timeout=2).close()
        except OSError:
            if time.monotonic() > deadline:
                _reach(address, port, deadline, timeout, command)
            time.sleep(0.2)
        else:
            return address, port


def _missing(launch: Launch, present: set[int], timeout: float, command: Command) -> str:
    absent = [rank for rank in launch.first_ranks if rank not in present]
    nodes = sorted({rank // launch.devices for rank in absent})
    what = f"ranks {', '.join(map(str, absent))} on node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
    text = f"{len(present)} of {len(launch.first_ranks)} processes joined within {timeout:g} s; missing: {what}"
    if launch.launcher == "manual":
        flags: dict[str, Any] = {"node_rank": nodes[0], "master_addr": launch.address, "master_port": launch.port}
        text += f"; type there: {command.using(**flags)}"
    return text


def _difference_message(everyone: dict[int, dict[str, Any]], launch: Launch) -> str:
    """Why the ranks cannot train together, and what to type; empty where they can."""
    if not (difference := describe_differences(everyone, launch)):
        return ""
    # Settings that were left open come from the checkpoint, so ranks with another one differ in these, too.
    if len({record["settings"].get(UPDATES_DONE) for record in everyone.values()}) > 1:
        return (
            f"the ranks do not find the same checkpoint: {difference}. Pass a `run_dir` that all nodes share, or"
            " resume=FILE"
        )
    return f"the ranks have different settings: {difference}. Start all with one command and one version of the code"


def _unequal_nodes(store: TCPStore, launch: Launch, command: Command) -> str:
    """On rank 0: which of the nodes so far has another number of devices or of nodes; empty where none has."""
    for node in range(1, launch.num_nodes):
        if not store.check([f"node/{node}"]):
            continue
        nodes, devices, host = json.loads(store.get(f"node/{node}"))
        if (nodes, devices) == (launch.num_nodes, launch.devices):
            continue
        text = (
            f"node {node} ({host}) was started as one of {nodes} nodes x {devices} devices, node 0 as one of"
            f" {launch.num_nodes} x {launch.devices}; every node needs the same numbers"
        )
        if launch.launcher == "manual":
            here: dict[str, Any] = {"devices": min(devices, launch.devices), "num_nodes": launch.num_nodes}
            there = here | {"master_addr": launch.address, "master_port": launch.port, "node_rank": node}
            text += f": on node 0 {command.using(**here)} and on node {node} {command.using(**there)}"
        return text
    return ""


def _compare(store: TCPStore, launch: Launch, timeout: float, deadline: float, command: Command) -> str:
    """On rank 0: wait for the other ranks and compare. Returns the problem; empty where there is none."""
    everyone: dict[int, dict[str, Any]] = {}
    while len(everyone) < len(launch.first_ranks) and time.monotonic() <= deadline:
        for rank in launch.first_ranks:
            if rank not in everyone and store.check([f"record/{rank}"]):
                everyone[rank] = json.loads(store.get(f"record/{rank}"))
        # After the records: a rank tells of its node before it writes its own.
        if problem := _unequal_nodes(store, launch, command):
            return problem
        time.sleep(_POLL_INTERVAL)
    if len(everyone) < len(launch.first_ranks):
        return _missing(launch, set(everyone), timeout, command)
    twice = [rank for rank in launch.first_ranks if int(store.add(f"arrived/{rank}", 0)) > 1]
    if twice:
        node = twice[0] // launch.devices
        return f"two processes claim to be rank {twice[0]} (node {node}); give each node its own `node_rank`"
    return _difference_message(everyone, launch)


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous.

    Args:
        store: a key-value store that all ranks can reach.
        address: of the store, for torch.distributed; likewise `port`.
        problem: how the settings of a process that joined later differ from rank 0's; empty if they do not.
    """

    store: TCPStore
    address: str
    port: int
    problem: str = ""


def rendezvous(launch: Launch, settings: dict[str, Any], timeout: float, command: Command) -> Rendezvous:
    """Wait for all ranks and make sure that their settings are equal.

    Processes that another process of their node has started join after that; for them the problem is returned.

    Args:
        settings: settings and versions by name, as values that JSON can hold.
        timeout: seconds.

    Raises:
        UserError: on every rank: a rank is missing, or has other settings.
    """
    assert launch.address is not None
    deadline = time.monotonic() + timeout
    address, port = launch.address, launch.port or 0
    if launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = _own_store_address(launch, deadline, command, timeout)
    if launch.rank == 0:
        store = _serve(address, port, command)
        port = store.port
    else:
        _reach(address, port, deadline, timeout, command)
        store = _join(address, port, command)
    record = {"host": socket.gethostname(), "settings": settings}
    problem: str | None
    try:
        store.add(f"arrived/{launch.rank}", 1)
        store.set(f"node/{launch.node_rank}", json.dumps([launch.num_nodes, launch.devices, record["host"]]))
        store.set(f"record/{launch.rank}", json.dumps(record))
        if launch.rank == 0:
            store.set("problem", problem := _compare(store, launch, timeout, deadline, command))
            # The store ends with this process; give the others time to read it.
            time.sleep(1.0 if problem else 0.0)
        else:
            problem = _await(store, "problem", deadline + timeout)
            if problem == "" and launch.joins:
                others = {0: json.loads(store.get("record/0")), launch.rank: record}
                return Rendezvous(store, address, port, describe_differences(others, launch))
    except (DistError, RuntimeError) as error:
        raise UserError(f"rank 0 at {address}:{port} ended during the rendezvous; see its own output") from error
    if problem is None:
        raise UserError(f"rank 0 at {address}:{port} did not finish the rendezvous within {2 * timeout:g} s")
    if problem:
        raise UserError(problem)
    return Rendezvous(store, address, port)


def share(store: TCPStore, launch: Launch, name: str, compute: Callable[[], Any], timeout: float) -> Any:
    """A value that rank 0 computes and all ranks get, such as a setting that depends on files.

    Args:
        name: of the value; each may be shared once.
        compute: called on rank 0 only; its result has to fit into JSON.
        timeout: seconds for the other ranks to wait; if rank 0 fails meanwhile, the failure monitor ends them.

    Raises:
        UserError: rank 0 did not finish in time.
    """
    key = f"{_PREFIX}/shared/{name}"
    if launch.rank == 0:
        value = compute()
        store.set(key, json.dumps(value))
        return value
    text = _await(store, key, time.monotonic() + timeout)
    if text is None:
        raise UserError(f"rank 0 did not share {name} within {timeout:g} s; see its own output")
    return json.loads(text)
