"""Rendezvous of the ranks before the first collective call, which would wait for ever for a missing rank.

Every rank connects to rank 0 at the master's address and sends its settings and versions. Rank 0 compares them and
publishes the result, and the port of the store that torch.distributed uses.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datamodules.errors import UserError
from recipes.failures.monitor import Coordinator, Member, RunConnection
from recipes.failures.protocol import Channel, ProtocolError, keep_alive, listen
from recipes.failures.stores import AgentsStore, serve_store
from recipes.launch.interfaces import LOOPBACK
from recipes.launch.plan import Launch
from recipes.launch.settings import Command

__all__ = ["UPDATES_DONE", "Rendezvous", "Request", "describe_differences", "rendezvous", "share"]

UPDATES_DONE = "updates done"
"""The entry of a rank's settings that tells where its resume starts."""

_RETRY_AFTER = 0.1
_CONNECT_TIMEOUT = 10.0  # Seconds for rank 0 to answer once its port is open.


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
        record = {"nodes": self.launch.num_nodes, "devices": self.launch.devices, "settings": self.settings}
        return dict(json.loads(json.dumps(record)))


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous.

    Args:
        connection: to the other ranks.
        address: of rank 0, and the `port` where it accepts the other ranks.
        store_port: of the store that torch.distributed uses, at the same address.
        problem: how the settings of a process that joined later differ from rank 0's; empty if they do not.
    """

    connection: RunConnection
    address: str
    port: int
    store_port: int
    problem: str = ""


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


def _address(launch: Launch) -> str:
    """Of rank 0, for its own machine or for other nodes."""
    return launch.address if launch.address and launch.num_nodes > 1 else LOOPBACK


def _with_another_port(port: int, command: Command) -> str:
    """What to type where a port is taken."""
    if command.launcher == "torchrun":
        return f"torchrun chooses another one when it is started again, on every node: {command.using()}"
    return f"{'type' if command.launcher == 'slurm' else 'on every node:'} {command.using(master_port=port + 1)}"


def _listen(request: Request, port: int) -> socket.socket:
    """Where rank 0 accepts the other ranks; those of its own machine reach it through the loopback interface."""
    try:
        return listen(port, loopback=request.launch.num_nodes == 1)
    except OSError as error:
        raise UserError(
            f"port {port} of this machine is in use ({error.strerror}), perhaps by another run;"
            f" {_with_another_port(port, request.command)}"
        ) from error


def _check_own_address(request: Request, address: str, port: int) -> None:
    """Refuse a master's address that does not lead to this machine, before the other nodes are waited for."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT / 2).close()
    except OSError as error:
        raise UserError(
            f"node 0 cannot connect to itself at {address}:{port} ({error}); `master_addr` has to be an address of the"
            f" node with node_rank=0: {request.command.using(master_addr=socket.gethostname())}"
        ) from error


def _join_once(request: Request, address: str, port: int, deadline: float) -> Member:
    """Join what listens at an address.

    Raises:
        UserError: it is not rank 0 of this run, or refuses this process.
        OSError, EOFError: it does not answer.
    """
    other_port = _with_another_port(port, request.command)
    wait = max(0.1, min(5.0, deadline - time.monotonic()))
    connection = keep_alive(socket.create_connection((address, port), timeout=wait))
    try:
        channel = Channel(connection)
        channel.greet(_CONNECT_TIMEOUT)
        connection.settimeout(None)
        member = Member(request.launch, channel, request.record)
        member.wait_until_accepted(deadline)
        return member
    except (OSError, EOFError) as error:
        connection.close()
        if isinstance(error, (ProtocolError, TimeoutError)):
            raise UserError(f"the service at {address}:{port} is not a run of this program; {other_port}") from error
        raise


def _no_answer(request: Request, address: str, port: int, error: Exception) -> UserError:
    reason = error if str(error) else "the connection was closed"
    text = f"node 0 does not answer at {address}:{port} within {request.timeout:g} s ({reason}); "
    if request.launch.num_nodes == 1:
        text += (
            "all processes of one node have to run on one machine; with several nodes set LOCAL_WORLD_SIZE to the"
            " number of processes on each"
        )
    else:
        text += "start the run there too, check `master_addr` and firewalls"
    longer = request.command.using(rendezvous_timeout=int(4 * request.timeout))
    return UserError(f"{text}, or wait longer: {longer}")


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
                member = _join_once(request, *place, deadline)
                break
            except (OSError, EOFError) as error:
                failure = _no_answer(request, *place, error)
            except UserError as error:
                failure = error
                if not moves:
                    raise
        if time.monotonic() >= deadline:
            raise failure
        time.sleep(_RETRY_AFTER)
    address, port = place
    try:
        result = member.wait_for("result", deadline + request.timeout)
    except TimeoutError as error:
        text = f"rank 0 at {address}:{port} did not finish the rendezvous within {2 * request.timeout:g} s"
        raise UserError(text) from error
    except EOFError as error:
        raise UserError(f"rank 0 at {address}:{port} ended during the rendezvous; see its own output") from error
    if result["problem"]:
        raise UserError(result["problem"])
    problem = ""
    if request.launch.joins:
        own = request.record | {"host": socket.gethostname()}
        problem = describe_differences({0: result["record"], request.launch.rank: own}, request.launch)
    return Rendezvous(member, address, port, result["store_port"], problem)


