"""The ranks meet once before the first collective call, which would wait for ever for one that does not come.

Rank 0 keeps a small store of keys at the master's address, the one that torch.distributed uses afterwards. Every rank
writes there what it runs; rank 0 compares, and tells everybody.
"""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from datamodules.errors import UserError
from recipes.launch.interfaces import address_for_others
from recipes.launch.plan import Command, Launch

__all__ = ["Meeting", "describe_differences", "meet"]

DONE = "updates done"
"""What a rank goes on from, among the names of what it runs."""

_PREFIX = "lightning_recipes"
_PAUSE = 0.05
_GREETING = 10.0  # Seconds for a store to answer once somebody listens.


def describe_differences(everyone: dict[int, dict[str, Any]], launch: Launch) -> str:
    """What each rank runs otherwise than rank 0; empty where all run the same.

    Example:
        >>> launch = Launch("hand", 2, 1)
        >>> ranks = {0: {"host": "a", "runs": {"lr": 0.1, "torch": "2.15"}}}
        >>> ranks[1] = {"host": "b", "runs": {"lr": 0.2, "torch": "2.15"}}
        >>> describe_differences(ranks, launch)
        'rank 1 (node 1, b): lr is 0.2, on rank 0 0.1'
    """
    lines = []
    expected = everyone[0]["runs"]
    for rank, card in sorted(everyone.items()):
        names = [n for n in expected.keys() | card["runs"].keys() if expected.get(n) != card["runs"].get(n)]
        if names:
            found = ", ".join(
                f"{name} is {card['runs'].get(name)}, on rank 0 {expected.get(name)}" for name in sorted(names)
            )
            lines.append(f"rank {rank} (node {rank // launch.devices}, {card['host']}): {found}")
    return "; ".join(lines)


def _reach(address: str, port: int, deadline: float, timeout: float, command: Command) -> None:
    """Wait until somebody listens at the master's address."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"node 0 does not answer at {address}:{port} within {timeout:g} s ({error}); start the run there"
                    " too, look at --master-addr and at firewalls, or wait longer:"
                    f" {command.using(rendezvous_timeout=int(4 * timeout))}"
                ) from error
            time.sleep(0.2)


def _serve(address: str, port: int, command: Command) -> TCPStore:
    """The store on rank 0; torch.distributed shares it, being in the same process."""
    try:
        # A probe of our own, for the reason: torch's message is a page.
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"port {port} of this machine is taken ({error.strerror}), perhaps by another run; on every node:"
            f" {command.using(master_port=port + 1)}"
        ) from error
    try:
        patience = timedelta(seconds=5)
        return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=patience)
    except (DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"node 0 does not reach itself at {address}:{port} ({reason}); --master-addr has to be an address of the"
            f" node with --node-rank 0: {command.using(master_addr=socket.gethostname())}"
        ) from error


def _join(address: str, port: int, command: Command) -> TCPStore:
    """The store on another rank.

    It is made beside the main thread, because torch waits for ever for a greeting from a service that says nothing.
    """
    found: list[TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(DistError, RuntimeError):
            found.append(TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=_GREETING)))

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(_GREETING)
    if not found:
        raise UserError(
            f"what listens at {address}:{port} is no run of this program; on every node:"
            f" {command.using(master_port=port + 1)}"
        )
    return found[0]


def _await(store: TCPStore, key: str, deadline: float) -> str | None:
    """A key's value, looked for in short calls so that Ctrl-C gets through; None after the deadline."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE)
    return store.get(key).decode()


def _leave_the_agents_store(launch: Launch, deadline: float, command: Command, timeout: float) -> tuple[str, int]:
    """Have rank 0 keep the store instead of torchrun's agent.

    With the agent's the processes of a restart meet the keys of those before them, and gloo waits for ever: the same as
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which only the agent reads.
    """
    assert launch.address is not None
    assert launch.port is not None
    agents = TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False)
    # Not the number of restarts: each agent counts for itself, and a round that others asked for it does not count.
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
            raise UserError(f"rank 0 has not come within {timeout:g} s; its own output says why")
        address, port = json.loads(place)
        try:
            # An entry of processes that have ended is replaced as soon as rank 0 is there again.
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
    text = f"{len(present)} of {len(launch.first_ranks)} processes met within {timeout:g} s; missing: {what}"
    if launch.launcher == "hand":
        flags: dict[str, Any] = {"node_rank": nodes[0], "master_addr": launch.address, "master_port": launch.port}
        text += f"; type there: {command.using(**flags)}"
    return text


