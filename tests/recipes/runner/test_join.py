"""Ranks that have been started form one group, or each says why they cannot."""

import os
import socket
from typing import Any

import pytest

from datamodules import UserError
from recipes.runner import rendezvous
from recipes.runner.command import Command
from recipes.runner.join import _open_store, join_run, share
from recipes.runner.launch import Launch, LaunchSettings
from tests.support.ranks import free_port, run_ranks

COMMAND = Command("python -m r", [])


def _launch(port: int, nodes: int = 1, rank: int | None = None) -> Launch:
    rank = int(os.environ["RANK"]) if rank is None else rank
    world = int(os.environ["WORLD_SIZE"])
    devices = world // nodes
    return Launch("manual", nodes, devices, rank // devices, rank % devices, "127.0.0.1", port)


def _join(port: int, by_rank: list[Any], claims: list[int], seconds: float = 600.0) -> tuple[str, Any]:
    rank = int(os.environ["RANK"])
    if rank >= len(by_rank):
        return "absent", None
    options = LaunchSettings(rendezvous_timeout=seconds)
    try:
        joined = join_run(_launch(port, rank=claims[rank]), lambda: by_rank[rank], options, COMMAND)
    except UserError as error:
        return str(error), None
    return joined.describe(), share(lambda: f"of rank {rank}")


def test_ranks_join_at_the_port_that_they_were_told_and_share_what_rank_0_says():
    port = free_port()
    settings = [{"lr": 0.1}, {"lr": 0.1}]
    answers = run_ranks(_join, 2, port, settings, [0, 1])
    assert answers == [(f"started manually, 1 node x 2 devices, 127.0.0.1:{port}", "of rank 0")] * 2


def test_a_process_with_other_settings_is_named_on_both():
    for answer, _ in run_ranks(_join, 2, free_port(), [{"lr": 0.1, "a": {0: 4}}, {"lr": 0.2, "a": {0: 4}}], [0, 1]):
        assert (
            f"rank 1 (node 0, {socket.gethostname()}): lr is 0.2, on rank 0 0.1. Start all with one command" in answer
        )


def test_ranks_with_unequal_checkpoints_are_told_to_share_the_folder():
    for answer, _ in run_ranks(_join, 2, free_port(), [{"updates done": 5}, {"updates done": 0}], [0, 1]):
        assert answer.startswith("the ranks do not find the same checkpoint: rank 1")
        assert "Pass a `run_dir` that all nodes share" in answer


def test_where_a_rank_is_missing_the_others_say_how_many_have_come():
    for answer, _ in run_ranks(_join, 3, free_port(), [{}, {}], [0, 1], 3.0)[:2]:
        assert "the 3 processes did not meet at 127.0.0.1:" in answer
        assert "within 3 s: " in answer


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        ("manual", "python -m r --master-port {}"),
        ("slurm", "srun --nodes=2 --ntasks-per-node=1 python -m r --master-port {}"),
    ],
)
def test_a_taken_port_is_refused_with_the_command_of_the_launcher(launcher: str, advice: str):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        command = COMMAND.started_by(launcher, 2, 1)
        with pytest.raises(UserError) as refused:
            _open_store(Launch(launcher, 2, 1, address="127.0.0.1", port=port), 5.0, command)
        assert advice.format(port + 1) in str(refused.value)
        if launcher == "manual":
            with pytest.raises(UserError, match=f"in use .* --master-port {port + 1}"):
                rendezvous.open_store(Launch(launcher, 2, 1, address="127.0.0.1", port=port), 5.0, command)


def test_an_address_of_another_machine_is_refused_on_node_0_before_it_waits_for_the_others():
    launch = Launch("manual", 2, 1, address="192.0.2.1", port=free_port())
    with pytest.raises(UserError, match="node 0 cannot connect to itself at 192.0.2.1:.*`master_addr` "):
        rendezvous.open_store(launch, 60.0, COMMAND)


def test_a_node_0_that_does_not_answer_is_named_with_what_to_type():
    launch = Launch("manual", 2, 1, node_rank=1, address="127.0.0.1", port=free_port())
    with pytest.raises(UserError, match="node 0 does not answer at 127.0.0.1.*--rendezvous-timeout 4"):
        rendezvous.open_store(launch, 1.0, COMMAND)