def _listed(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _missing(request: Request, coordinator: Coordinator) -> str:
    launch = request.launch
    absent = [rank for rank in launch.first_ranks if rank and rank not in coordinator.records]
    nodes = sorted({rank // launch.devices for rank in absent})
    what = f"{_listed('rank', absent)} on {_listed('node', nodes)}"
    expected = len(launch.first_ranks)
    text = f"{expected - len(absent)} of {expected} processes joined within {request.timeout:g} s; missing: {what}"
    if launch.launcher == "manual":
        flags: dict[str, Any] = {"node_rank": nodes[0], "master_addr": launch.address, "master_port": launch.port}
        text += f"; type there: {request.command.using(**flags)}"
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


def _unequal_nodes(everyone: dict[int, dict[str, Any]], request: Request) -> str:
    """Which of the nodes so far has another number of devices or of nodes; empty where none has."""
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
    return ""


def _compare(request: Request, coordinator: Coordinator, own: dict[str, Any], deadline: float) -> str:
    """On rank 0: wait for the other ranks and compare. Returns the problem; empty where there is none."""
    launch = request.launch
    with coordinator.changed:
        while True:
            everyone = {0: own} | coordinator.records
            if (twice := coordinator.claimed_twice) is not None:
                node = twice // launch.devices
                return f"two processes claim to be rank {twice} (node {node}); give each node its own `node_rank`"
            if problem := _unequal_nodes(everyone, request):
                return problem
            if everyone.keys() >= set(launch.first_ranks):
                return _difference_message({rank: everyone[rank] for rank in launch.first_ranks}, launch)
            if (rest := deadline - time.monotonic()) <= 0:
                return _missing(request, coordinator)
            coordinator.changed.wait(min(rest, _RETRY_AFTER))


def _host(request: Request, deadline: float, agents: AgentsStore | None) -> Rendezvous:
    """On rank 0: accept the other ranks, and publish the result."""
    launch = request.launch
    listener = _listen(request, 0 if agents else launch.port or 0)
    address, port = _address(launch), listener.getsockname()[1]
    if agents:
        address = agents.own_address() if launch.num_nodes > 1 else address
        agents.publish(address, port)
    _check_own_address(request, address, port)
    coordinator = Coordinator(launch, listener)
    own = request.record | {"host": coordinator.host, "node": 0}
    if problem := _compare(request, coordinator, own, deadline):
        coordinator.publish("result", {"problem": problem})
        # The others read it before this process ends.
        time.sleep(1.0)
        raise UserError(problem)
    coordinator.store = serve_store(launch, address)
    coordinator.publish("result", {"problem": "", "record": own, "store_port": coordinator.store.port})
    return Rendezvous(coordinator, address, port, coordinator.store.port)


def rendezvous(request: Request) -> Rendezvous:
    """Wait for all ranks and make sure that their settings are equal.

    Processes that another process of their node has started join after that; for them the problem is returned.

    Raises:
        UserError: on every rank: a rank is missing, or has other settings.
    """
    launch = request.launch
    deadline = time.monotonic() + request.timeout
    agents = AgentsStore(launch) if launch.launcher == "torchrun" and AgentsStore.is_used() else None
    if launch.rank == 0:
        return _host(request, deadline, agents)
    if agents:
        return _join(request, agents.find, deadline, moves=True)
    place = (_address(launch), launch.port or 0)
    return _join(request, lambda: place, deadline, moves=False)


def share(connection: RunConnection, name: str, compute: Callable[[], Any], timeout: float) -> Any:
    """A value that rank 0 computes and all ranks get, such as a setting that depends on files.

    Args:
        name: of the value; each may be shared once.
        compute: called on rank 0 only; its result has to fit into JSON.
        timeout: seconds for the other ranks to wait; if rank 0 fails meanwhile, the failure monitor ends them.

    Raises:
        UserError: rank 0 did not finish in time.
    """
    if isinstance(connection, Coordinator):
        value = compute()
        connection.publish(name, value)
        return value
    try:
        return connection.wait_for(name, time.monotonic() + timeout)
    except TimeoutError as error:
        raise UserError(f"rank 0 did not share {name} within {timeout:g} s; see its own output") from error
