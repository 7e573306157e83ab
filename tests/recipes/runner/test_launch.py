"""What a process makes of its environment and its flags, before it has met anybody."""

import os
from typing import Any

import pytest

from datamodules import UserError
from recipes.runner.command import Command
from recipes.runner.launch import Launch, LaunchSettings, check_shared_update, first_host, on_devices_of, plan_launch
from recipes.runner.machine import Machine, devices_of
from recipes.runner.settings import TrainerSettings
from tests.end_to_end.test_launch import by_slurm, by_torchrun

CPU, GPUS = Machine("cpu"), Machine("cuda", 2)
BY_HAND = {"LOCAL_RANK": "0", "RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "9"}


def plan(env: dict[str, str], devices: Any = "auto", nodes: int | str = 1, here: Machine = CPU, **flags: Any) -> Launch:
    typed = ["--lr", "0.1", f"--devices={devices}", "--num_nodes", str(nodes)]
    return plan_launch(env, LaunchSettings(num_nodes=nodes, **flags), devices, here, Command("python -m r", typed))


def test_local_processes_need_no_address():
    assert plan({}) == Launch("local", 1, 1)
    assert plan({}, devices="auto", here=GPUS) == Launch("local", 1, 2, address="127.0.0.1", starts_agent=True)
    alone = plan({}, max_restarts=2)
    assert (alone.starts_agent, alone.world_size, alone.max_restarts) == (True, 1, 2), "one that is started again"


def test_flags_win_over_variables_on_nodes_started_manually():
    env = {"MASTER_ADDR": "head", "MASTER_PORT": "1234", "NODE_RANK": "1"}
    expected = Launch("manual", 4, 8, 1, 0, "head", 1234, starts_agent=True, min_nodes=4)
    assert plan(env, 8, 4) == expected
    assert plan({}, 8, 4, node_rank=1, master_addr="head", master_port=1234) == expected
    assert plan(env, 8, 4, node_rank=3, master_port=9).rank == 24
    elastic = plan(env, 8, "1:4")
    assert (elastic.num_nodes, elastic.min_nodes, elastic.is_elastic) == (4, 1, True)


def test_torchrun_decides_the_number_of_devices():
    ranks = [plan(env).rank for env in by_torchrun(1234, nodes=2, devices=2)]
    assert ranks == [0, 1, 2, 3]
    launch = plan(by_torchrun(1234, nodes=2, devices=2)[3], 2, 2)
    assert launch == Launch("torchrun", 2, 2, 1, 1, "127.0.0.1", 1234)


def test_slurm_decides_the_number_of_devices():
    launch = plan(by_slurm(1001, nodes=2, devices=2)[3])
    assert launch == Launch("slurm", 2, 2, 1, 1, "localhost", 15000 + 7007)


def test_named_devices_are_kept_under_another_launcher():
    gpus = Machine("cuda", 8)
    for asked in ("4,5", "4, 5,", [4, 5], (4, 5)):
        launch = plan(by_torchrun(1234)[0], asked, here=gpus)
        assert devices_of(launch.devices, asked, gpus) == [4, 5]
    assert devices_of(1, "4,5", gpus) == 1, "a world that has shrunk has no use for the list"
    assert devices_of(2, "auto", gpus) == devices_of(2, 2, gpus) == devices_of(2, "4,5", CPU) == 2


def test_one_process_of_torchrun_trains_on_one_device():
    launch = plan(by_torchrun(0, nodes=1, devices=1)[0] | {"TORCHELASTIC_MAX_RESTARTS": "1"}, 2)
    for asked in ("auto", 2):
        assert on_devices_of(launch, TrainerSettings(accelerator="cpu", devices=asked)).devices == 1


def test_a_world_that_has_shrunk_wins_over_the_flags():
    env = by_torchrun(1234, nodes=1, devices=2)[0] | {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert plan(env, 2, 4).world_size == 2
    with pytest.raises(UserError, match="torchrun has started 1 x 2, and decides"):
        plan(env | {"TORCHELASTIC_MAX_RESTARTS": "0"}, 2, 4)


# What Slurm 22.05 sets in shells of salloc and in batch scripts; salloc started the last of the shells as a step.
SALLOC_2_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
SALLOC_2_TASKS = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NTASKS": "2"}
SALLOC_GPUS = SALLOC_2_NODES | {"SLURM_GPUS_PER_NODE": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
SHELL_STEP = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("env", "devices", "what", "srun"),
    [
        (SALLOC_2_NODES, "auto", "2 x 1 tasks", "srun --nodes=2 --ntasks-per-node=1"),
        (SALLOC_2_TASKS, "auto", "1 x 2 tasks", "srun --nodes=1 --ntasks-per-node=2"),
        (SALLOC_GPUS, "auto", "2 x 1 tasks", "srun --nodes=2 --ntasks-per-node=4"),
        (BATCH, "auto", "2 x 4 tasks", "srun --nodes=2 --ntasks-per-node=4"),
        (SHELL_STEP, "auto", "2 x 4 tasks", "srun --nodes=2 --ntasks-per-node=4"),
    ],
)
def test_one_process_in_a_larger_slurm_job_is_rejected(env, devices, what, srun):
    with pytest.raises(UserError) as rejected:
        plan(env, devices)
    line = f"this Slurm job has {what}, and the program was started once, without srun; type the first of these,"
    assert str(rejected.value).startswith(line)
    one_process = "srun --nodes=1 --ntasks-per-node=1 python -m r --lr 0.1"
    assert rejected.value.commands == (f"{srun} python -m r --lr 0.1", one_process)
    assert str(rejected.value).endswith(f"\n  {one_process}")
    assert plan(env, 2, 2, node_rank=1, master_addr="a").launcher == "manual"


def test_what_was_asked_for_on_one_node_of_slurm_starts_there():
    two_here = Launch("local", 1, 2, address="127.0.0.1", starts_agent=True)
    assert plan(SALLOC_2_TASKS, 2) == two_here
    assert plan(by_slurm(7, nodes=1, devices=1)[0], 2) == two_here
    assert plan({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "4"}) == Launch("local", 1, 1)
    one_of_four_gpus = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "4"}
    assert plan(one_of_four_gpus, 1, here=GPUS) == Launch("local", 1, 1), "such as a search that uses one GPU per run"


def test_a_program_typed_in_a_shell_of_srun_is_none_of_its_tasks(monkeypatch):
    shell = by_slurm(7, nodes=2, devices=1)[0] | SALLOC_2_NODES | {"SLURM_PTY_PORT": "4", "SLURM_TASK_PID": "5"}
    assert plan(shell).launcher == "slurm", "a step within the shell inherits the variable, and has no terminal"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(UserError, match=r"without srun.*\n  srun --overlap --nodes=2 --ntasks-per-node=1 python -m r"):
        plan(shell)
    assert plan(shell | {"SLURM_JOB_NUM_NODES": "1"}, 2).launcher == "local"
    assert plan(shell | {"SLURM_TASK_PID": str(os.getpid())}).launcher == "slurm", "srun --pty python"


def test_flags_win_over_slurms_variables_for_the_address():
    env = by_slurm(7, nodes=2, devices=2)[3]
    assert (plan(env).address, plan(env).port) == ("localhost", 15049)
    env |= {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert (plan(env).address, plan(env).port) == ("head", 1234)
    assert plan(env, master_addr="other").address == "other"
    assert plan(env, master_port=9).port == 9
    assert plan(by_slurm(7, nodes=1, devices=2)[1]).address == "127.0.0.1", "one machine needs no network"


def test_restarts_that_srun_does_not_make_are_noted(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("recipes.runner.launch.warn", lines.append)
    env = by_slurm(7, nodes=2, devices=1)[0]
    for settings, notes in (({}, 0), ({"max_restarts": 3}, 1), ({"nodes": "1:2"}, 1)):
        plan(env, **{"nodes": 2} | settings)
        assert len(lines) == notes, settings
        lines.clear()


def test_a_proposed_launcher_gets_no_flag_that_contradicts_it():
    typed = Command("python -m r", ["--node-rank", "0", "--master-addr=n1", "--devices", "2", "--lr", "0.1"])
    assert typed.started_by("slurm", 2, 4).using() == "srun --nodes=2 --ntasks-per-node=4 python -m r --lr 0.1"


def test_torchrun_within_a_step_of_slurm_decides():
    assert plan(by_torchrun(1234)[1] | by_slurm(7, nodes=1, devices=2)[0]).launcher == "torchrun"


def test_a_worker_takes_its_place_from_torchs_agent():
    agent = Launch("manual", 4, 2, address="a", port=1234, starts_agent=True, min_nodes=1, max_restarts=3)
    env = by_torchrun(9, nodes=2, devices=2)[3] | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "1"}
    expected = Launch("manual", 2, 2, 1, 1, "127.0.0.1", 9, max_restarts=3, restarts=True, store_prefix="b")
    assert agent.of_worker(env, "b") == expected
    last = agent.of_worker(
        by_torchrun(9)[1] | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "3"}, "b"
    )
    assert (last.launcher, last.restarts) == ("local", False)
    with pytest.raises(UserError, match="this node has 2 of the 3 processes of 2 nodes; expected as many on each node"):
        agent.of_worker(env | {"WORLD_SIZE": "3"}, "b")


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        ({}, {"nodes": 4}, "python -m r --lr 0.1 --devices=auto --num_nodes 4 --node-rank I --master-addr HOST"),
        ({}, {"nodes": 4}, "torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 1"),
        ({}, {"nodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank=2: expected 0 to 1; the run has 2 nodes"),
        ({"NODE_RANK": "one"}, {"nodes": 2}, "NODE_RANK=one, which is not a whole number"),
        (
            {},
            {"nodes": 2, "node_rank": 0, "master_addr": "a", "master_port": 70000},
            "master_port=70000: expected a whole number from 1 to 65,535",
        ),
        (
            {},
            {"devices": 8, "here": GPUS},
            "this machine has 2 (cuda): python -m r --lr 0.1 --num_nodes 1 --devices 2",
        ),
        ({}, {"nodes": "4:2"}, "num_nodes='4:2': expected a number of nodes, or MIN:MAX as in 1:4"),
        ({}, {"devices": 9999}, "devices=9999 starts 9999 processes on"),
        ({}, {"devices": "0,1"}, "names devices by number, and the processes of a CPU have none: python -m r --lr 0.1"),
        ({}, {"devices": 0}, "devices=0 requests none; pass 1 or more, auto, or indices such as 0,1"),
        (
            {},
            {"here": Machine("cuda", 0)},
            "there is no cuda device here: python -m r --lr 0.1",
        ),
        (by_torchrun(1)[0], {"devices": 4}, "decides: torchrun --standalone --nproc-per-node 2 -m r --lr 0.1"),
        (by_torchrun(1)[0], {"master_port": 9}, "pass --master-addr and --master-port to torchrun itself"),
        (by_slurm(1)[0], {"nodes": 3}, "decides: srun --nodes=1 --ntasks-per-node=2 python -m r --lr 0.1"),
        (by_slurm(1, 2, 4)[0], {"here": GPUS}, ": srun --nodes=2 --ntasks-per-node=2 python -m r --lr 0.1"),
        (by_slurm(1)[0] | {"SLURM_NTASKS": "3", "SLURM_NNODES": "2"}, {}, "expected as many on each: srun --nodes=2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}, "one of 2 processes; set RANK, LOCAL_RANK and MASTER_ADDR"),
        (BY_HAND | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"}, {}, "process 0 (RANK) of 3 (WORLD_SIZE) is process"),
        (by_slurm(1, 2)[0] | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, {}, "Slurm has started 3,1 processes on 2 nodes"),
    ],
)
def test_what_cannot_succeed_names_the_command_to_type(env, arguments, message):
    with pytest.raises(UserError) as rejected:
        plan(env, **arguments)
    assert message in str(rejected.value)


def test_ranks_in_the_environment_give_the_number_of_devices():
    env = BY_HAND | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert plan(env) == Launch("manual", 1, 2, 0, 1, "head", 9)
    env = BY_HAND | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert plan(env) == plan(env, 2, 2, here=GPUS) == Launch("manual", 2, 2, 1, 1, "head", 9)
    assert plan(BY_HAND | {"WORLD_SIZE": "1"}) == Launch("local", 1, 1)


def test_the_first_host_is_read_from_slurms_list():
    assert first_host("rack[07-12,15]-n[3],login") == "rack07-n3"


def test_a_slurm_task_without_a_step_is_local():
    assert plan({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).launcher == "local"


def test_an_update_that_the_devices_cannot_share_is_rejected():
    for samples, batch_size, devices in ((None, 256, 8), (512, 256, 2), (100, "auto", 8)):
        check_shared_update(Launch("local", 1, devices), samples, batch_size)
    with pytest.raises(UserError, match="of 100 has 1 micro-batches of 256, and there are 2 devices: .* of 50 or less"):
        check_shared_update(Launch("local", 1, 2), 100, 256)
    with pytest.raises(UserError, match="num_nodes='1:4': the number of devices may change.* pass `global_batch_size`"):
        check_shared_update(Launch("manual", 4, 1, min_nodes=1), None, 256)
