"""Join the run: form the process group, and compare settings and code of the ranks in one collective."""

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from datamodules.errors import UserError, first_line
from datamodules.lightning import pl, rank_zero_only
from datamodules.notes import warn
from recipes.runner.command import Command
from recipes.runner.launch import Launch, LaunchSettings
from recipes.runner.network import LOOPBACK, choose_interface, listen_at
from recipes.runner.worker import STORE_PREFIX, is_worker

UPDATES_DONE = "updates done"
"""The entry of a rank's settings with the number of updates in its checkpoint."""

_PACKAGES = ("recipes", "callbacks", "datamodules")
_FOLDER_KEY = "lightning_recipes/folder"


def code_version(files: Iterable[Path]) -> str:
    """Return the first twelve digits of a SHA-256 of source files."""
    digest = hashlib.sha256()
    # Sorted from the file's name upwards, since nodes may have the packages in different folders.
    for path in sorted(dict.fromkeys(files), key=_reversed_parts):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _reversed_parts(path: Path) -> tuple[str, ...]:
    return path.parts[::-1]


def _sources(classes: Iterable[type]) -> list[Path]:
    root = Path(__file__).parents[2]
    files = [path for name in _PACKAGES for path in (root / name).rglob("*.py")]
    modules = [sys.modules.get("__main__"), *(sys.modules.get(cls.__module__) for cls in classes)]
    paths = [getattr(module, "__file__", None) for module in modules]
    user_files = [Path(path) for path in paths if path]
    return files + [path for path in user_files if path.suffix == ".py" and path.is_file()]


def fingerprint(settings: dict[str, Any], classes: Iterable[type] = ()) -> dict[str, Any]:
    """Return all that has to be equal on all ranks, by name.

    Args:
        settings: the settings of the experiment as plain values; folders may differ.
        classes: the user's classes, whose files belong to the code.
    """
    same = {k: v for k, v in settings.items() if not k.endswith("_dir")}
    return same | {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "the code": code_version(_sources(classes)),
    }


