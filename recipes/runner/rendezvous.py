"""Where the agents of a run's nodes meet: torch's rendezvous, over a `TCPStore` of node 0's agent."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from typing_extensions import override

from datamodules.errors import UserError
from recipes.runner.command import Command
from recipes.runner.launch import Launch
from recipes.runner.network import LOOPBACK, listen_at

_KEEP_ALIVE, _MISSED = 2, 5  # A node without a sign of life for ten seconds is left out of the next rendezvous.
_ANSWERS_WITHIN = 30.0  # Seconds for node 0 to answer another node's agent.


class _Handler(DynamicRendezvousHandler):
    """torch's rendezvous, which notices that node 0 cannot be reached: a call of a store without an answer waits."""

    @override
    def is_closed(self) -> bool:
        return bool(self._in_time(super().is_closed))

    @override
    def num_nodes_waiting(self) -> int:
        return int(self._in_time(super().num_nodes_waiting))

    def _in_time(self, call: Callable[[], int]) -> int:
        if self.settings.max_nodes == 1:
            return call()
        answer: Future[int] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True, name="rendezvous").start()
        try:
            return answer.result(_ANSWERS_WITHIN)
        except TimeoutError as error:
            raise RendezvousConnectionError(f"no answer within {_ANSWERS_WITHIN:g} s") from error


def open_store(launch: Launch, timeout: float, command: Command) -> TCPStore:
    """The store in which the agents meet: served by node 0's, and found by the others.

    Raises:
        UserError: the port is taken, or node 0 does not answer.
    """
    address, port = launch.address or LOOPBACK, launch.port or 0
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=max(30.0, timeout))}
    if launch.node_rank == 0:
        listener = listen_at(address, port, command)
        port = listener.getsockname()[1]
        _check_own_address(address, port, command)
        return TCPStore(address, port, is_master=True, master_listen_fd=listener.detach(), **options)
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return TCPStore(address, port, is_master=False, **options)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node 0 does not answer at {address}:{port} within {timeout:g} s ({error}); start the run there"
                    " too, check `master_addr` and firewalls, or wait longer:"
                    f" {command.using(rendezvous_timeout=int(4 * timeout))}"
                ) from error
        time.sleep(0.2)


def _check_own_address(address: str, port: int, command: Command) -> None:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError as error:
        raise UserError(
            f"node 0 cannot connect to itself at {address}:{port} ({error}); `master_addr` has to be an address of the"
            f" node with node_rank=0: {command.using(master_addr=socket.gethostname())}"
        ) from error


def make_rendezvous(launch: Launch, store: TCPStore, timeout: float) -> DynamicRendezvousHandler:
    """The rendezvous of the agents that meet in a store.

    Args:
        timeout: seconds to wait for the other nodes, at the start and in a restart.
    """
    backend = C10dRendezvousBackend(store, "lightning-recipes")
    wait = timedelta(seconds=timeout)
    handler: DynamicRendezvousHandler = _Handler.from_backend(
        "lightning-recipes",
        store,
        backend,
        launch.min_nodes,
        launch.num_nodes,
        # Nodes are sorted by this name, so the first of them is the one of the lowest number.
        local_addr=f"node-{launch.node_rank:05}",
        timeout=RendezvousTimeout(join=wait, last_call=timedelta(seconds=3 if launch.is_elastic else 0.1)),
        keep_alive_interval=_KEEP_ALIVE,
        keep_alive_max_attempt=_MISSED,
    )
    return handler
