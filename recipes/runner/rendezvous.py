"""Form the rendezvous of a run's nodes: torch's, over a `TCPStore` of node 0's agent."""

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

# A node without a sign of life for 2 x 5 seconds is left out of the next rendezvous.
_KEEP_ALIVE_SECONDS = 2
_KEEP_ALIVE_ATTEMPTS = 5
_STORE_TIMEOUT = 30.0  # Seconds for node 0 to answer another node's agent.


class _Handler(DynamicRendezvousHandler):
    """torch's rendezvous handler with a timeout: a store's call waits for ever when node 0 is unreachable."""

    @override
    def is_closed(self) -> bool:
        return bool(self._in_time(super().is_closed))

    @override
    def num_nodes_waiting(self) -> int:
        return int(self._in_time(super().num_nodes_waiting))

    def _in_time(self, call: Callable[[], int]) -> int:
        if self.settings.max_nodes == 1:
            return call()
        # In a thread: a call of the C++ store cannot be interrupted.
        future: Future[int] = Future()

        def run_call() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run_call, daemon=True, name="rendezvous").start()
        try:
            return future.result(_STORE_TIMEOUT)
        except TimeoutError as error:
            raise RendezvousConnectionError(f"no answer within {_STORE_TIMEOUT:g} s") from error


def open_store(launch: Launch, timeout: float, command: Command) -> TCPStore:
    """Open the store of the agents: node 0's serves it, the others connect to it.

    Raises:
        UserError: the port is taken, or node 0 does not answer.
    """
    address = launch.address or LOOPBACK
    port = launch.port or 0
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=max(30.0, timeout))}
    if launch.node_rank == 0:
        # Our listener, since torch's store would listen on all interfaces.
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
    """Build the rendezvous handler of the agents over a store.

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
        # torch sorts the nodes by this name to rank them, so the digits keep the order of the node ranks.
        local_addr=f"node-{launch.node_rank:05}",
        timeout=RendezvousTimeout(join=wait, last_call=timedelta(seconds=3 if launch.is_elastic else 0.1)),
        keep_alive_interval=_KEEP_ALIVE_SECONDS,
        keep_alive_max_attempt=_KEEP_ALIVE_ATTEMPTS,
    )
    return handler
