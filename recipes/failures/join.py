"""Join the run that was planned: rendezvous, then the failure monitor."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from datamodules.errors import UserError
from recipes.failures.monitor import RunConnection, use_monitor
from recipes.failures.rendezvous import Request, rendezvous
from recipes.failures.stores import AgentsStore
from recipes.launch.interfaces import interface_towards, loopback_interface
from recipes.launch.plan import LAUNCHER_VARIABLE, RENDEZVOUS_VARIABLE, Launch
from recipes.launch.settings import Command, LaunchSettings

__all__ = ["join_run"]

log = logging.getLogger("lightning_recipes.failures")


def join_run(
    launch: Launch, settings: Callable[[], dict[str, Any]], options: LaunchSettings, command: Command
) -> tuple[Launch, RunConnection | None]:
    """Wait for the other ranks, and start the failure monitor.

    Sets the environment variables from which Lightning's own environment reads the same.

    Args:
        settings: returns what has to be equal on all ranks, by name; called only where there are several.
        options: with the rendezvous timeout.

    Returns:
        The launch with its address and port, and the connection to the other ranks; None where the run is one process.

    Raises:
        UserError: a rank is missing, or its settings differ.
    """
    rank_zero_only.rank = launch.rank  # type: ignore[attr-defined]
    for name in ("NODE_RANK", "LOCAL_RANK", *(("RANK", "WORLD_SIZE") if launch.spawns else ())):
        os.environ.pop(name, None)
    if launch.address is None:
        return launch, None
    if launch.elastic and launch.num_nodes > 1 and AgentsStore.is_used():
        # An agent publishes the address of its store in its first round only. We are its child, too late to set it.
        log.warning(
            "warning: with this torchrun no node can join later or again; for that, start it on every node with"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    joined = rendezvous(Request(launch, settings(), options.rendezvous_timeout, command))
    address = joined.address
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        # The store is our own, so torch must not expect torchrun's agent behind it.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(joined.store_port), NODE_RANK=str(launch.node_rank))
    os.environ[LAUNCHER_VARIABLE] = launch.launcher
    if launch.spawns:
        os.environ[RENDEZVOUS_VARIABLE] = f"{address}:{joined.port}"
    else:
        os.environ["LOCAL_RANK"] = str(launch.local_rank)
    _choose_interface(launch, address)
    use_monitor(joined.connection)
    if joined.problem:
        raise UserError(f"the settings of this process differ from those of rank 0: {joined.problem}")
    return replace(launch, address=address, port=joined.port), joined.connection


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