def _agents_store() -> dist.TCPStore:
    """Connect to the store of the agents that have started this process."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False)


def share_folder(folder: Path) -> None:
    """Store the folder of the run, for later starts of its processes by the agents, on any node."""
    if is_worker(os.environ):
        _agents_store().set(_FOLDER_KEY, str(folder.resolve()))


def folder_in(store: dist.Store) -> str | None:
    """Return the folder of the run that the agents of a store have started; None before rank 0 has made it."""
    return store.get(_FOLDER_KEY).decode() if store.check([_FOLDER_KEY]) else None


def shared_folder() -> str | None:
    """Return the folder of a run that its agents have restarted; None at the first start, and without agents."""
    return folder_in(_agents_store()) if is_worker(os.environ) else None


def _open_store(launch: Launch, timeout: float, command: Command) -> dist.Store:
    """Open the store for the process group; each start of the processes has its own keys.

    Raises:
        UserError: rank 0's port is taken.
    """
    if is_worker(os.environ):
        return dist.PrefixStore(os.environ[STORE_PREFIX], _agents_store())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if launch.restarts and launch.num_nodes > 1:
            warn(
                "warning: with this torchrun no node can join later or again; for that, start it on every node with"
                " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, or use this program's own --num-nodes,"
                " --node-rank, --master-addr and --max-restarts"
            )
        return dist.PrefixStore(f"lightning_recipes/{os.environ['TORCHELASTIC_RESTART_COUNT']}", _agents_store())
    # All processes of one node are on one machine, whatever address its name has.
    address = launch.address if launch.num_nodes > 1 else LOOPBACK
    port = launch.port
    assert address is not None
    assert port is not None
    options: dict[str, Any] = {"world_size": launch.world_size, "timeout": timedelta(seconds=timeout)}
    if launch.rank:
        return dist.TCPStore(address, port, is_master=False, **options)
    listener = listen_at(address, port, command)
    return dist.TCPStore(address, port, is_master=True, master_listen_fd=listener.detach(), **options)


def describe_differences(everyone: list[dict[str, Any]]) -> str:
    """Return the settings of each rank that differ from those of rank 0; an empty text where none do.

    Example:
        >>> ranks = [{"where": "node 0, a", "settings": {"lr": 0.1, "torch": "2.15"}}]
        >>> ranks.append({"where": "node 1, b", "settings": {"lr": 0.2, "torch": "2.15"}})
        >>> describe_differences(ranks)
        'rank 1 (node 1, b): lr is 0.2, on rank 0 0.1'
    """
    lines = []
    expected = everyone[0]["settings"]
    for rank, record in enumerate(everyone):
        settings = record["settings"]
        names = sorted(name for name in expected.keys() | settings.keys() if expected.get(name) != settings.get(name))
        if names:
            changes = ", ".join(f"{name} is {settings.get(name)}, on rank 0 {expected.get(name)}" for name in names)
            lines.append(f"rank {rank} ({record['where']}): {changes}")
    return "; ".join(lines)


def _compare(launch: Launch, settings: dict[str, Any]) -> None:
    """Refuse, on all ranks, settings, data or code that differ from those of rank 0."""
    shape = {"nodes": launch.num_nodes, "devices of the node": launch.devices}
    record_of_this_rank = {"where": f"node {launch.node_rank}, {socket.gethostname()}", "settings": settings | shape}
    records: list[Any] = [None] * launch.world_size
    dist.all_gather_object(records, record_of_this_rank)
    difference = describe_differences(records)
    if not difference:
        return
    # First, since ranks with another checkpoint also differ in the settings that come from it.
    if len({record["settings"].get(UPDATES_DONE) for record in records}) > 1:
        raise UserError(
            f"the ranks do not find the same checkpoint: {difference}. Pass a `run_dir` that all nodes share, or"
            " resume=FILE"
        )
    raise UserError(
        f"the ranks have different settings: {difference}. Start all with one command and one version of the code"
    )


def join_run(
    launch: Launch, settings: Callable[[], dict[str, Any]], options: LaunchSettings, command: Command
) -> Launch:
    """Form the process group with the other ranks, and compare settings with them.

    Args:
        settings: returns what has to be equal on all ranks, by name; called only where there are several ranks.
        options: the timeouts.

    Returns:
        The launch with the port of the rendezvous.

    Raises:
        UserError: a rank is missing, or its settings differ.
    """
    rank_zero_only.rank = launch.rank  # type: ignore[attr-defined]
    if launch.world_size == 1:
        return launch
    if not dist.is_initialized():
        launch = _form_group(launch, options.rendezvous_timeout, command)
    _compare(launch, settings())
    return launch


def _form_group(launch: Launch, timeout: float, command: Command) -> Launch:
    # Lightning's TorchElasticEnvironment reads these variables when the Trainer is built.
    os.environ.update(NODE_RANK=str(launch.node_rank), GROUP_RANK=str(launch.node_rank))
    os.environ.update(LOCAL_RANK=str(launch.local_rank), RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size))
    choose_interface(launch.num_nodes, launch.address or LOOPBACK)
    limit = timedelta(seconds=launch.collective_timeout)
    try:
        store = _open_store(launch, timeout, command)
        dist.init_process_group(store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit)
    except RuntimeError as error:
        # A worker's error may reflect the end of another rank, which its agent reports.
        if is_worker(os.environ):
            raise
        raise UserError(
            f"the {launch.world_size} processes did not meet at {launch.address}:{launch.port} within {timeout:g} s:"
            f" {first_line(error)}; start all of them, check the address and firewalls, or wait longer with"
            " `rendezvous_timeout`"
        ) from error
    port = getattr(store, "port", launch.port)
    os.environ.update(MASTER_ADDR=launch.address or LOOPBACK, MASTER_PORT=str(port))
    return replace(launch, port=port)


def leave_run() -> None:
    """End the process group of this process, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share(compute: Callable[[], Any]) -> Any:
    """Return a value that rank 0 computes and all ranks get, such as a setting that depends on files.

    Args:
        compute: called on rank 0 only.
    """
    # A single process, which has no process group.
    if not dist.is_initialized():
        return compute()
    value = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(value)
    return value[0]