def _what_differs(everyone: dict[int, dict[str, Any]], launch: Launch) -> str:
    """Why the ranks cannot train together, and what to do; empty where they can."""
    if not (difference := describe_differences(everyone, launch)):
        return ""
    done = {rank: card["runs"].get(DONE) for rank, card in everyone.items()}
    alike = {rank: card | {"runs": card["runs"] | {DONE: done[0]}} for rank, card in everyone.items()}
    if not describe_differences(alike, launch):
        return (
            f"the ranks do not find the same checkpoint: {difference}. Pass a --run-dir that all nodes share, or"
            " --resume FILE"
        )
    return f"the ranks do not run the same: {difference}. Start all with one command and one version of the code"


def _lead(store: TCPStore, launch: Launch, timeout: float, deadline: float, command: Command) -> str:
    """On rank 0: wait for the others, compare, and say what is wrong; empty where nothing is."""
    everyone: dict[int, dict[str, Any]] = {}
    for rank in launch.first_ranks:
        if card := _await(store, f"card/{rank}", deadline):
            everyone[rank] = json.loads(card)
    if len(everyone) < len(launch.first_ranks):
        return _missing(launch, set(everyone), timeout, command)
    twice = [rank for rank in launch.first_ranks if int(store.add(f"arrived/{rank}", 0)) > 1]
    if twice:
        node = twice[0] // launch.devices
        return f"two processes say that they are rank {twice[0]} (node {node}); give each node its own --node-rank"
    return _what_differs(everyone, launch)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks have met.

    Args:
        store: of keys that all ranks see.
        address: of the store, which torch.distributed shall use; so with `port`.
        problem: what a process that came later runs otherwise than rank 0; empty if nothing.
    """

    store: TCPStore
    address: str
    port: int
    problem: str = ""


def meet(launch: Launch, runs: dict[str, Any], timeout: float, command: Command) -> Meeting:
    """Meet the other ranks and make sure that all run the same.

    Processes that another has started, on its node, join a meeting that is over, and get what is wrong as an answer.

    Args:
        runs: settings and versions by name, as JSON has them.
        timeout: seconds.

    Raises:
        UserError: on every rank: one does not come, or runs something else.
    """
    assert launch.address is not None
    deadline = time.monotonic() + timeout
    address, port = launch.address, launch.port or 0
    if launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = _leave_the_agents_store(launch, deadline, command, timeout)
    if launch.rank == 0:
        store = _serve(address, port, command)
        port = store.port
    else:
        _reach(address, port, deadline, timeout, command)
        store = _join(address, port, command)
    card = {"host": socket.gethostname(), "runs": runs}
    problem: str | None
    try:
        store.add(f"arrived/{launch.rank}", 1)
        store.set(f"card/{launch.rank}", json.dumps(card))
        if launch.rank == 0:
            store.set("problem", problem := _lead(store, launch, timeout, deadline, command))
            # The store ends with this process; the others read it before.
            time.sleep(1.0 if problem else 0.0)
        else:
            problem = _await(store, "problem", deadline + timeout)
            if problem == "" and launch.joins:
                others = {0: json.loads(store.get("card/0")), launch.rank: card}
                return Meeting(store, address, port, describe_differences(others, launch))
    except (DistError, RuntimeError) as error:
        raise UserError(f"rank 0 at {address}:{port} has ended while the ranks met; its own output says why") from error
    if problem is None:
        raise UserError(f"rank 0 at {address}:{port} has not compared the ranks within {2 * timeout:g} s")
    if problem:
        raise UserError(problem)
    return Meeting(store, address, port)
