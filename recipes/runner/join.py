"""Join the run: form the process group, and receive from rank 0 what it has settled."""

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from datamodules.errors import UserError, first_line
from datamodules.lightning import pl, rank_zero_only
from datamodules.notes import warn
from recipes.runner.command import Command
from recipes.runner.launch import Launch
from recipes.runner.network import LOOPBACK, choose_interface, listen_at

_PACKAGES = ("recipes", "callbacks", "datamodules")
_T = TypeVar("_T")


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


def versions(classes: Iterable[type] = ()) -> dict[str, Any]:
    """Return the versions that have to be equal on all ranks, by name.

    Args:
        classes: the user's classes, whose files belong to the code.
    """
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "the code": code_version(_sources(classes)),
    }


def describe_differences(everyone: list[dict[str, Any]]) -> str:
    """Return what differs on each rank from rank 0; an empty text where nothing does.

    Example:
        >>> ranks = [{"where": "node 0, a", "versions": {"torch": "2.14"}}]
        >>> ranks.append({"where": "node 1, b", "versions": {"torch": "2.15"}})
        >>> describe_differences(ranks)
        'rank 1 (node 1, b): torch is 2.15, on rank 0 2.14'
    """
    lines = []
    expected = everyone[0]["versions"]
    for rank, record in enumerate(everyone):
        found = record["versions"]
        changed = [name for name in found if found[name] != expected[name]]
        changes = [f"{name} is {found[name]}, on rank 0 {expected[name]}" for name in changed]
        if changes:
            lines.append(f"rank {rank} ({record['where']}): {', '.join(changes)}")
    return "; ".join(lines)


def _compare(launch: Launch, classes: Iterable[type]) -> None:
    """Refuse, on all ranks, versions and code that differ from those of rank 0."""
    shape = {"nodes": launch.num_nodes, "devices of the node": launch.devices}
    where = f"node {launch.node_rank}, {socket.gethostname()}"
    records: list[Any] = [None] * launch.world_size
    dist.all_gather_object(records, {"where": where, "versions": versions(classes) | shape})
    difference = describe_differences(records)
    if difference:
        raise UserError(f"the ranks differ: {difference}. Start all with one command and one version of the code")


def _agents_store() -> dist.TCPStore:
    """Connect to the store of the agents that have started this process."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False)


def _open_store(launch: Launch, timeout: float, command: Command) -> dist.Store:
    """Open the store for the process group; each start of the processes has its own keys.

    Raises:
        UserError: rank 0's port is taken.
    """
    if launch.store_prefix:
        return dist.PrefixStore(launch.store_prefix, _agents_store())
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


def join_run(launch: Launch, timeout: float, command: Command, classes: Iterable[type] = ()) -> Launch:
    """Form the process group with the other ranks, and compare the versions.

    Args:
        timeout: seconds to wait for the other ranks.
        classes: the user's classes, whose files belong to the code.

    Returns:
        The launch with the port of the rendezvous.

    Raises:
        UserError: a rank is missing, or runs another version.
    """
    rank_zero_only.rank = launch.rank  # type: ignore[attr-defined]
    if launch.world_size == 1:
        return launch
    if not dist.is_initialized():
        launch = _form_group(launch, timeout, command)
    _compare(launch, classes)
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
        if launch.store_prefix:
            raise
        raise UserError(
            f"the {launch.world_size} processes did not meet at {launch.address}:{launch.port} within {timeout:g} s:"
            f" {first_line(error)}; start all of them, check the address and firewalls, or wait longer with"
            " `rendezvous_timeout`"
        ) from error
    port = getattr(store, "port", launch.port)
    os.environ.update(MASTER_ADDR=launch.address or LOOPBACK, MASTER_PORT=str(port))
    return replace(launch, port=port)


def check_files(launch: Launch, folder: str | None, checkpoint: str | None) -> None:
    """Compare what the nodes find on their disks: the run's folder and the checkpoint to resume from.

    A folder that another node does not have is a warning: rank 0 alone writes, but a resume would fail.

    Raises:
        UserError: a node does not find the checkpoint.
    """
    if launch.num_nodes == 1:
        return
    where = f"node {launch.node_rank}, {socket.gethostname()}"
    absent = [path is not None and not Path(path).exists() for path in (checkpoint, folder)]
    of_ranks: list[Any] = [None] * launch.world_size
    dist.all_gather_object(of_ranks, (where, *absent))
    for where, lacks_checkpoint, lacks_folder in of_ranks:
        if lacks_checkpoint:
            raise UserError(
                f"{where} does not find the checkpoint {checkpoint}: pass a `run_dir` that all nodes share, or"
                " resume=FILE"
            )
        if lacks_folder:
            warn(
                f"warning: {where} does not find the run's folder {folder}, and a resume reads its checkpoint on every"
                " node: pass a `run_dir` that all nodes share"
            )
            return


class RankZeroFailed(SystemExit):
    """End of a rank since rank 0 has ended with an error, which rank 0 reports."""


def leave_run() -> None:
    """End the process group of this process, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share(compute: Callable[[], _T]) -> _T:
    """Return a value that rank 0 computes and all ranks get, such as the record of the run.

    Args:
        compute: called on rank 0 only.

    Raises:
        RankZeroFailed: on the other ranks, once rank 0 has ended, if `compute` has raised a `UserError`.
    """
    # A single process, which has no process group.
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
            dist.barrier()  # It fails as rank 0 ends, so that its error is printed before a launcher sees this end.
        raise RankZeroFailed(status)
    result: _T = value
    return result
