"""Ranks that have been started form one group, or each says why they cannot; what they compare before they train."""

import os
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from datamodules import UserError
from recipes.runner import worker
from recipes.runner.launch import Launch
from recipes.runner.worker import (
    RankZeroFailed,
    broadcast_from_rank_zero,
    check_files,
    code_version,
    init_distributed,
    interface_towards,
    open_store,
    rendezvous_errors_reported,
)
from tests.support.ranks import free_port, run_ranks

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are asked for as Linux does")


def _launch(port: int, nodes: int = 1) -> Launch:
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    devices = world // nodes
    return Launch("manual", nodes, devices, rank // devices, rank % devices, "127.0.0.1", port)


def _join(port: int, of_rank: dict[int, str], seconds: float = 600.0) -> tuple[str, Any]:
    rank = int(os.environ["RANK"])
    if rank not in of_rank:
        return "absent", None
    with patch.object(worker, "code_version", return_value=of_rank[rank]):
        try:
            joined = init_distributed(_launch(port), seconds)
        except UserError as error:
            return str(error), None
    return joined.describe(), broadcast_from_rank_zero(lambda: f"of rank {rank}")


def test_ranks_that_join_share_what_rank_0_says():
    port = free_port()
    answers = run_ranks(_join, 2, port, {0: "a", 1: "a"})
    assert answers == [(f"started manually, 1 node x 2 devices, 127.0.0.1:{port}", "of rank 0")] * 2


def test_a_process_with_other_code_is_named_on_both():
    for answer, _ in run_ranks(_join, 2, free_port(), {0: "a", 1: "b"}):
        where = f"rank 1 (node 0, {socket.gethostname()})"
        assert f"{where}: the code is b, on rank 0 a. Start all with one command" in answer


def test_a_missing_rank_is_counted_by_the_others():
    for answer, _ in run_ranks(_join, 3, free_port(), {0: "a", 1: "a"}, 3.0)[:2]:
        assert "the processes did not meet at 127.0.0.1:" in answer
        assert "within 3 s: " in answer


def _settle(port: int) -> Any:
    init_distributed(_launch(port), 600.0)

    def reject() -> None:
        raise UserError("no data")

    try:
        broadcast_from_rank_zero(reject)
    except RankZeroFailed as ended:
        return ended.code
    except UserError as error:
        dist.destroy_process_group()  # As the end of the process does, for which the others wait.
        return str(error)
    return None


def test_an_error_of_rank_0_ends_the_others_with_its_status():
    assert run_ranks(_settle, 2, free_port()) == ["no data", 2]


def _look(port: int, missing: str) -> str:
    launch = init_distributed(_launch(port, nodes=2), 600.0)
    lines: list[str] = []
    with patch.object(worker, "warn", lines.append), patch.object(Path, "exists", _exists(launch.rank, missing)):
        try:
            check_files(launch, "folder", "last.ckpt")
        except UserError as error:
            return str(error)
    return lines[0]


def _exists(rank: int, missing: str) -> Any:
    return lambda path: rank == 0 or path.name != missing


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "last.ckpt",
            "does not find the checkpoint last.ckpt: pass a `run_dir` that all nodes share, or resume='FILE'",
        ),
        ("folder", "does not find the run's folder folder, and a resume reads its checkpoint on every node"),
    ],
)
def test_a_node_that_does_not_share_the_folder_is_named(missing: str, message: str):
    for found in run_ranks(_look, 2, free_port(), missing):
        assert f"node 1, {socket.gethostname()} {message}" in found


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_an_error(address: str):
    with socket.create_server(("", 0)) as taken:
        launch = Launch("manual", 2, 1, address=address, port=taken.getsockname()[1])
        with pytest.raises(UserError, match="another `master_port`"), rendezvous_errors_reported(launch, 5.0):
            open_store(launch.address, launch.port, 5.0, serves=True)


@pytest.mark.parametrize(("address", "serves"), [("192.0.2.1", True), ("127.0.0.1", False)])
def test_a_silent_node_0_leads_to_what_to_check(address: str, serves: bool):
    """On another machine than node 0, and on node 0 with an address that is none of its own."""
    launch = Launch("manual", 2, 1, address=address, port=free_port())
    line = "within 1 s: .*start all of them, check firewalls and that `master_addr` is an address of node 0"
    with pytest.raises(UserError, match=line), rendezvous_errors_reported(launch, 1.0):
        open_store(launch.address, launch.port, 1.0, serves)


def _package(root: Path) -> list[Path]:
    """Files of which two have the same name in folders of the same name."""
    files = [root / "recipes" / "mnist" / "__init__.py", root / "datamodules" / "mnist" / "__init__.py"]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text(f"number = {i}\n")
    return files


def test_the_version_of_the_code_changes_with_each_file(tmp_path):
    here, there = _package(tmp_path / "here"), _package(tmp_path / "there")
    assert code_version(here) == code_version(here[::-1]) == code_version(there)
    versions = {code_version(here)}
    for file in here:
        file.write_text(file.read_text() + "# changed\n")
        versions.add(code_version(here))
    assert len(versions) == 3


@linux
def test_the_loopback_address_has_the_loopback_interface():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_where_an_address_cannot_be_reached_there_is_none():
    assert interface_towards("no-such-host.invalid") is None


@linux
def test_any_address_has_an_interface_of_this_machine():
    names = {name for _, name in socket.if_nameindex()}
    assert interface_towards("192.0.2.1") in names | {None}
